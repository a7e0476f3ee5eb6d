"""K2: an FP8 GEMM whose epilogue scales, adds each row's up-projection and scatters the rows back.

    y[m, n] = round( (sum_k xq[m, k] W[n, k]) * w_scale[n] * x_scale[m] + bias[n] + sum_r h[m, s(n), r] B[s(n), slot(m)][n, r] )

Rows of a tile are tokens `sorted_tokens[i]` (adapter order, so that a tile meets few adapters) or simply token i. A tile may hold
rows of several adapters: for each distinct one the epilogue multiplies the tile's h by that adapter's slice of B on the
tensor cores and keeps the result in that adapter's rows only (a select, not a product with zero, so that an infinity in one
adapter cannot reach another's rows). h comes as split-K partials, is summed in order and rounded once to the adapters'
16-bit type. With SWAP_AB the weights are the wide operand of the MMA and the few tokens the narrow one.

FP8 accumulation: on Hopper the tensor core keeps about 14 bits of mantissa inside one run; `max_num_imprecise_acc` = 128 moves the
run into fp32 registers every 128 values of K, so the error does not grow with K. (The CUDA decode path has no such runs.)

Block-scaled weights (128 x 128) and activations (1 x 128) take one more step: every 128 values of K the run's sum is multiplied by both
scales and added in fp32, in the order of K; the epilogue then has no scale to apply.

NVFP4 weights and activations (W4A4): `tl.dot_scaled` where the tensor cores multiply such numbers (compute capability 10 and 12), else
both operands widened to 16 bits in registers, exactly, and multiplied there: the same products, summed in fp32. The two global
scales multiply the sum.

Legend: M tokens, N out features, K in features, R rank, S slices, L adapter slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quant.block_fp8 import BLOCK, block_gemm_ref
from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import WeightKind, check_weight, multiplies_nvfp4, shared_limit, stack_pointers, weight_kind
from .dispatch import Implementation, choose
from .lora_shrink import check_adapters, valid_slots_ref
from .nvfp4_tile import load_nvfp4_rows, nvfp4_unit, widen_nvfp4
from .tiles import INTERPRETED, any_active, check, check_tensor, pad4, pick4, slice_ends, slice_of

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
    x_global_scale: torch.Tensor | None = None,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N] in fp32 (not rounded). h: [splits, S, M, R] or None for no adapters."""
    assert weight.scales is not None, "an FP8 operand has scales"
    if weight.format is Format.NVFP4:
        assert x_global_scale is not None, "NVFP4 activations have a global scale"
        x = Operand(xq, Format.NVFP4, ScaleAxis.BLOCK, x_scale, weight.block, x_global_scale)
        y = dequantize(x) @ dequantize(weight).t()
    elif weight.axis is ScaleAxis.BLOCK:
        y = block_gemm_ref(xq, x_scale, weight)
    else:
        y = (xq.float() @ weight.values.float().t()) * x_scale.float().view(-1, 1)
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


def is_legal(
    config: GemmConfig, slices: Sequence[int], shared_bytes: int = 227 * 1024, *, kind: WeightKind | None = None
) -> bool:
    """Whether a config can be launched: powers of two, at least 16 (32 along K), slices made of whole column tiles, pipeline fits;
    with block scales a step along K inside one block, with NVFP4 at least 64 values of K a step.

    kind: ScaleAxis.BLOCK, Format.NVFP4 or None, see `weight_kind`.
    """
    sizes = (config.block_m, config.block_n, config.block_k, config.num_warps)
    powers = all(v > 0 and v & (v - 1) == 0 for v in sizes)
    fits = (config.block_m + config.block_n) * config.block_k * max(1, config.num_stages - 1) <= shared_bytes
    least = config.block_m >= 16 and config.block_n >= 16 and config.block_k >= 32
    inside = kind is not ScaleAxis.BLOCK or BLOCK % config.block_k == 0
    inside = inside and (kind is not Format.NVFP4 or config.block_k >= 64)
    return powers and least and fits and inside and all(width % config.block_n == 0 for width in slices[:-1])


def config_for(
    M: int, slices: Sequence[int], K: int, shared_bytes: int = 227 * 1024, *, kind: WeightKind | None = None
) -> GemmConfig:
    """Stated default by tokens; column tiles shrink until every slice is made of whole ones, stages until they fit.

    Raises ValueError if a slice but the last is no multiple of 16.
    """
    if M <= 32:
        base = GemmConfig(block_m=16 if M <= 16 else 32, block_n=64, block_k=256 if K >= 256 else 64)
    else:
        base = GemmConfig(block_m=64 if M <= 64 else 128, block_n=128, block_k=128, swap_ab=False, num_warps=8)
    if kind is ScaleAxis.BLOCK:  # a step's sum beside the tile: 128 x 128 spills
        base = dataclasses.replace(base, block_k=min(base.block_k, BLOCK), block_n=64 if M > 64 else base.block_n)
    if kind is Format.NVFP4:  # sm_100 multiplies NVFP4 only in tiles of 128 rows, which are the weights' or the tokens'
        few = GemmConfig(block_m=16 if M <= 16 else 32, block_n=128, block_k=128, num_stages=3)
        base = few if M <= 32 else GemmConfig(128, 64, 128, swap_ab=False, num_warps=8, num_stages=2)
    block_n = base.block_n
    while block_n >= 16:
        for stages in (base.num_stages, 3, 2):
            picked = dataclasses.replace(base, block_n=block_n, num_stages=stages)
            if is_legal(picked, slices, shared_bytes, kind=kind):
                return picked
        block_n //= 2
    raise ValueError(f"fused_lora_gemm: slices={tuple(slices)}; every slice but the last must be a multiple of 16")


@triton.jit
def _fused_lora_gemm_kernel(
    xq_ptr, x_scale_ptr, xg_ptr, w_ptr, w_scale_ptr, wg_ptr, bias_ptr, h_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, stride_bl0, stride_bl1, stride_bl2, stride_bl3, stride_bn,
    slot_ptr, sorted_ptr, active_ptr, num_active, y_ptr, stride_ym,
    M, N, K, R, num_slots, end0, end1, end2, stride_hp, stride_hs, stride_hm,
    NUM_SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    SWAP_AB: tl.constexpr, SCALE_PER_CHANNEL: tl.constexpr, SCALE_BLOCK: tl.constexpr, W_NVFP4: tl.constexpr, NATIVE_FP4: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, B_IS_FP8: tl.constexpr,
    B_IS_NVFP4: tl.constexpr,
    H_DTYPE: tl.constexpr, HAS_SORTED: tl.constexpr, HAS_ACTIVE: tl.constexpr, ACTIVE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr,
    IMPRECISE: tl.constexpr, ROUND_FIRST: tl.constexpr, USE_PDL: tl.constexpr,
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
    token = pid_m * BLOCK_M + rows
    if HAS_SORTED:
        listed = tl.load(sorted_ptr + token, mask=row_ok, other=0)
        if HAS_ACTIVE:  # with nobody active the list may be an older batch's
            listed = tl.where(any_active(active_ptr, num_active, ACTIVE_BLOCK) > 0, listed, token)
        token = listed
        row_ok = row_ok & (token >= 0) & (token < M)
    token = tl.where(row_ok, token, 0)
    x_rows = xq_ptr + token.to(tl.int64) * K
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALE_BLOCK > 0:
        num_groups = tl.cdiv(K, SCALE_BLOCK)
        x_scale_rows = x_scale_ptr + token.to(tl.int64) * num_groups
        w_scale_rows = w_scale_ptr + (tl.minimum(offs_n, N - 1) // SCALE_BLOCK) * num_groups
    if W_NVFP4:
        WIDE: tl.constexpr = (
            tl.float16 if ROUND_FIRST else tl.bfloat16
        )  # the interpreter's bf16 products are not to be trusted
        xq_rows = xq_ptr + token.to(tl.int64) * (K // 2)
        xs_rows = x_scale_ptr + token.to(tl.int64) * (K // 16)
        wq_rows = w_ptr + offs_n.to(tl.int64) * (K // 2)
        ws_rows = w_scale_ptr + offs_n.to(tl.int64) * (K // 16)
    for k in range(0, K, BLOCK_K):
        kk = k + offs_k
        if SCALE_BLOCK > 0:  # of this step's block of K
            x_scale = tl.load(x_scale_rows + k // SCALE_BLOCK)  # [BLOCK_M]
            w_scale = tl.load(w_scale_rows + k // SCALE_BLOCK)  # [BLOCK_N]
        if W_NVFP4:
            half = k // 2 + tl.arange(0, BLOCK_K // 2)
            block = k // 16 + tl.arange(0, BLOCK_K // 16)
            mask_half, mask_block = (half * 2 < K)[None, :], (block * 16 < K)[None, :]
            x = tl.load(xq_rows[:, None] + half[None, :], mask=row_ok[:, None] & mask_half, other=0)
            xs = tl.load(xs_rows[:, None] + block[None, :], mask=row_ok[:, None] & mask_block, other=0.0)
            w = tl.load(wq_rows[:, None] + half[None, :], mask=mask_n[:, None] & mask_half, other=0)
            ws = tl.load(ws_rows[:, None] + block[None, :], mask=mask_n[:, None] & mask_block, other=0.0)
            if NATIVE_FP4:
                if SWAP_AB:
                    acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)
                else:
                    acc = tl.dot_scaled(x, xs, "e2m1", tl.trans(w), ws, "e2m1", acc)
            else:
                wide_x = widen_nvfp4(x, xs, BLOCK_M, BLOCK_K, WIDE)
                wide_w = widen_nvfp4(w, ws, BLOCK_N, BLOCK_K, WIDE)
                if SWAP_AB:
                    acc = tl.dot(wide_w, tl.trans(wide_x), acc)
                else:
                    acc = tl.dot(wide_x, tl.trans(wide_w), acc)
        elif SWAP_AB:
            if EVEN_K:
                w = tl.load(w_rows[:, None] + kk[None, :], mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
                x = tl.load(x_rows[None, :] + kk[:, None], mask=row_ok[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
            else:
                w = tl.load(w_rows[:, None] + kk[None, :], mask=mask_n[:, None] & (kk[None, :] < K), other=0.0)
                x = tl.load(x_rows[None, :] + kk[:, None], mask=row_ok[None, :] & (kk[:, None] < K), other=0.0)
            if SCALE_BLOCK > 0:
                acc += tl.dot(w, x) * w_scale[:, None] * x_scale[None, :]
            else:
                acc = tl.dot(w, x, acc, max_num_imprecise_acc=IMPRECISE)
        else:
            if EVEN_K:
                x = tl.load(x_rows[:, None] + kk[None, :], mask=row_ok[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
                w = tl.load(w_rows[None, :] + kk[:, None], mask=mask_n[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
            else:
                x = tl.load(x_rows[:, None] + kk[None, :], mask=row_ok[:, None] & (kk[None, :] < K), other=0.0)
                w = tl.load(w_rows[None, :] + kk[:, None], mask=mask_n[None, :] & (kk[:, None] < K), other=0.0)
            if SCALE_BLOCK > 0:
                acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
            else:
                acc = tl.dot(x, w, acc, max_num_imprecise_acc=IMPRECISE)
    if SWAP_AB:
        acc = tl.trans(acc)  # [BLOCK_M, BLOCK_N]
    if W_NVFP4:
        whole = tl.load(wg_ptr) * tl.load(xg_ptr)
        if NATIVE_FP4:
            acc = acc * whole
        else:
            acc = acc * nvfp4_unit(WIDE) * nvfp4_unit(WIDE) * whole
    elif SCALE_BLOCK == 0:
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
        s_ptr = pick4(sl, s0_ptr, s1_ptr, s2_ptr, s3_ptr)
        width = pick4(sl, end0, end1 - end0, end2 - end1, N - end2)
        if NUM_SLICES == 1:
            width = N
        elif NUM_SLICES == 2:
            width = pick4(sl, end0, N - end0, 0, 0)
        elif NUM_SLICES == 3:
            width = pick4(sl, end0, end1 - end0, N - end1, 0)
        offs_r = tl.arange(0, BLOCK_R)
        has = slots >= 0
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for p in tl.static_range(SPLITS):  # in this order always
            h_rows = h_ptr + p * stride_hp + sl * stride_hs + token[:, None].to(tl.int64) * stride_hm
            h += tl.load(h_rows + offs_r[None, :], mask=has[:, None] & (offs_r[None, :] < R), other=0.0)
        h = h.to(H_DTYPE)
        for i in range(tl.minimum(BLOCK_M, M - pid_m * BLOCK_M)):
            slot = tl.sum(tl.where(rows == i, slots, 0), axis=0)
            earlier = tl.sum(((slots == slot) & (rows < i)).to(tl.int32), axis=0)
            if (slot >= 0) & (earlier == 0):
                if B_IS_NVFP4:
                    b_rows = slot.to(tl.int64) * width + offs_n - begin
                    b = tl.trans(load_nvfp4_rows(b_ptr, s_ptr, b_rows, mask_n, R, BLOCK_N, BLOCK_R, H_DTYPE))
                else:
                    b = tl.load(
                        b_ptr + slot.to(tl.int64) * stride_bl + (offs_n - begin)[None, :].to(tl.int64) * stride_bn + offs_r[:, None],
                        mask=mask_n[None, :] & (offs_r[:, None] < R), other=0.0,
                    )  # fmt: skip  # [BLOCK_R, BLOCK_N]
                delta = tl.dot(h, b.to(H_DTYPE))
                if B_IS_NVFP4:
                    delta *= tl.load(pick4(sl, g0_ptr, g1_ptr, g2_ptr, g3_ptr) + slot) * nvfp4_unit(H_DTYPE)
                if B_IS_FP8:
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
    x_global_scale: torch.Tensor | None = None,
    sorted_tokens: torch.Tensor | None = None,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """FP8 or NVFP4 GEMM with the adapters' up-projection in its epilogue.

    xq: [M, K] float8_e4m3fn contiguous; x_scale: [M] or [M, 1] fp32. weight: FP8 operand [N, K], per tensor or per channel; with
    128 x 128 blocks x_scale is [M, ceil(K / 128)], as `quantize_groups` gives it. NVFP4 weight: xq uint8 [M, K / 2], x_scale
    float8_e4m3fn [M, K / 16], x_global_scale fp32 [1], as `quantize_nvfp4` gives them.
    h: [splits, S, M, R] from `lora_shrink`, or `lora_shrink_grouped`'s permuted to it, or None for no adapters. lora_b: one operand
    per slice, [L, N_s, R], 16-bit, FP8 with scales [L, N_s], or NVFP4. token_lora_indices: [>= M] int32. sorted_tokens: [>= M] int32
    permutation of the tokens (adapter order), not read where `active_lora_ids` says that nobody has an adapter.
    bias: [N]. out: [M, N], last axis contiguous, bf16, fp16 or fp32. use_pdl: as in `lora_shrink`.
    Returns out. Allocates only when `out` is None; never synchronises. M = 0 launches nothing.
    Raises TypeError or ValueError naming the argument that does not fit.
    """
    name = "fused_lora_gemm"
    fp4 = weight.format is Format.NVFP4
    check_tensor(name, "xq", xq, dim=2, dtypes=(torch.uint8 if fp4 else torch.float8_e4m3fn,))
    M, K = xq.shape[0], xq.shape[1] * (2 if fp4 else 1)
    check(xq.is_contiguous(), name, f"xq has strides {xq.stride()}; it must be contiguous")
    check_tensor(name, "x_scale", x_scale, dtypes=(torch.float8_e4m3fn if fp4 else torch.float32,), device=xq.device)
    kind = weight_kind(weight)
    if kind is not None:
        needed = (M, K // 16 if fp4 else triton.cdiv(K, BLOCK))
        good = tuple(x_scale.shape) == needed and x_scale.is_contiguous()
        check(good, name, f"x_scale is {tuple(x_scale.shape)} for a block-scaled weight; needed: contiguous {needed}")
    if fp4:
        good = x_global_scale is not None and x_global_scale.dtype == torch.float32 and x_global_scale.numel() == 1
        check(good, name, f"x_global_scale is {x_global_scale}; an nvfp4 weight needs float32 [1]")
    check(x_scale.numel() >= M, name, f"x_scale has {x_scale.numel()} values for {M} tokens")
    check_weight(name, weight, xq.device, K, blocks=True, nvfp4=True)
    N = weight.shape[0]
    y = torch.empty((M, N), dtype=out_dtype, device=xq.device) if out is None else out
    check_tensor(name, "out", y, dim=2, dtypes=OUT_DTYPES, device=xq.device)
    check(y.shape == (M, N), name, f"out is {tuple(y.shape)}; needed: {(M, N)}")
    has_lora = h is not None
    widths, rank, splits, num_slots = [N], 16, 1, 1
    if h is not None:
        if token_lora_indices is None:
            raise ValueError(f"{name}: h is given without token_lora_indices")
        check_tensor(name, "token_lora_indices", token_lora_indices, dim=1, dtypes=(torch.int32,), device=xq.device)
        check_tensor(name, "h", h, dim=4, dtypes=OUT_DTYPES, device=xq.device)
        splits, num_slices, tokens, rank = h.shape
        check(
            num_slices == len(lora_b) and tokens == M,
            name,
            f"h is {tuple(h.shape)}; needed: [splits, {len(lora_b)}, {M}, R], R contiguous",
        )
        like = y if lora_b[0].scales is not None else lora_b[0].values
        widths = check_up_projection(name, lora_b, rank, N, like)
        num_slots = lora_b[0].values.shape[0]
    config = config or config_for(M, widths, K, shared_limit(xq.device), kind=kind)
    legal = is_legal(config, widths, kind=kind)
    check(legal, name, f"config={config} is not legal for slices {widths}, axis={weight.axis.value}; see is_legal")
    picked = choose(name, xq.device, implementation)
    if M == 0:
        return y
    if picked is Implementation.REFERENCE:
        ref = fused_lora_gemm_ref(
            xq, x_scale, weight, h, lora_b, token_lora_indices, x_global_scale=x_global_scale,
            active_lora_ids=active_lora_ids, bias=bias,
        )  # fmt: skip
        return y.copy_(ref)
    some = token_lora_indices if token_lora_indices is not None else x_scale
    b = pad4([o.values for o in lora_b]) if has_lora else [x_scale] * 4
    pointers = stack_pointers(lora_b) if has_lora else [x_scale] * 12
    stored = has_lora and lora_b[0].scales is not None
    h_dtype = y.dtype if stored or not has_lora else lora_b[0].values.dtype
    _fused_lora_gemm_kernel[(triton.cdiv(N, config.block_n), triton.cdiv(M, config.block_m))](
        xq, x_scale, x_scale if x_global_scale is None else x_global_scale, weight.values, weight.scales,
        weight.scales if weight.global_scale is None else weight.global_scale, weight.scales if bias is None else bias, x_scale if h is None else h,
        *pointers, *(t.stride(0) for t in b), b[0].stride(1) if has_lora else 0,
        some, some if sorted_tokens is None else sorted_tokens, some if active_lora_ids is None else active_lora_ids,
        0 if active_lora_ids is None else active_lora_ids.numel(), y, y.stride(0),
        M, N, K, rank, num_slots, *slice_ends(widths), *((0, 0, 0) if h is None else h.stride()[:3]),
        NUM_SLICES=len(widths), SPLITS=splits, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        BLOCK_R=max(16, triton.next_power_of_2(rank)), SWAP_AB=config.swap_ab, SCALE_PER_CHANNEL=weight.axis is ScaleAxis.CHANNEL,
        SCALE_BLOCK=BLOCK if kind is ScaleAxis.BLOCK else 0, W_NVFP4=fp4, NATIVE_FP4=fp4 and multiplies_nvfp4(xq.device), HAS_BIAS=bias is not None, HAS_LORA=has_lora, B_IS_FP8=stored and lora_b[0].format is Format.FP8_E4M3,
        B_IS_NVFP4=stored and lora_b[0].format is Format.NVFP4, H_DTYPE=_TRITON_DTYPE[h_dtype],
        HAS_SORTED=sorted_tokens is not None, HAS_ACTIVE=active_lora_ids is not None,
        ACTIVE_BLOCK=triton.next_power_of_2(active_lora_ids.numel()) if active_lora_ids is not None else 1,
        EVEN_K=K % config.block_k == 0, IMPRECISE=min(MAX_NUM_IMPRECISE_ACC, config.block_k), ROUND_FIRST=INTERPRETED, USE_PDL=use_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return y


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
