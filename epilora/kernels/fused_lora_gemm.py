"""K2: an FP8 GEMM whose epilogue scales, adds each row's up-projection and scatters the rows back.

    y[m, n] = round( (sum_k xq[m, k] W[n, k]) * w_scale[n] * x_scale[m] + bias[n] + sum_r h[m, s(n), r] B[s(n), slot(m)][n, r] )

Rows of a tile are tokens `sorted_tokens[i]` (adapter order, so that a tile meets few adapters) or simply token i. A tile may hold
rows of several adapters: for each distinct one the epilogue multiplies the tile's h by that adapter's slice of B on the
tensor cores and keeps the result in that adapter's rows only (a select, not a product with zero, so that an infinity in one
adapter cannot reach another's rows). h comes as split-K partials, is summed in order and rounded once to the adapters'
16-bit type. With SWAP_AB the weights are the wide operand of the MMA and the few tokens the narrow one.

FP8 accumulation: on Hopper the tensor core keeps about 14 bits of mantissa inside one run; `max_num_imprecise_acc` = 128 moves the
run into fp32 registers every 128 values of K, so the error does not grow with K. (The CUDA decode path has no such runs.)

Legend: M tokens, N out features, K in features, R rank, S slices, L adapter slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quant.formats import ScaleAxis
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import check_weight, shared_limit
from .dispatch import Implementation, choose
from .lora_shrink import check_adapters, scales_or_values, valid_slots_ref
from .tiles import any_active, check, check_tensor, pad4, pick4, slice_ends, slice_of

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NUM_IMPRECISE_ACC = 128


def fused_lora_gemm_ref(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Operand,
    h: torch.Tensor | None = None,
    lora_b: Sequence[Operand] = (),
    token_lora_indices: torch.Tensor | None = None,
    *,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N] in fp32 (not rounded). h: [splits, S, M, R] or None for no adapters."""
    y = (xq.float() @ weight.values.float().t()) * x_scale.float().view(-1, 1)
    assert weight.scales is not None, "an FP8 operand has scales"
    y = y * weight.scales.float().reshape(1, -1)
    if bias is not None:
        y = y + bias.float()
    if h is None or token_lora_indices is None:
        return y
    slots = valid_slots_ref(token_lora_indices[: xq.shape[0]], lora_b[0].values.shape[0], active_lora_ids)
    begin = 0
    for s, operand in enumerate(lora_b):
        stack = dequantize(operand)
        width = stack.shape[1]
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows = slots == slot
                total = h[:, s, rows].float().sum(0)
                y[rows, begin : begin + width] += total @ stack[slot].t()
        begin += width
    return y


@dataclass(frozen=True)
class GemmConfig:
    """Launch of K2. swap_ab: weights as the MMA's row operand (few tokens)."""

    block_m: int = 16
    block_n: int = 64
    block_k: int = 256
    swap_ab: bool = True
    num_warps: int = 4
    num_stages: int = 4


def is_legal(config: GemmConfig, slices: Sequence[int], shared_bytes: int = 227 * 1024) -> bool:
    """Whether a config can be launched: powers of two, at least 16 (32 along K), slices made of whole column tiles, pipeline fits."""
    sizes = (config.block_m, config.block_n, config.block_k, config.num_warps)
    powers = all(v > 0 and v & (v - 1) == 0 for v in sizes)
    fits = (config.block_m + config.block_n) * config.block_k * max(1, config.num_stages - 1) <= shared_bytes
    least = config.block_m >= 16 and config.block_n >= 16 and config.block_k >= 32
    return powers and least and fits and all(width % config.block_n == 0 for width in slices[:-1])


def config_for(M: int, slices: Sequence[int], K: int, shared_bytes: int = 227 * 1024) -> GemmConfig:
    """Stated default by tokens; column tiles shrink until every slice is made of whole ones, stages until they fit.

    Raises ValueError if a slice but the last is no multiple of 16.
    """
    if M <= 32:
        base = GemmConfig(block_m=16 if M <= 16 else 32, block_n=64, block_k=256 if K >= 256 else 64)
    else:
        base = GemmConfig(block_m=64 if M <= 64 else 128, block_n=128, block_k=128, swap_ab=False, num_warps=8)
    block_n = base.block_n
    while block_n >= 16:
        for stages in (base.num_stages, 3, 2):
            picked = dataclasses.replace(base, block_n=block_n, num_stages=stages)
            if is_legal(picked, slices, shared_bytes):
                return picked
        block_n //= 2
    raise ValueError(f"fused_lora_gemm: slices={tuple(slices)}; every slice but the last must be a multiple of 16")


@triton.jit
def _fused_lora_gemm_kernel(
    xq_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, h_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr, stride_bl0, stride_bl1, stride_bl2, stride_bl3, stride_bn,
    slot_ptr, sorted_ptr, active_ptr, num_active, y_ptr, stride_ym,
    M, N, K, R, num_slots, end0, end1, end2,
    NUM_SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    SWAP_AB: tl.constexpr, SCALE_PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, B_IS_FP8: tl.constexpr,
    H_DTYPE: tl.constexpr, HAS_SORTED: tl.constexpr, HAS_ACTIVE: tl.constexpr, ACTIVE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr,
    IMPRECISE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    row_ok = pid_m * BLOCK_M + rows < M
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    offs_k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + offs_n.to(tl.int64) * K
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # for xq, x_scale, h and the slot ids
    if HAS_SORTED:
        token = tl.load(sorted_ptr + pid_m * BLOCK_M + rows, mask=row_ok, other=0)
        row_ok = row_ok & (token >= 0) & (token < M)
    else:
        token = pid_m * BLOCK_M + rows
    token = tl.where(row_ok, token, 0)
    x_rows = xq_ptr + token.to(tl.int64) * K
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        kk = k + offs_k
        if SWAP_AB:
            if EVEN_K:
                w = tl.load(w_rows[:, None] + kk[None, :], mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
                x = tl.load(x_rows[None, :] + kk[:, None], mask=row_ok[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
            else:
                w = tl.load(w_rows[:, None] + kk[None, :], mask=mask_n[:, None] & (kk[None, :] < K), other=0.0)
                x = tl.load(x_rows[None, :] + kk[:, None], mask=row_ok[None, :] & (kk[:, None] < K), other=0.0)
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=IMPRECISE)
        else:
            if EVEN_K:
                x = tl.load(x_rows[:, None] + kk[None, :], mask=row_ok[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
                w = tl.load(w_rows[None, :] + kk[:, None], mask=mask_n[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
            else:
                x = tl.load(x_rows[:, None] + kk[None, :], mask=row_ok[:, None] & (kk[None, :] < K), other=0.0)
                w = tl.load(w_rows[None, :] + kk[:, None], mask=mask_n[None, :] & (kk[:, None] < K), other=0.0)
            acc = tl.dot(x, w, acc, max_num_imprecise_acc=IMPRECISE)
    if SWAP_AB:
        acc = tl.trans(acc)  # [BLOCK_M, BLOCK_N]
    if SCALE_PER_CHANNEL:
        w_scale = tl.load(w_scale_ptr + offs_n, mask=mask_n, other=0.0)
    else:
        w_scale = tl.load(w_scale_ptr) + tl.zeros((BLOCK_N,), tl.float32)
    acc = acc * w_scale[None, :] * tl.load(x_scale_ptr + token, mask=row_ok, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if HAS_LORA:
        slots = tl.load(slot_ptr + token, mask=row_ok, other=-1)
        slots = tl.where((slots >= 0) & (slots < num_slots), slots, -1)
        if HAS_ACTIVE:
            slots = tl.where(any_active(active_ptr, num_active, ACTIVE_BLOCK) > 0, slots, -1)
        sl = slice_of(pid_n * BLOCK_N, end0, end1, end2)
        begin = pick4(sl, 0, end0, end1, end2)
        b_ptr = pick4(sl, b0_ptr, b1_ptr, b2_ptr, b3_ptr)
        stride_bl = pick4(sl, stride_bl0, stride_bl1, stride_bl2, stride_bl3)
        offs_r = tl.arange(0, BLOCK_R)
        has = slots >= 0
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for p in tl.static_range(SPLITS):  # in this order always
            h_rows = h_ptr + ((p * NUM_SLICES + sl) * M + token[:, None]).to(tl.int64) * R
            h += tl.load(h_rows + offs_r[None, :], mask=has[:, None] & (offs_r[None, :] < R), other=0.0)
        h = h.to(H_DTYPE)
        for i in range(tl.minimum(BLOCK_M, M - pid_m * BLOCK_M)):
            slot = tl.sum(tl.where(rows == i, slots, 0), axis=0)
            earlier = tl.sum(((slots == slot) & (rows < i)).to(tl.int32), axis=0)
            if (slot >= 0) & (earlier == 0):
                b = tl.load(
                    b_ptr + slot.to(tl.int64) * stride_bl + (offs_n - begin)[None, :].to(tl.int64) * stride_bn + offs_r[:, None],
                    mask=mask_n[None, :] & (offs_r[:, None] < R), other=0.0,
                )  # fmt: skip  # [BLOCK_R, BLOCK_N]
                delta = tl.dot(h, b.to(H_DTYPE))
                if B_IS_FP8:
                    s_ptr = pick4(sl, s0_ptr, s1_ptr, s2_ptr, s3_ptr)
                    width = pick4(sl, end0, end1 - end0, end2 - end1, N - end2)
                    if NUM_SLICES == 1:
                        width = N
                    elif NUM_SLICES == 2:
                        width = pick4(sl, end0, N - end0, 0, 0)
                    elif NUM_SLICES == 3:
                        width = pick4(sl, end0, end1 - end0, N - end1, 0)
                    delta *= tl.load(s_ptr + slot * width + offs_n - begin, mask=mask_n, other=0.0)[None, :]
                acc = tl.where((slots == slot)[:, None], acc + delta, acc)
    y_tile = y_ptr + token[:, None].to(tl.int64) * stride_ym + offs_n[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=row_ok[:, None] & mask_n[None, :])


def check_up_projection(function: str, lora_b: Sequence[Operand], rank: int, N: int, x: torch.Tensor) -> list[int]:
    """Check B stacks [L, N_s, R] whose widths sum to N. Returns the widths."""
    check_adapters(function, "lora_b", lora_b, x, rank)
    widths = [o.values.shape[1] for o in lora_b]
    check(sum(widths) == N, function, f"lora_b slices are {widths} wide, together {sum(widths)}; the weight has N={N}")
    for i, o in enumerate(lora_b):
        check(
            o.values.stride(1) == lora_b[0].values.stride(1),
            function,
            f"lora_b[{i}] has row stride {o.values.stride(1)}; all slices share it",
        )
    return widths


def fused_lora_gemm(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Operand,
    h: torch.Tensor | None = None,
    lora_b: Sequence[Operand] = (),
    token_lora_indices: torch.Tensor | None = None,
    *,
    sorted_tokens: torch.Tensor | None = None,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """FP8 GEMM with the adapters' up-projection in its epilogue.

    xq: [M, K] float8_e4m3fn contiguous; x_scale: [M] or [M, 1] fp32. weight: FP8 operand [N, K], per tensor or per channel.
    h: [splits, S, M, R] fp32 from `lora_shrink`, or None for no adapters. lora_b: one operand per slice, [L, N_s, R], 16-bit or FP8
    with scales [L, N_s]. token_lora_indices: [>= M] int32. sorted_tokens: [>= M] int32 permutation of the tokens (adapter order).
    bias: [N]. out: [M, N], last axis contiguous, bf16, fp16 or fp32. use_pdl: as in `lora_shrink`.
    Returns out. Allocates only when `out` is None; never synchronises. M = 0 launches nothing.
    Raises TypeError or ValueError naming the argument that does not fit.
    """
    name = "fused_lora_gemm"
    check_tensor(name, "xq", xq, dim=2, dtypes=(torch.float8_e4m3fn,))
    M, K = xq.shape
    check(xq.is_contiguous(), name, f"xq has strides {xq.stride()}; it must be contiguous")
    check_tensor(name, "x_scale", x_scale, dtypes=(torch.float32,), device=xq.device)
    check(x_scale.numel() >= M, name, f"x_scale has {x_scale.numel()} values for {M} tokens")
    check_weight(name, weight, xq.device, K)
    N = weight.values.shape[0]
    y = torch.empty((M, N), dtype=out_dtype, device=xq.device) if out is None else out
    check_tensor(name, "out", y, dim=2, dtypes=OUT_DTYPES, device=xq.device)
    check(y.shape == (M, N), name, f"out is {tuple(y.shape)}; needed: {(M, N)}")
    has_lora = h is not None
    widths, rank, splits, num_slots = [N], 16, 1, 1
    if h is not None:
        if token_lora_indices is None:
            raise ValueError(f"{name}: h is given without token_lora_indices")
        check_tensor(name, "token_lora_indices", token_lora_indices, dim=1, dtypes=(torch.int32,), device=xq.device)
        check_tensor(name, "h", h, dim=4, dtypes=(torch.float32,), device=xq.device)
        splits, num_slices, tokens, rank = h.shape
        check(
            num_slices == len(lora_b) and tokens == M and h.is_contiguous(),
            name,
            f"h is {tuple(h.shape)}; needed: contiguous [splits, {len(lora_b)}, {M}, R]",
        )
        kind = lora_b[0].values.dtype
        like = y if kind == torch.float8_e4m3fn else lora_b[0].values
        widths = check_up_projection(name, lora_b, rank, N, like)
        num_slots = lora_b[0].values.shape[0]
    config = config or config_for(M, widths, K, shared_limit(xq.device))
    check(is_legal(config, widths), name, f"config={config} is not legal for slices {widths}; see is_legal")
    picked = choose(name, xq.device, implementation)
    if M == 0:
        return y
    if picked is Implementation.REFERENCE:
        ref = fused_lora_gemm_ref(
            xq, x_scale, weight, h, lora_b, token_lora_indices, active_lora_ids=active_lora_ids, bias=bias
        )
        return y.copy_(ref)
    some = token_lora_indices if token_lora_indices is not None else x_scale
    b = pad4([o.values for o in lora_b]) if has_lora else [x_scale] * 4
    b_scales = pad4(scales_or_values(lora_b)) if has_lora else [x_scale] * 4
    b_is_fp8 = has_lora and lora_b[0].scales is not None
    h_dtype = y.dtype if b_is_fp8 or not has_lora else lora_b[0].values.dtype
    _fused_lora_gemm_kernel[(triton.cdiv(N, config.block_n), triton.cdiv(M, config.block_m))](
        xq, x_scale, weight.values, weight.scales, weight.scales if bias is None else bias, x_scale if h is None else h,
        *b, *b_scales, *(t.stride(0) for t in b), b[0].stride(1) if has_lora else 0,
        some, some if sorted_tokens is None else sorted_tokens, some if active_lora_ids is None else active_lora_ids,
        0 if active_lora_ids is None else active_lora_ids.numel(), y, y.stride(0),
        M, N, K, rank, num_slots, *slice_ends(widths),
        NUM_SLICES=len(widths), SPLITS=splits, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        BLOCK_R=max(16, triton.next_power_of_2(rank)), SWAP_AB=config.swap_ab, SCALE_PER_CHANNEL=weight.axis is ScaleAxis.CHANNEL,
        HAS_BIAS=bias is not None, HAS_LORA=has_lora, B_IS_FP8=b_is_fp8, H_DTYPE=_TRITON_DTYPE[h_dtype],
        HAS_SORTED=sorted_tokens is not None, HAS_ACTIVE=active_lora_ids is not None,
        ACTIVE_BLOCK=triton.next_power_of_2(active_lora_ids.numel()) if active_lora_ids is not None else 1,
        EVEN_K=K % config.block_k == 0, IMPRECISE=min(MAX_NUM_IMPRECISE_ACC, config.block_k), USE_PDL=use_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return y


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
