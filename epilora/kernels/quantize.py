"""Dynamic FP8 quantisation of activations, per token or per group of 128 values of a token.

    scale[m] = max(max_k |x[m, k]| / 448, 1 / (448 * 512)),   code[m, k] = e4m3(clamp(x[m, k] / scale[m], -448, 448))

Groups (for block-scaled weights): the same within each, under another smallest scale; bit-equal to vLLM's
`per_token_group_fp8_quant`, see `epilora/quant/block_fp8.py`. Per token: bit-equal to vLLM's `dynamic_per_token_scaled_fp8_quant` (true divisions, round to nearest even), NaN and infinity included:
see `epilora/quant/reference.py`. vLLM's compiled graphs multiply by the reciprocal instead; those codes differ in rare ties.

Legend: M tokens, K in features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.block_fp8 import BLOCK, OP_SMALLEST_SCALE, quantize_groups_ref
from ..quant.reference import quantize_per_token_ref
from .dispatch import Implementation, choose
from .tiles import INTERPRETED, check, check_tensor, to_e4m3

quantize_ref = quantize_per_token_ref
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def quantize_row(x_row_ptr, xq_row_ptr, x_scale_ptr, K, BLOCK_K: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Quantise one row of K values; BLOCK_K columns at a time, read twice (the second time from the caches)."""
    offs = tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_row_ptr + k + offs, mask=k + offs < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(x == x, tl.abs(x), 0.0))  # noqa: PLR0124  # passes over NaN
    amax = tl.max(largest, axis=0)
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.0 / (448.0 * 512.0))
    tl.store(x_scale_ptr, scale)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_row_ptr + k + offs, mask=k + offs < K, other=0.0).to(tl.float32)
        q = tl.div_rn(x, tl.zeros((BLOCK_K,), tl.float32) + scale)
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -448.0), 448.0), 448.0)  # noqa: PLR0124
        tl.store(xq_row_ptr + k + offs, to_e4m3(q, ROUND_FIRST), mask=k + offs < K)


@triton.jit
def quantize_row_groups(
    x_row_ptr, xq_row_ptr, x_scale_row_ptr, K, smallest_scale, STEP: tl.constexpr, GROUP: tl.constexpr, ROUND_FIRST: tl.constexpr
):  # fmt: skip
    """Quantise one row of K values in groups of GROUP columns, STEP groups at a time; scales lie side by side."""
    num_groups = tl.cdiv(K, GROUP)
    for first in range(0, num_groups, STEP):
        group = first + tl.arange(0, STEP)
        offs = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [STEP, GROUP]
        x = tl.load(x_row_ptr + offs, mask=offs < K, other=0.0).to(tl.float32)
        amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)  # noqa: PLR0124  # passes over NaN
        scale = tl.maximum(tl.div_rn(amax, tl.zeros((STEP,), tl.float32) + 448.0), smallest_scale)
        tl.store(x_scale_row_ptr + group, scale, mask=group < num_groups)
        q = tl.div_rn(x, tl.zeros((STEP, GROUP), tl.float32) + scale[:, None])
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -448.0), 448.0), -448.0)  # noqa: PLR0124
        tl.store(xq_row_ptr + offs, to_e4m3(q, ROUND_FIRST), mask=offs < K)


@triton.jit
def _quantize_groups_kernel(
    x_ptr, stride_xm, xq_ptr, x_scale_ptr, K, smallest_scale, STEP: tl.constexpr, GROUP: tl.constexpr, ROUND_FIRST: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_scale_row = x_scale_ptr + row * tl.cdiv(K, GROUP)
    quantize_row_groups(
        x_ptr + row * stride_xm, xq_ptr + row * K, x_scale_row, K, smallest_scale, STEP, GROUP, ROUND_FIRST
    )


@triton.jit
def _quantize_kernel(x_ptr, stride_xm, xq_ptr, x_scale_ptr, K, BLOCK_K: tl.constexpr, ROUND_FIRST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    quantize_row(x_ptr + row * stride_xm, xq_ptr + row * K, x_scale_ptr + row, K, BLOCK_K, ROUND_FIRST)


def quantize(
    x: torch.Tensor,
    *,
    codes_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    implementation: Implementation | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations per token.

    x: [M, K] bf16 or fp16, last axis contiguous. codes_out: [M, K] float8_e4m3fn, contiguous; scale_out: [M, 1] fp32.
    implementation: see `dispatch.choose`. Returns (codes, scale); M = 0 launches nothing.
    Raises TypeError for a dtype, ValueError for a shape, stride or device that does not fit.
    """
    check_tensor("quantize", "x", x, dim=2, dtypes=ACTIVATION_DTYPES)
    M, K = x.shape
    codes = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x.device) if codes_out is None else codes_out
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device) if scale_out is None else scale_out
    check_tensor("quantize", "codes_out", codes, dim=2, dtypes=(torch.float8_e4m3fn,), device=x.device)
    check_tensor("quantize", "scale_out", scale, dtypes=(torch.float32,), device=x.device)
    check(
        codes.shape == x.shape and codes.is_contiguous(),
        "quantize",
        f"codes_out is {tuple(codes.shape)}; needed: contiguous {(M, K)}",
    )
    check(scale.numel() == M, "quantize", f"scale_out has {scale.numel()} values; needed: {M}")
    picked = choose("quantize", x.device, implementation)
    if M == 0:
        return codes, scale
    if picked is Implementation.REFERENCE:
        ref_codes, ref_scale = quantize_ref(x)
        codes.copy_(ref_codes)
        scale.copy_(ref_scale.view_as(scale))
        return codes, scale
    block = min(4096, triton.next_power_of_2(K))
    _quantize_kernel[(M,)](
        x, x.stride(0), codes, scale, K, BLOCK_K=block, ROUND_FIRST=INTERPRETED, num_warps=8 if block >= 2048 else 4
    )
    return codes, scale


def groups_at_once(K: int) -> int:
    """Groups of a row that one step of a program quantises: a power of two, at most 16."""
    return min(16, triton.next_power_of_2(triton.cdiv(K, BLOCK)))


def quantize_groups(
    x: torch.Tensor,
    *,
    smallest_scale: float = OP_SMALLEST_SCALE,
    codes_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    implementation: Implementation | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations per token and group of 128 values, for a base with 128 x 128 blocks.

    x: [M, K] bf16 or fp16, last axis contiguous. smallest_scale: see `epilora/quant/block_fp8.py`. codes_out: [M, K] float8_e4m3fn,
    scale_out: [M, ceil(K / 128)] fp32, both contiguous. Returns (codes, scales); M = 0 launches nothing. Raises as `quantize`.
    """
    name = "quantize_groups"
    check_tensor(name, "x", x, dim=2, dtypes=ACTIVATION_DTYPES)
    M, K = x.shape
    G = triton.cdiv(K, BLOCK)
    codes = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x.device) if codes_out is None else codes_out
    scale = torch.empty((M, G), dtype=torch.float32, device=x.device) if scale_out is None else scale_out
    check_tensor(name, "codes_out", codes, dim=2, dtypes=(torch.float8_e4m3fn,), device=x.device)
    check_tensor(name, "scale_out", scale, dim=2, dtypes=(torch.float32,), device=x.device)
    for what, tensor, shape in (("codes_out", codes, (M, K)), ("scale_out", scale, (M, G))):
        good = tuple(tensor.shape) == shape and tensor.is_contiguous()
        check(good, name, f"{what} is {tuple(tensor.shape)}; needed: contiguous {shape}")
    picked = choose(name, x.device, implementation)
    if M == 0:
        return codes, scale
    if picked is Implementation.REFERENCE:
        ref_codes, ref_scale = quantize_groups_ref(x, smallest_scale=smallest_scale)
        codes.copy_(ref_codes)
        scale.copy_(ref_scale)
        return codes, scale
    _quantize_groups_kernel[(M,)](
        x, x.stride(0), codes, scale, K, smallest_scale, STEP=groups_at_once(K), GROUP=BLOCK, ROUND_FIRST=INTERPRETED, num_warps=4
    )  # fmt: skip
    return codes, scale
