"""Activations in NVFP4: e2m1 codes, one e4m3 scale per 16 values of a token, one fp32 scale for all.

    scale[m, g] = e4m3(min(inverse_global * (max_{k in g} |x[m, k]| * (1 / 6)), 448))
    code[m, k]  = e2m1(clamp(x[m, k] * (1 / (scale[m, g] * (1 / inverse_global))), -6, 6)),    0 where the scale is 0

Bit-equal to vLLM's reference quantiser for finite x (`epilora/quant/nvfp4.py`, which says how ties are rounded). The global scale is
the checkpoint's, known before the call, so that tokens do not depend on each other. Scales come in rows of blocks, not in the
swizzled layout that CUTLASS reads. A NaN is passed over by the largest magnitude and has code 0; an infinity gets the largest code.

Legend: M tokens, K in features (a multiple of 16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.formats import Format, ScaleAxis
from ..quant.nvfp4 import BLOCK, quantize_nvfp4_ref
from ..quant.operand import Operand
from .dispatch import Implementation, choose
from .quantize import ACTIVATION_DTYPES
from .tiles import INTERPRETED, check, check_tensor, to_e4m3


@triton.jit
def _code(value):
    """Four-bit codes (int32) of fp32 values, saturated at +-6; ties go to the even code, zero has no sign."""
    m = tl.abs(value)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return tl.where((value < 0) & (code > 0), code | 8, code)


@triton.jit
def _quantize_nvfp4_kernel(
    x_ptr, stride_xm, codes_ptr, scales_ptr, inverse_ptr, K, STEP: tl.constexpr, ROUND_FIRST: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_ptr)
    whole = tl.div_rn(1.0, inverse)
    blocks = tl.cdiv(K, 16)
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        offs = block[:, None] * 16 + tl.arange(0, 16)[None, :]  # [STEP, 16]
        x = tl.load(x_ptr + row * stride_xm + offs, mask=offs < K, other=0.0).to(tl.float32)
        amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)  # noqa: PLR0124  # passes over NaN
        scale = to_e4m3(tl.minimum(inverse * (amax * (1.0 / 6.0)), 448.0), ROUND_FIRST)
        tl.store(scales_ptr + row * blocks + block, scale, mask=block < blocks)
        step = scale.to(tl.float32) * whole
        one = tl.zeros((STEP,), tl.float32) + 1.0
        per_step = tl.where(step == 0.0, 0.0, tl.div_rn(one, tl.where(step == 0.0, 1.0, step)))
        code = _code(x * per_step[:, None])
        low, high = tl.split(tl.reshape(code, (STEP, 8, 2)))  # even and odd columns
        packed = (low | (high << 4)).to(tl.uint8)
        at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(codes_ptr + row * (K // 2) + at, packed, mask=at < K // 2)


def quantize_nvfp4(
    x: torch.Tensor,
    inverse_global_scale: torch.Tensor,
    *,
    codes_out: torch.Tensor | None = None,
    scales_out: torch.Tensor | None = None,
    implementation: Implementation | str | None = None,
) -> Operand:
    """Quantise activations to NVFP4.

    x: [M, K] bf16 or fp16, last axis contiguous, K a multiple of 16. inverse_global_scale: fp32 [1], 448 * 6 over the largest magnitude
    expected (vLLM's name for it: the input's global scale). codes_out: uint8 [M, K / 2], scales_out: float8_e4m3fn [M, K / 16], contiguous.
    Returns the operand of codes, scales and 1 / inverse_global_scale; M = 0 launches nothing. Raises TypeError or ValueError naming
    the argument that does not fit.
    """
    name = "quantize_nvfp4"
    check_tensor(name, "x", x, dim=2, dtypes=ACTIVATION_DTYPES)
    M, K = x.shape
    check(K % BLOCK == 0, name, f"x has K={K}; needed: a multiple of {BLOCK}")
    check_tensor(name, "inverse_global_scale", inverse_global_scale, dtypes=(torch.float32,), device=x.device)
    check(
        inverse_global_scale.numel() == 1,
        name,
        f"inverse_global_scale has {inverse_global_scale.numel()} values; needed: 1",
    )
    codes = torch.empty((M, K // 2), dtype=torch.uint8, device=x.device) if codes_out is None else codes_out
    scales = codes.new_empty((M, K // BLOCK), dtype=torch.float8_e4m3fn) if scales_out is None else scales_out
    for what, tensor, dtype, columns in (
        ("codes_out", codes, torch.uint8, K // 2),
        ("scales_out", scales, torch.float8_e4m3fn, K // BLOCK),
    ):
        check_tensor(name, what, tensor, dim=2, dtypes=(dtype,), device=x.device)
        good = tuple(tensor.shape) == (M, columns) and tensor.is_contiguous()
        check(good, name, f"{what} is {tuple(tensor.shape)}; needed: contiguous {(M, columns)}")
    picked = choose(name, x.device, implementation)
    whole = 1.0 / inverse_global_scale.reshape(1)
    if picked is Implementation.REFERENCE and M:
        ref = quantize_nvfp4_ref(x, inverse_global_scale)
        codes.copy_(ref.values)
        assert ref.scales is not None, "NVFP4 carries scales"
        scales.copy_(ref.scales)
    elif M:
        _quantize_nvfp4_kernel[(M,)](
            x, x.stride(0), codes, scales, inverse_global_scale, K, STEP=min(128, triton.next_power_of_2(K // BLOCK)),
            ROUND_FIRST=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return Operand(codes, Format.NVFP4, ScaleAxis.BLOCK, scales, block=(1, BLOCK), global_scale=whole)
