"""W8A16: a GEMM that reads FP8 codes and unrounded 16-bit activations. Codes are widened in registers; no 16-bit copy
exists.

    y[m, n] = (sum_k x[m, k] code[n, k]) * scale[n] + bias[n] + sum_r h[m, s(n), r] B[slot(m), n, r]

Every e4m3 code is exact in bf16 and fp16, so the products are those of x with the stored codes, accumulated in fp32;
the weight scale, the bias and the adapter's term are added in fp32 and y is rounded once. This is the arithmetic of the
matched engine and of the trainer (`training.py` launches the same kernel). NaN codes stay NaN.

Two orientations of one kernel. `swap` (W is the 64-row side of the MMA, tokens its narrow side; widened codes go from
registers straight into wgmma) serves few tokens and, with wide token tiles, large batches; without it widened codes
pass through shared memory. Few tokens leave few output tiles, so K may be split: every part writes its fp32 tile to a
workspace and the block that arrives last adds the parts in the order of K. The counter decides who adds, never the
order, and its last user sets it back to zero: a captured graph replays without resets and no block ever waits for
another.

Widening goes code -> fp16 -> fp32 -> bf16: on sm_90 the direct conversion compiles to F2F.BF16.F16, one value at a time
at a low rate, the way through fp32 to four ordinary instructions a pair.

Left out: block scales and NVFP4 (refused by name), activations in FP8 (the fused FP8 GEMM has a file of its own).

Legend: M tokens, N out features, K in features, S output slices, R rank, L adapter slots.
Source: sections 3.1 and 3.3 of the EpiLoRA paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..quant.formats import ScaleAxis
from ..quant.operand import Operand
from .arguments import (
    HOPPER_SHARED_BYTES,
    MAX_RANK,
    check_groups,
    check_stacks,
    check_tokens,
    check_weight,
    scales_of,
    shared_limit,
)
from .dispatch import Implementation, choose
from .lora_expand import TokenGroups, _real
from .tiles import pad4

MAX_SPLIT_K = 8
_COUNTERS = 8192  # output tiles a split-K launch may have


@dataclass(frozen=True)
class LoraTerm:
    """What the epilogue adds for the adapters.

    h: [split_k, M, S, R] from `lora_shrink_grouped` (parts are added in order), or [1, M, S, R] in x's dtype.
    lora_b: S operands [L, N_s, R] in x's dtype or FP8 with row scales; alpha / rank folded in.
    slots: int32 [M] slot of every token, -1 for none; None: every token uses slot 0 (one adapter, as in training).
    groups: the step's groups; needed with `slots`, whose stale entries only they tell apart.
    """

    h: torch.Tensor
    lora_b: Sequence[Operand]
    slots: torch.Tensor | None = None
    groups: TokenGroups | None = None


@dataclass(frozen=True)
class W8A16Config:
    """Tiles of the GEMM. swap: W on the MMA's row side. split_k: parts of K summed in order. group_m: tiles of M that
    share W in L2.

    use_tma: weight tiles by the bulk tensor copy engine (compute capability 9.0 or more, K a multiple of 16, codes that start
    on 16 bytes).
    """

    block_m: int
    block_n: int
    block_k: int
    swap: bool
    split_k: int = 1
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 4
    use_tma: bool = False


def w8a16_gemm_ref(
    x: torch.Tensor, weight: Operand, *, bias: torch.Tensor | None = None, lora: LoraTerm | None = None
) -> torch.Tensor:
    """The formula above in plain torch: [M, N] fp32. h is rounded once to x's dtype, as the kernel does."""
    codes = weight.values.float()
    y = x.float() @ codes.t()
    if weight.scales is not None:
        y = y * weight.scales.float().reshape(1, -1)
    if bias is not None:
        y = y + bias.float()
    if lora is None:
        return y
    h = lora.h.float().sum(0).to(x.dtype).float()
    num_slots = lora.lora_b[0].values.shape[0]
    if lora.slots is None:
        chosen = [(0, torch.ones(x.shape[0], dtype=torch.bool, device=x.device))]
    else:
        assert lora.groups is not None, "slots come with groups"
        listed = lora.groups.active_slots.tolist()
        chosen = [(slot, lora.slots[: x.shape[0]] == slot) for slot in listed if 0 <= slot < num_slots]
    for slot, rows in chosen:
        column = 0
        for s, b in enumerate(lora.lora_b):
            real = _real(b)[slot]
            y[rows, column : column + real.shape[0]] += h[rows, s] @ real.t()
            column += real.shape[0]
    return y


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _widen(codes, like: tl.constexpr):
    """e4m3 codes as `like` (bf16, fp16 or fp32), exactly; see the module's note on the way through fp32."""
    if like == tl.float16:
        return codes.to(tl.float16)
    return codes.to(tl.float32).to(like)


@triton.jit
def _add_slice(
    acc,
    h_ptr,
    b_ptr,
    bs_ptr,
    slot,
    offs_m,
    mask_m,
    offs_n,
    start,
    width,
    stride_part,
    stride_row,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_H: tl.constexpr,
    SCALED: tl.constexpr,
    SWAP: tl.constexpr,
    dtype: tl.constexpr,
):
    """acc += h B^T for the rows in mask_m and the tile's columns of one slice ([start, start + width))."""
    offs_r = tl.arange(0, BLOCK_R)
    n = offs_n - start
    mask_n = (n >= 0) & (n < width)
    mask_h = mask_m[:, None] & (offs_r < R)[None, :]
    h_tile = h_ptr + offs_m.to(tl.int64)[:, None] * stride_row + offs_r[None, :]
    h = tl.load(h_tile, mask=mask_h, other=0.0)  # [BLOCK_M, BLOCK_R]
    for part in tl.static_range(1, SPLIT_H):
        h += tl.load(h_tile + part * stride_part, mask=mask_h, other=0.0)
    h = h.to(dtype)
    b_row = slot * width + n
    b = tl.load(
        b_ptr + b_row.to(tl.int64)[:, None] * R + offs_r[None, :],
        mask=mask_n[:, None] & (offs_r < R)[None, :],
        other=0.0,
    )
    if SCALED:
        scale = tl.load(bs_ptr + b_row, mask=mask_n, other=0.0)
        b = _widen(b, dtype)
        if SWAP:
            acc += tl.dot(b, tl.trans(h), input_precision="ieee") * scale[:, None]
        else:
            acc += tl.dot(h, tl.trans(b), input_precision="ieee") * scale[None, :]
    elif SWAP:
        acc = tl.dot(b, tl.trans(h), acc, input_precision="ieee")
    else:
        acc = tl.dot(h, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "num_entries", "num_slots"])
def _w8a16_kernel(
    x_ptr,
    w_ptr,  # pointer, or tensor descriptor of [N, K] with block [BLOCK_N, BLOCK_K]
    ws_ptr,
    bias_ptr,
    y_ptr,
    part_ptr,
    counter_ptr,
    h_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    b3_ptr,
    bs0_ptr,
    bs1_ptr,
    bs2_ptr,
    bs3_ptr,
    slots_ptr,
    active_ptr,
    counts_ptr,
    M,
    N,
    K,
    n0,
    n1,
    n2,
    n3,
    num_entries,
    num_slots,
    stride_xm,
    stride_ym,
    R: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    LORA: tl.constexpr,  # 0 none, 1 slot 0 for every row, 2 by slots and groups
    B_SCALED: tl.constexpr,
    SPLIT_H: tl.constexpr,
    CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    pid_k = pid % SPLIT_K
    tile = pid // SPLIT_K
    band = GROUP_M * tiles_n
    first_m = (tile // band) * GROUP_M
    rows_here = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (tile % band) % rows_here
    pid_n = (tile % band) // rows_here
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    k_from = pid_k * steps * BLOCK_K
    w_row = offs_n if EVEN_N else tl.minimum(offs_n, N - 1)
    if not TMA:
        w_tile = w_ptr + w_row.to(tl.int64)[:, None] * K + (k_from + offs_k)[None, :]  # [BLOCK_N, BLOCK_K]
    if USE_PDL:
        # Weights never change: start them to L2, then wait for the launch that wrote x.
        if PREFETCH > 0 and not TMA:
            lines = tl.arange(0, PREFETCH) * 128
            line = w_ptr + w_row.to(tl.int64)[:, None] * K + (k_from + lines)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    x_row = offs_m if BLOCK_M <= 64 else tl.minimum(offs_m, M - 1)  # wide tiles: clamped rows cost no mask
    x_tile = x_ptr + x_row.to(tl.int64)[:, None] * stride_xm + (k_from + offs_k)[None, :]  # [BLOCK_M, BLOCK_K]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, steps):
        if TMA:
            w = w_ptr.load([pid_n * BLOCK_N, k_from + step * BLOCK_K])  # zeros beyond N and K
        elif EVEN_K:
            w = tl.load(w_tile)
        else:
            w = tl.load(w_tile, mask=(k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        if BLOCK_M <= 64:
            if EVEN_K:
                x = tl.load(x_tile, mask=mask_m[:, None], other=0.0)
            else:
                x = tl.load(x_tile, mask=mask_m[:, None] & (k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        elif EVEN_K:
            x = tl.load(x_tile)
        else:
            x = tl.load(x_tile, mask=(k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(_widen(w, dtype), tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(_widen(w, dtype)), acc, input_precision="ieee")
        x_tile += BLOCK_K
        if not TMA:
            w_tile += BLOCK_K
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # this block's weights are read: the next launch may begin with its own
    if SPLIT_K > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        if SWAP:
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        base = part_ptr + tile.to(tl.int64) * SPLIT_K * TILE
        tl.store(base + pid_k * TILE + inside, acc)
        tl.debug_barrier()
        ticket = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if ticket != SPLIT_K - 1:
            return
        tl.store(counter_ptr + tile, 0)
        acc = tl.load(base + inside, cache_modifier=".cg")
        for part in tl.static_range(1, SPLIT_K):
            acc += tl.load(base + part * TILE + inside, cache_modifier=".cg")
    if CHANNEL:
        scale = tl.load(ws_ptr + offs_n, mask=mask_n, other=0.0)
    else:
        scale = tl.load(ws_ptr)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if CHANNEL:
        if SWAP:
            acc = acc * scale[:, None]
        else:
            acc = acc * scale[None, :]
    else:
        acc = acc * scale
    if HAS_BIAS:
        if SWAP:
            acc += bias[:, None]
        else:
            acc += bias[None, :]
    if LORA > 0:
        stride_part = M.to(tl.int64) * NUM_SLICES * R
        stride_row: tl.constexpr = NUM_SLICES * R
        tile_from = pid_n * BLOCK_N
        entries = 1
        if LORA == 2:
            entries = num_entries
            row_slot = tl.load(slots_ptr + offs_m, mask=mask_m, other=-1)
        for entry in range(0, entries):
            slot = 0
            rows = mask_m
            used = 1
            if LORA == 2:
                slot = tl.load(active_ptr + entry)
                rows = mask_m & (row_slot == slot)
                used = tl.where((slot >= 0) & (slot < num_slots), tl.max(rows.to(tl.int32), 0), 0)
            if used > 0:
                start = 0
                if tile_from < n0:
                    acc = _add_slice(
                        acc,
                        h_ptr,
                        b0_ptr,
                        bs0_ptr,
                        slot,
                        offs_m,
                        rows,
                        offs_n,
                        start,
                        n0,
                        stride_part,
                        stride_row,
                        R,
                        BLOCK_R,
                        SPLIT_H,
                        B_SCALED,
                        SWAP,
                        dtype,
                    )
                if NUM_SLICES > 1:
                    start = n0
                    if (tile_from < start + n1) & (tile_from + BLOCK_N > start):
                        acc = _add_slice(
                            acc,
                            h_ptr + R,
                            b1_ptr,
                            bs1_ptr,
                            slot,
                            offs_m,
                            rows,
                            offs_n,
                            start,
                            n1,
                            stride_part,
                            stride_row,
                            R,
                            BLOCK_R,
                            SPLIT_H,
                            B_SCALED,
                            SWAP,
                            dtype,
                        )
                if NUM_SLICES > 2:
                    start = n0 + n1
                    if (tile_from < start + n2) & (tile_from + BLOCK_N > start):
                        acc = _add_slice(
                            acc,
                            h_ptr + 2 * R,
                            b2_ptr,
                            bs2_ptr,
                            slot,
                            offs_m,
                            rows,
                            offs_n,
                            start,
                            n2,
                            stride_part,
                            stride_row,
                            R,
                            BLOCK_R,
                            SPLIT_H,
                            B_SCALED,
                            SWAP,
                            dtype,
                        )
                if NUM_SLICES > 3:
                    start = n0 + n1 + n2
                    if tile_from + BLOCK_N > start:
                        acc = _add_slice(
                            acc,
                            h_ptr + 3 * R,
                            b3_ptr,
                            bs3_ptr,
                            slot,
                            offs_m,
                            rows,
                            offs_n,
                            start,
                            n3,
                            stride_part,
                            stride_row,
                            R,
                            BLOCK_R,
                            SPLIT_H,
                            B_SCALED,
                            SWAP,
                            dtype,
                        )
    out = acc.to(y_ptr.dtype.element_ty)
    if SWAP:
        out = tl.trans(out)
    y_tile = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    if EVEN_N:
        tl.store(y_tile, out, mask=mask_m[:, None])
    else:
        tl.store(y_tile, out, mask=mask_m[:, None] & mask_n[None, :])


# ---- launch configurations -------------------------------------------------------------------------------------------


def is_legal_w8a16(config: W8A16Config, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> bool:
    """Whether the config covers K, fits shared memory, and keeps the fp32 tile within 192 registers a thread."""
    powers = all(
        v >= 1 and v & (v - 1) == 0
        for v in (config.block_m, config.block_n, config.block_k, config.num_warps, config.split_k)
    )
    if not powers or config.block_k < 32 or config.block_m < 8 or config.block_n < 16 or config.split_k > MAX_SPLIT_K:
        return False
    steps = triton.cdiv(triton.cdiv(K, config.block_k), config.split_k)
    covered = steps * config.block_k * (config.split_k - 1) < K
    shared = config.num_stages * config.block_k * (2 * config.block_m + config.block_n)
    if not config.swap:
        shared += 2 * config.block_k * config.block_n
    registers = config.block_m * config.block_n // (config.num_warps * 32)
    tma = not config.use_tma or K % 16 == 0
    return covered and shared <= shared_bytes and registers <= 192 and tma


def w8a16_config_for(M: int, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> W8A16Config:
    """Default tiles, from searches on an H200: K is split until 256 programs stream weights; wide tiles for many tokens.

    Up to 8 tokens and up to 16 take mma.sync (8-token tiles, or two warps), which beat wgmma there; weight tiles of wide
    tiles come by the copy engine where K allows it.
    """
    if M <= 64:
        block_m = 8 if M <= 8 else 16 if M <= 16 else 32 if M <= 32 else 64
        warps = 2 if block_m == 16 else 4
        block_k = 256 if block_m <= 16 else 128
        while block_k > 32 and block_k > K:
            block_k //= 2
        split_k = 1
        while split_k < 4 and triton.cdiv(N, 64) * split_k < 256 and triton.cdiv(K, block_k) // (split_k * 2) >= 2:
            split_k *= 2
        config = W8A16Config(block_m, 64, block_k, True, split_k, 1, warps, 3)
        while not is_legal_w8a16(config, N, K, shared_bytes) and config.split_k > 1:
            config = replace(config, split_k=config.split_k // 2)
        return config
    if M <= 128 or shared_bytes < HOPPER_SHARED_BYTES:
        return W8A16Config(128, 64, 64, True, 1, 8, 4, 4)
    return W8A16Config(256, 128, 64, True, 1, 16, 8, 4, use_tma=K % 16 == 0)


class W8A16Workspace:
    """Scratch of split-K launches on one device: fp32 parts and tile counters. One launch at a time may use it.

    parts: fp32 [elements]; counters: int32 [tiles], zero between launches.
    """

    def __init__(self, device: torch.device, elements: int = 1 << 22) -> None:
        self.parts = torch.empty(elements, dtype=torch.float32, device=device)
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


_workspaces: dict[torch.device, list[W8A16Workspace]] = {}


def _workspace(device: torch.device, elements: int, tiles: int) -> W8A16Workspace:
    """A device's newest workspace, or a larger one. Older ones stay: captured graphs hold their addresses."""
    if tiles > _COUNTERS:
        raise ValueError(
            f"w8a16_gemm: {tiles} output tiles with split_k; "
            f"allowed: at most {_COUNTERS}; take split_k=1 or larger tiles"
        )
    held = _workspaces.setdefault(device, [])
    if not held or held[-1].parts.numel() < elements:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"w8a16_gemm: the workspace must grow to {elements} values during capture; run the same call once "
                "before capturing"
            )
        held.append(W8A16Workspace(device, max(elements, 1 << 22)))
    return held[-1]


def w8a16_gemm(
    x: torch.Tensor,
    weight: Operand,
    *,
    bias: torch.Tensor | None = None,
    lora: LoraTerm | None = None,
    out: torch.Tensor | None = None,
    config: W8A16Config | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """y = x W^T on FP8 codes and 16-bit activations, with the adapters' up-projections added in the epilogue.

    x: [M, K] bf16 or fp16, rows contiguous. weight: [N, K] e4m3 codes, one fp32 scale or one a row. bias: [N] in x's
    dtype.
    lora: see `LoraTerm`; rows whose slot is not among the groups' active slots get none. out: [M, N] in x's dtype to
    write.
    use_pdl: launch as the programmatic dependent of the launch before (compute capability 9.0 or more); weights start
    moving before x is complete. Off by default: in a chain of projections on an H200 it cost 1 to 2 %.
    The default config comes from `w8a16_config_for`.
    Returns y [M, N]. M = 0 launches nothing. Split-K launches on one device share a workspace: do not run two at once
    on different streams. Raises TypeError, ValueError or UnsupportedKernel naming argument, value and what is allowed.
    """
    name = "w8a16_gemm"
    picked = choose(name, x.device, implementation)
    check_tokens(name, "x", x, picked)
    check_weight(name, weight, x.device)
    M, K = x.shape
    N = weight.values.shape[0]
    if weight.values.shape[1] != K:
        raise ValueError(
            f"{name}: weight {tuple(weight.values.shape)} does not fit x {tuple(x.shape)}; allowed: [N, {K}]"
        )
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; "
            f"allowed: {x.dtype} ({N},) on {x.device}"
        )
    if out is None:
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (M, N) or out.dtype != x.dtype or out.stride(1) != 1 or out.device != x.device:
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}; allowed: {x.dtype} {(M, N)} on {x.device}"
        )
    widths, R, S, L = [N], 16, 1, 1
    if lora is not None:
        check_stacks(name, "lora.lora_b", lora.lora_b, x)
        widths = [b.values.shape[1] for b in lora.lora_b]
        L, _, R = lora.lora_b[0].values.shape
        S = len(widths)
        if sum(widths) != N or any(b.values.shape[2] != R for b in lora.lora_b) or not 1 <= R <= MAX_RANK:
            raise ValueError(
                f"{name}: lora.lora_b widths {widths} and rank {R} do not fit; "
                f"allowed: widths that sum to {N}, equal ranks up to {MAX_RANK}"
            )
        h = lora.h
        if h.dim() != 4 or tuple(h.shape[1:]) != (M, S, R) or not h.is_contiguous() or h.device != x.device:
            raise ValueError(
                f"{name}: lora.h is {tuple(h.shape)} on {h.device}; "
                f"allowed: contiguous [split_k, {M}, {S}, {R}] on {x.device}"
            )
        if h.dtype != (x.dtype if h.shape[0] == 1 else torch.float32):
            raise TypeError(
                f"{name}: lora.h is {h.dtype} with split_k={h.shape[0]}; allowed: {x.dtype} for 1, float32 above"
            )
        if lora.slots is not None:
            if lora.groups is None:
                raise ValueError(f"{name}: lora.slots given without lora.groups; give both, or neither for one adapter")
            if (
                lora.slots.dtype != torch.int32
                or lora.slots.dim() != 1
                or lora.slots.numel() < M
                or lora.slots.device != x.device
            ):
                raise ValueError(
                    f"{name}: lora.slots is {lora.slots.dtype} {tuple(lora.slots.shape)}; "
                    f"allowed: int32 with at least {M} entries on {x.device}"
                )
            check_groups(name, lora.groups, M, L, x.device)
    shared = shared_limit(x.device)
    config = config or w8a16_config_for(M, N, K, shared)
    if not is_legal_w8a16(config, N, K, shared):
        raise ValueError(f"{name}: {config} is not legal for N={N}, K={K}; see is_legal_w8a16")
    if M == 0:
        return out
    if picked is Implementation.REFERENCE:
        return out.copy_(w8a16_gemm_ref(x, weight, bias=bias, lora=lora))
    pdl = use_pdl and picked is Implementation.TRITON
    if pdl and torch.cuda.get_device_capability(x.device)[0] < 9:
        raise ValueError(
            f"{name}: use_pdl=True on compute capability {torch.cuda.get_device_capability(x.device)}; "
            f"allowed: 9.0 or more"
        )
    codes = weight.values
    if config.use_tma and codes.data_ptr() % 16:
        config = replace(
            config, use_tma=False
        )  # a view the copy engine cannot address: the same tiles by ordinary loads
    if config.use_tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        codes = TensorDescriptor.from_tensor(weight.values, [config.block_n, config.block_k])
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    nothing = scales_of(weight)
    parts = counters = nothing
    if config.split_k > 1:
        space = _workspace(x.device, tiles * config.split_k * config.block_m * config.block_n, tiles)
        parts, counters = space.parts, space.counters
    mode, scaled, split_h = 0, False, 1
    h, values, scales, slots, active, counts = nothing, [nothing] * 4, [nothing] * 4, nothing, nothing, nothing
    if lora is not None:
        mode = 1 if lora.slots is None else 2
        scaled = lora.lora_b[0].scales is not None
        h, split_h = lora.h, lora.h.shape[0]
        values = pad4([b.values for b in lora.lora_b])
        scales = pad4([scales_of(b) for b in lora.lora_b]) if scaled else [nothing] * 4
        if lora.slots is not None and lora.groups is not None:
            slots, active, counts = lora.slots, lora.groups.active_slots, lora.groups.counts
    _w8a16_kernel[(tiles * config.split_k,)](
        x,
        codes,
        weight.scales,
        bias if bias is not None else nothing,
        out,
        parts,
        counters,
        h,
        *values,
        *scales,
        slots,
        active,
        counts,
        M,
        N,
        K,
        *(widths + [0] * (4 - S)),
        L + 1,
        L,
        x.stride(0),
        out.stride(0),
        R=R,
        NUM_SLICES=S,
        LORA=mode,
        B_SCALED=scaled,
        SPLIT_H=split_h,
        CHANNEL=weight.axis is ScaleAxis.CHANNEL,
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_R=max(16, triton.next_power_of_2(R)),
        SPLIT_K=config.split_k,
        GROUP_M=config.group_m,
        EVEN_N=N % config.block_n == 0,
        EVEN_K=K % (config.block_k * config.split_k) == 0,
        SWAP=config.swap,
        TMA=config.use_tma,
        USE_PDL=pdl,
        PREFETCH=2 * config.block_k // 128 if config.block_k >= 128 else 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
