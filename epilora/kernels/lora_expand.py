"""LoRA beside a vendor GEMM, for many tokens: shrink by adapter group, then add the up-projection to the GEMM's output
in place.

    h[m, s, :] = x[m, :] A[s, slot(m)]^T             (shrink: fp32 accumulation, ordered split-K)
    y[m, off_s : off_s + N_s] += h[m, s, :] B[s, slot(m)]^T   (expand-add: one fp32 add, one rounding)

Tokens come grouped by adapter in the arrays vLLM keeps for a step (`TokenGroups`). A tile of rows never mixes adapters,
so every row tile is one dense product. The list of tiles is not known on the host (a captured graph replays with other
groups), so the grid is the most tiles that M tokens over L slots can need, and each program finds its group by a prefix
sum over at most L + 1 counts.

The expand tiles the concatenated output: a column tile lies inside one slice, and slice bounds and slice pointers are
kernel arguments rather than tables in memory, so their alignment is known to the compiler. What is left out: any
quantisation of y.

Rounding: h is kept in fp32 partials (or, without split-K, rounded at once); it is rounded once to x's dtype before the
MMA. delta stays fp32 and is added to y in fp32; the sum is rounded once to y's dtype. FP8 and NVFP4 adapters are widened
exactly; FP8's row scales and NVFP4's global scale multiply the fp32 result. Rows without an adapter (and rows beyond the counted ones) are neither
read nor written. Every sum runs in a fixed order that depends on (M, K, R) only, never on the other rows' adapters: the
same row has the same bits.

Legend: M tokens, N = sum of N_s out features, S slices (1 to 4), K in features, R rank, L adapter slots.
Source: section 3.1 and Appendix D of the EpiLoRA paper; the group arrays are those of vLLM's LoRAKernelMeta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..quant.formats import Format
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import (
    HOPPER_SHARED_BYTES,
    MAX_RANK,
    check_groups,
    check_stacks,
    check_tokens,
    shared_limit,
    stack_pointers,
)
from .dispatch import Implementation, choose
from .nvfp4_tile import load_nvfp4_rows, nvfp4_unit, widen_nvfp4
from .quantize import quantize_ref, quantize_row
from .tiles import INTERPRETED, MAX_SLICES, pick4


@dataclass(frozen=True)
class TokenGroups:
    """Tokens of one step grouped by adapter slot: views of vLLM's LoRAKernelMeta arrays, all int32 on the tokens'
    device.

    sorted_tokens: [>= M] stable argsort of the slots, the -1 group first. Entries past the counted ones are stale.
    active_slots: [L + 1] sorted distinct slots, -1 first if present; the tail is -1.
    counts: [L + 1] tokens per entry of active_slots; stale wherever active_slots is -1 in the tail.
    starts: [L + 2] exclusive prefix sum of counts.
    """

    sorted_tokens: torch.Tensor
    active_slots: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor


def group_tokens(token_lora_indices: torch.Tensor, num_slots: int) -> TokenGroups:
    """Group tokens by slot as vLLM does, in plain torch (synchronises with the device).

    token_lora_indices: [M] integer, slot per token, -1 for none. num_slots: L. An empty batch gives all-inactive
    groups.
    Raises ValueError for a slot outside [-1, L).
    """
    if token_lora_indices.numel() and not (
        int(token_lora_indices.min()) >= -1 and int(token_lora_indices.max()) < num_slots
    ):
        raise ValueError(
            f"group_tokens: slots span [{int(token_lora_indices.min())}, {int(token_lora_indices.max())}]; "
            f"allowed: -1 to {num_slots - 1}"
        )
    device = token_lora_indices.device
    order = torch.sort(token_lora_indices, stable=True).indices.to(torch.int32)
    found, found_counts = torch.unique(token_lora_indices, sorted=True, return_counts=True)
    active = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
    starts = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
    active[: found.numel()] = found.to(torch.int32)
    counts[: found.numel()] = found_counts.to(torch.int32)
    starts[1 : found.numel() + 1] = found_counts.cumsum(0).to(torch.int32)
    return TokenGroups(order, active, counts, starts)


# ---- references ------------------------------------------------------------------------------------------------------


def _real(operand: Operand) -> torch.Tensor:
    """[L, ., .] fp32 values of a stacked adapter operand."""
    return dequantize(operand)


def _rows_by_slot(groups: TokenGroups, num_tokens: int, num_slots: int) -> list[tuple[int, torch.Tensor]]:
    rows = []
    for entry, slot in enumerate(groups.active_slots.tolist()):
        if 0 <= slot < num_slots:
            start = int(groups.starts[entry])
            index = groups.sorted_tokens[start : start + int(groups.counts[entry])].long()
            rows.append((slot, index[(index >= 0) & (index < num_tokens)]))
    return rows


def lora_shrink_grouped_ref(x: torch.Tensor, lora_a: Sequence[Operand], groups: TokenGroups) -> torch.Tensor:
    """h [1, M, S, R] fp32 in plain torch; rows without an adapter are zero. Arguments as `lora_shrink_grouped`."""
    num_slots, rank, _ = lora_a[0].values.shape
    h = torch.zeros(1, x.shape[0], len(lora_a), rank, dtype=torch.float32, device=x.device)
    reals = [_real(a) for a in lora_a]
    for slot, rows in _rows_by_slot(groups, x.shape[0], num_slots):
        for s, real in enumerate(reals):
            h[0, rows, s] = x[rows].float() @ real[slot].t()
    return h


def lora_expand_add_ref(
    y: torch.Tensor, h: torch.Tensor, lora_b: Sequence[Operand], groups: TokenGroups, *, round_h: bool = False
) -> torch.Tensor:
    """y + h B^T as a new [M, N] fp32 tensor, plain torch. round_h: round the summed h to y's dtype first, as the kernel
    does."""
    out = y.float().clone()
    total = h.float().sum(0)
    if round_h:
        total = total.to(y.dtype).float()
    reals = [_real(b) for b in lora_b]
    for slot, rows in _rows_by_slot(groups, y.shape[0], lora_b[0].values.shape[0]):
        column = 0
        for s, real in enumerate(reals):
            width = real.shape[1]
            out[rows, column : column + width] += total[rows, s] @ real[slot].t()
            column += width
    return out


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of_group(
    pid_m, active_ptr, counts_ptr, starts_ptr, num_entries, num_slots, BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr
):
    """(slot or -1, first position in the sorted list, rows left) of row tile `pid_m`; every group begins a new tile."""
    offs = tl.arange(0, ENTRIES)
    inside = offs < num_entries
    slots = tl.load(active_ptr + offs, mask=inside, other=-1)
    counts = tl.load(counts_ptr + offs, mask=inside, other=0)
    tiles = tl.where((slots >= 0) & (slots < num_slots), (counts + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    before = ends <= pid_m  # groups that end before this tile
    entry = tl.sum(before.to(tl.int32), 0)
    done = (pid_m - tl.sum(tl.where(before, tiles, 0), 0)) * BLOCK_M
    found = entry < num_entries
    slot = tl.load(active_ptr + entry, mask=found, other=-1)
    left = tl.load(counts_ptr + entry, mask=found, other=0) - done
    first = tl.load(starts_ptr + entry, mask=found, other=0) + done
    return slot, first, left


@triton.jit(do_not_specialize=["M", "num_entries", "num_slots", "num_quant"])
def _lora_shrink_grouped_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    a3_ptr,
    as0_ptr,
    as1_ptr,
    as2_ptr,
    as3_ptr,
    ag0_ptr,
    ag1_ptr,
    ag2_ptr,
    ag3_ptr,
    h_ptr,
    sorted_ptr,
    active_ptr,
    counts_ptr,
    starts_ptr,
    xq_ptr,
    x_scale_ptr,
    M,
    K,
    R: tl.constexpr,
    num_entries,
    num_slots,
    num_quant,
    stride_xm,
    stride_al,
    stride_ar,
    NUM_SLICES: tl.constexpr,
    A_SCALED: tl.constexpr,  # FP8 with row scales
    A_NVFP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,  # 0: x is not quantised here
    ROUND_FIRST: tl.constexpr,
):
    pid = tl.program_id(0)
    if QUANT_BLOCK > 0:
        if pid < num_quant:  # the first programs quantise one row each, for the vendor GEMM that is launched next
            m = pid.to(tl.int64)
            quantize_row(x_ptr + m * stride_xm, xq_ptr + m * K, x_scale_ptr + m, K, QUANT_BLOCK, ROUND_FIRST)
            return
        pid -= num_quant
    num_r = tl.cdiv(R, BLOCK_R)
    columns = NUM_SLICES * num_r
    pid_c = pid % columns  # slices of one x tile run side by side and share it in L2
    pid_k = (pid // columns) % SPLIT_K
    pid_m = pid // (columns * SPLIT_K)
    slice_id = pid_c // num_r
    slot, first, left = _tile_of_group(
        pid_m, active_ptr, counts_ptr, starts_ptr, num_entries, num_slots, BLOCK_M, ENTRIES
    )
    if slot < 0:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_r = (pid_c % num_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    # Rows past the group's end repeat its last row: loads need no mask, stores have one.
    row = tl.load(sorted_ptr + first + tl.minimum(offs_m, left - 1)).to(tl.int64)  # [BLOCK_M]
    mask_m = (offs_m < left) & (row >= 0) & (row < M)
    row = tl.minimum(tl.maximum(row, 0), M - 1)
    a_ptr = a0_ptr
    as_ptr = as0_ptr
    if NUM_SLICES > 1:
        a_ptr = tl.where(slice_id == 1, a1_ptr, a_ptr)
        as_ptr = tl.where(slice_id == 1, as1_ptr, as_ptr)
    if NUM_SLICES > 2:
        a_ptr = tl.where(slice_id == 2, a2_ptr, a_ptr)
        as_ptr = tl.where(slice_id == 2, as2_ptr, as_ptr)
    if NUM_SLICES > 3:
        a_ptr = tl.where(slice_id == 3, a3_ptr, a_ptr)
        as_ptr = tl.where(slice_id == 3, as3_ptr, as_ptr)
    if A_NVFP4:
        ag_ptr = pick4(slice_id, ag0_ptr, ag1_ptr, ag2_ptr, ag3_ptr)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    k_from = pid_k * steps * BLOCK_K
    x_tile = x_ptr + row[:, None] * stride_xm + (k_from + offs_k)[None, :]  # [BLOCK_M, BLOCK_K]
    a_tile = (
        a_ptr + slot.to(tl.int64) * stride_al + offs_r[None, :] * stride_ar + (k_from + offs_k)[:, None]
    )  # [BLOCK_K, BLOCK_R]
    if A_NVFP4:
        a_row = slot.to(tl.int64) * stride_al + offs_r[:, None] * stride_ar
        scale_row = (slot.to(tl.int64) * R + offs_r[:, None]) * (K // 16)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(0, steps):
        mask_k = k_from + step * BLOCK_K + offs_k < K
        if EVEN:
            x = tl.load(x_tile)
        else:
            x = tl.load(x_tile, mask=mask_k[None, :], other=0.0)
        if A_NVFP4:
            half = (k_from + step * BLOCK_K) // 2 + tl.arange(0, BLOCK_K // 2)
            block = (k_from + step * BLOCK_K) // 16 + tl.arange(0, BLOCK_K // 16)
            mask_r = (offs_r < R)[:, None]
            packed = tl.load(a_ptr + a_row + half[None, :], mask=mask_r & (half * 2 < K)[None, :], other=0)
            scale = tl.load(as_ptr + scale_row + block[None, :], mask=mask_r & (block * 16 < K)[None, :], other=0.0)
            a = tl.trans(widen_nvfp4(packed, scale, BLOCK_R, BLOCK_K, x.dtype))
        elif EVEN:
            a = tl.load(a_tile)
        else:
            a = tl.load(a_tile, mask=mask_k[:, None] & (offs_r < R)[None, :], other=0.0)
        acc = tl.dot(x, a.to(x.dtype), acc, input_precision="ieee")
        x_tile += BLOCK_K
        a_tile += BLOCK_K
    if A_SCALED:
        scale = tl.load(as_ptr + slot.to(tl.int64) * R + offs_r, mask=offs_r < R, other=0.0)
        acc = acc * scale[None, :]
    if A_NVFP4:
        acc = acc * (tl.load(ag_ptr + slot) * nvfp4_unit(x_ptr.dtype.element_ty))
    h_row = (pid_k.to(tl.int64) * M + row) * NUM_SLICES + slice_id  # h is [SPLIT_K, M, S, R]
    h_tile = h_ptr + h_row[:, None] * R + offs_r[None, :]
    tl.store(h_tile, acc.to(h_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_r < R)[None, :])


@triton.jit(do_not_specialize=["M", "num_entries", "num_slots"])
def _lora_expand_add_kernel(
    y_ptr,
    h_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    b3_ptr,
    bs0_ptr,
    bs1_ptr,
    bs2_ptr,
    bs3_ptr,
    bg0_ptr,
    bg1_ptr,
    bg2_ptr,
    bg3_ptr,
    sorted_ptr,
    active_ptr,
    counts_ptr,
    starts_ptr,
    M,
    n0,
    n1,
    n2,
    n3,
    R: tl.constexpr,
    num_entries,
    num_slots,
    stride_ym,
    NUM_SLICES: tl.constexpr,
    B_SCALED: tl.constexpr,  # FP8 with row scales
    B_NVFP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    SPAN: tl.constexpr = BLOCK_N * TILES_N
    t0 = tl.cdiv(n0, SPAN)
    t1 = tl.cdiv(n1, SPAN)
    t2 = tl.cdiv(n2, SPAN)
    columns = t0
    if NUM_SLICES > 1:
        columns += t1
    if NUM_SLICES > 2:
        columns += t2
    if NUM_SLICES > 3:
        columns += tl.cdiv(n3, SPAN)
    pid = tl.program_id(0)
    pid_n = pid % columns
    pid_m = pid // columns
    slot, first, left = _tile_of_group(
        pid_m, active_ptr, counts_ptr, starts_ptr, num_entries, num_slots, BLOCK_M, ENTRIES
    )
    if slot < 0:
        return
    # The column tile's slice: index, tiles before it, width, first column of y.
    slice_id = 0
    tiles_before = 0
    width = n0
    column = 0
    b_ptr = b0_ptr
    bs_ptr = bs0_ptr
    if NUM_SLICES > 1:
        past = pid_n >= t0
        slice_id = tl.where(past, 1, slice_id)
        tiles_before = tl.where(past, t0, tiles_before)
        width = tl.where(past, n1, width)
        column = tl.where(past, n0, column)
        b_ptr = tl.where(past, b1_ptr, b_ptr)
        bs_ptr = tl.where(past, bs1_ptr, bs_ptr)
    if NUM_SLICES > 2:
        past = pid_n >= t0 + t1
        slice_id = tl.where(past, 2, slice_id)
        tiles_before = tl.where(past, t0 + t1, tiles_before)
        width = tl.where(past, n2, width)
        column = tl.where(past, n0 + n1, column)
        b_ptr = tl.where(past, b2_ptr, b_ptr)
        bs_ptr = tl.where(past, bs2_ptr, bs_ptr)
    if NUM_SLICES > 3:
        past = pid_n >= t0 + t1 + t2
        slice_id = tl.where(past, 3, slice_id)
        tiles_before = tl.where(past, t0 + t1 + t2, tiles_before)
        width = tl.where(past, n3, width)
        column = tl.where(past, n0 + n1 + n2, column)
        b_ptr = tl.where(past, b3_ptr, b_ptr)
        bs_ptr = tl.where(past, bs3_ptr, bs_ptr)
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    row = tl.load(sorted_ptr + first + tl.minimum(offs_m, left - 1)).to(tl.int64)
    mask_m = (offs_m < left) & (row >= 0) & (row < M)
    row = tl.minimum(tl.maximum(row, 0), M - 1)
    # h: partial sums added in the order of K, rounded once to y's dtype.  [BLOCK_M, BLOCK_R]
    h_tile = h_ptr + (row * NUM_SLICES + slice_id)[:, None] * R + offs_r[None, :]
    mask_r = (offs_r < R)[None, :]
    stride_part = M.to(tl.int64) * NUM_SLICES * R
    if R == BLOCK_R:
        h = tl.load(h_tile)
        for part in tl.static_range(1, SPLIT_K):
            h += tl.load(h_tile + part * stride_part)
    else:
        h = tl.load(h_tile, mask=mask_r, other=0.0)
        for part in tl.static_range(1, SPLIT_K):
            h += tl.load(h_tile + part * stride_part, mask=mask_r, other=0.0)
    h = h.to(y_ptr.dtype.element_ty)
    b_slot = b_ptr + slot.to(tl.int64) * width * R
    if B_NVFP4:
        whole = tl.load(pick4(slice_id, bg0_ptr, bg1_ptr, bg2_ptr, bg3_ptr) + slot) * nvfp4_unit(h.dtype)
    n_from = (pid_n - tiles_before) * SPAN
    for tile in tl.static_range(TILES_N):
        n = n_from + tile * BLOCK_N + offs_n  # column inside the slice
        y_tile = y_ptr + row[:, None] * stride_ym + (column + n)[None, :]
        if EVEN:
            mask_y = mask_m[:, None]
        else:
            mask_y = mask_m[:, None] & (n < width)[None, :]
        if B_NVFP4:
            b = load_nvfp4_rows(b_ptr, bs_ptr, slot.to(tl.int64) * width + n, n < width, R, BLOCK_N, BLOCK_R, h.dtype)
        elif EVEN:
            b = tl.load(b_slot + n[:, None].to(tl.int64) * R + offs_r[None, :])  # [BLOCK_N, BLOCK_R]
        else:
            b = tl.load(
                b_slot + n[:, None].to(tl.int64) * R + offs_r[None, :], mask=(n < width)[:, None] & mask_r, other=0.0
            )
        delta = tl.dot(h, tl.trans(b.to(h.dtype)), input_precision="ieee")
        if B_SCALED:
            scale = tl.load(bs_ptr + slot.to(tl.int64) * width + n, mask=n < width, other=0.0)
            delta = delta * scale[None, :]
        if B_NVFP4:
            delta = delta * whole
        if USE_PDL and tile == 0:
            # y is the vendor GEMM's, the launch before this one. Groups, B and h are older than that GEMM's start.
            tl.extra.cuda.gdc_wait()
        y = tl.load(y_tile, mask=mask_y, other=0.0)
        tl.store(y_tile, (y.to(tl.float32) + delta).to(y_ptr.dtype.element_ty), mask=mask_y)


# ---- launch configurations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShrinkConfig:
    """Tiles of the grouped shrink. split_k partial sums of h are kept and added in order by the expand."""

    block_m: int
    block_r: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpandConfig:
    """Tiles of the expand-add. A program adds tiles_n column tiles of block_n, keeping h in registers."""

    block_m: int
    block_n: int
    tiles_n: int
    num_warps: int
    num_stages: int = 1


def is_legal_shrink(
    config: ShrinkConfig, K: int, R: int, element_bytes: int = 2, shared_bytes: int = HOPPER_SHARED_BYTES
) -> bool:
    """Whether the shrink compiles and covers K: powers of two, no empty split, operand tiles within shared memory."""
    powers = all(
        v >= 1 and v & (v - 1) == 0 for v in (config.block_m, config.block_r, config.block_k, config.num_warps)
    )
    steps = triton.cdiv(triton.cdiv(K, config.block_k), config.split_k)
    covered = steps * config.block_k * (config.split_k - 1) < K
    shared = config.num_stages * (config.block_m + config.block_r) * config.block_k * element_bytes
    return (
        powers
        and covered
        and config.block_m >= 16
        and 16 <= config.block_r <= 256
        and config.block_k >= 32
        and shared <= shared_bytes
    )


def is_legal_expand(config: ExpandConfig, R: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> bool:
    """Whether the expand compiles without certain spills: fp32 tile plus operands within 160 registers a thread."""
    powers = all(v >= 1 and v & (v - 1) == 0 for v in (config.block_m, config.block_n, config.num_warps))
    threads = config.num_warps * 32
    block_r = max(16, triton.next_power_of_2(R))
    registers = (config.block_m * config.block_n * 3 // 2 + config.block_m * block_r) // threads
    shared = (config.block_m + config.block_n) * block_r * 2
    return powers and config.block_m >= 16 and config.block_n >= 16 and registers <= 160 and shared <= shared_bytes


def _rows_a_tile(M: int, L: int) -> int:
    """Rows of a tile for M tokens over up to L groups: 16 while groups are small, 64 once they fill such tiles."""
    per_group = triton.cdiv(M, max(1, min(L, M)))
    if per_group <= 16 or M <= 64:
        return 16
    return 32 if per_group < 64 else 64


def shrink_config_for(M: int, S: int, K: int, R: int, L: int) -> ShrinkConfig:
    """Default tiles, from searches on an H200 at rank 64: K is split until 128 programs run (64 of the large tiles)."""
    block_m = _rows_a_tile(M, L)
    block_r = min(64, max(16, triton.next_power_of_2(R)))
    tiles = max(triton.cdiv(M, block_m), min(L, M)) * S * triton.cdiv(R, block_r)
    block_k = 128 if block_m <= 32 else 64
    while block_k > 32 and block_k > K:
        block_k //= 2
    wanted = 128 if block_m <= 32 else 64
    split_k = 1
    while split_k < 16 and tiles * split_k < wanted and K // (split_k * 2) >= 256:
        split_k *= 2
    while split_k > 1 and triton.cdiv(triton.cdiv(K, block_k), split_k) * block_k * (split_k - 1) >= K:
        split_k //= 2
    return ShrinkConfig(block_m, block_r, block_k, split_k, 4, 4)


def expand_config_for(M: int, S: int, N: int, R: int, L: int) -> ExpandConfig:
    """Default tiles, from the same searches: several column tiles a program, so that finding the group and h pays off."""
    block_m = _rows_a_tile(M, L)
    tiles_n = 2 if block_m == 64 or S == 1 else 4
    config = ExpandConfig(block_m, 128, tiles_n, 4)
    while not is_legal_expand(config, R) and config.block_n > 32:
        config = ExpandConfig(block_m, config.block_n // 2, tiles_n, 4)
    return config


# ---- argument checks and wrappers ------------------------------------------------------------------------------------


def num_row_tiles(M: int, L: int, block_m: int) -> int:
    """The most row tiles that M tokens in at most L groups can need when every group begins a new tile."""
    return M // block_m + min(L, M)


def lora_shrink_grouped(
    x: torch.Tensor,
    lora_a: Sequence[Operand],
    groups: TokenGroups,
    *,
    out: torch.Tensor | None = None,
    quantize_to: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: ShrinkConfig | None = None,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """Down-projections of every token by its own adapter: h = x A^T.

    x: [M, K] bf16 or fp16, rows contiguous. lora_a: S operands [L, R, K] (x's dtype, FP8 with scales [L, R], or NVFP4).
    groups: this step's tokens by slot. out: [split_k, M, S, R] buffer to write (fp32; x's dtype when split_k is 1).
    quantize_to: (codes [M, K] float8_e4m3fn, scale [M] or [M, 1] fp32) to fill in the same launch, as `quantize` would.
    Returns h [split_k, M, S, R]: partial sums over K, for `lora_expand_add` to add in order. Rows without an adapter
    keep whatever `out` held. Neither synchronises nor, with `out` given, allocates. M = 0 launches nothing.
    Raises TypeError or ValueError naming the argument, its value and what is allowed; UnsupportedKernel from `choose`.
    """
    name = "lora_shrink_grouped"
    picked = choose(name, x.device, implementation)
    check_tokens(name, "x", x, picked)
    check_stacks(name, "lora_a", lora_a, x)
    M, K = x.shape
    L, R, _ = lora_a[0].values.shape
    for s, a in enumerate(lora_a):
        if (*a.values.shape[:2], a.columns) != (L, R, K):
            raise ValueError(
                f"{name}: lora_a[{s}] has shape {(*a.values.shape[:2], a.columns)}; allowed: {(L, R, K)} for x {tuple(x.shape)}"
            )
    if not 1 <= R <= MAX_RANK:
        raise ValueError(f"{name}: rank={R} not supported; allowed: 1 to {MAX_RANK}")
    check_groups(name, groups, M, L, x.device)
    S = len(lora_a)
    config = config or shrink_config_for(M, S, K, R, L)
    if not is_legal_shrink(config, K, R, x.element_size(), shared_limit(x.device)):
        raise ValueError(f"{name}: {config} is not legal for K={K}, R={R}; see is_legal_shrink")
    dtype = x.dtype if config.split_k == 1 else torch.float32
    shape = (config.split_k, M, S, R)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=x.device)
    elif tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous() or out.device != x.device:
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}; "
            f"allowed: contiguous {dtype} {shape} on {x.device}"
        )
    if quantize_to is not None:
        codes, x_scale = quantize_to
        if (
            codes.shape != x.shape
            or codes.dtype != torch.float8_e4m3fn
            or not codes.is_contiguous()
            or codes.device != x.device
        ):
            raise ValueError(
                f"{name}: quantize_to[0] is {codes.dtype} {tuple(codes.shape)}; "
                f"allowed: contiguous float8_e4m3fn {(M, K)} on {x.device}"
            )
        if (
            x_scale.numel() != M
            or x_scale.dtype != torch.float32
            or not x_scale.is_contiguous()
            or x_scale.device != x.device
        ):
            raise ValueError(
                f"{name}: quantize_to[1] is {x_scale.dtype} {tuple(x_scale.shape)}; "
                f"allowed: contiguous float32, {M} values on {x.device}"
            )
    if M == 0:
        return out
    if picked is Implementation.REFERENCE:
        out.zero_()
        out[0].copy_(lora_shrink_grouped_ref(x, lora_a, groups)[0])
        if quantize_to is not None:
            ref_codes, ref_scale = quantize_ref(x)
            quantize_to[0].copy_(ref_codes)
            quantize_to[1].copy_(ref_scale.view_as(quantize_to[1]))
        return out
    grid, arguments, constants = shrink_launch(x, lora_a, groups, out, config, quantize_to)
    _lora_shrink_grouped_kernel[grid](*arguments, **constants)
    return out


def shrink_launch(
    x: torch.Tensor,
    lora_a: Sequence[Operand],
    groups: TokenGroups,
    out: torch.Tensor,
    config: ShrinkConfig,
    quantize_to: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[tuple[int], list[Any], dict[str, Any]]:
    """(grid, arguments in order, compile-time constants) of the shrink's launch, nothing checked; arguments as
    `lora_shrink_grouped`."""
    M, K = x.shape
    L, R, _ = lora_a[0].values.shape
    S = len(lora_a)
    num_quant = M if quantize_to is not None else 0
    arguments = [
        x, *stack_pointers(lora_a), out, groups.sorted_tokens, groups.active_slots, groups.counts, groups.starts,
        *(quantize_to or (x, groups.counts)), M, K, R, L + 1, L, num_quant, x.stride(0), *lora_a[0].values.stride()[:2],
    ]  # fmt: skip
    constants = {
        "NUM_SLICES": S,
        "A_SCALED": lora_a[0].format is Format.FP8_E4M3,
        "A_NVFP4": lora_a[0].format is Format.NVFP4,
        "BLOCK_M": config.block_m,
        "BLOCK_R": config.block_r,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "EVEN": K % (config.block_k * config.split_k) == 0 and R % config.block_r == 0,
        "ENTRIES": triton.next_power_of_2(L + 1),
        "QUANT_BLOCK": min(2048, triton.next_power_of_2(K)) if quantize_to is not None else 0,
        "ROUND_FIRST": INTERPRETED,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return (num_quant + shrink_programs(M, S, R, L, config),), arguments, constants


def shrink_programs(M: int, S: int, R: int, L: int, config: ShrinkConfig) -> int:
    """Programs of the shrink for M tokens, those that quantise not counted."""
    return num_row_tiles(M, L, config.block_m) * S * triton.cdiv(R, config.block_r) * config.split_k


def lora_expand_add(
    y: torch.Tensor,
    h: torch.Tensor,
    lora_b: Sequence[Operand],
    groups: TokenGroups,
    *,
    config: ExpandConfig | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """Add every token's up-projection to the base GEMM's output, in place: y[:, slice s] += h[:, s] B[s]^T.

    y: [M, N] bf16 or fp16, rows contiguous, N = sum of N_s; overwritten. h: [split_k, M, S, R] from
    `lora_shrink_grouped`.
    lora_b: S operands [L, N_s, R] (y's dtype, FP8 with scales [L, N_s], or NVFP4), alpha / rank folded in. Returns y.
    use_pdl: launch as the programmatic dependent of the launch before it on the stream, which must be the GEMM that
    writes y and must itself have started only after the shrink ended (any ordinary launch does). Needs compute
    capability 9.0 or more. Rows without an adapter are not touched. M = 0 launches nothing. Raises as
    `lora_shrink_grouped`.
    """
    name = "lora_expand_add"
    picked = choose(name, y.device, implementation)
    check_tokens(name, "y", y, picked)
    check_stacks(name, "lora_b", lora_b, y)
    M, N = y.shape
    L, R = lora_b[0].values.shape[0], lora_b[0].columns
    S = len(lora_b)
    widths = [b.values.shape[1] for b in lora_b]
    if any(b.columns != R for b in lora_b) or sum(widths) != N:
        raise ValueError(
            f"{name}: lora_b shapes {[tuple(b.values.shape) for b in lora_b]} do not fit y {tuple(y.shape)}; "
            f"allowed: equal ranks, widths that sum to {N}"
        )
    if not 1 <= R <= MAX_RANK:
        raise ValueError(f"{name}: rank={R} not supported; allowed: 1 to {MAX_RANK}")
    if h.dim() != 4 or tuple(h.shape[1:]) != (M, S, R) or not h.is_contiguous() or h.device != y.device:
        raise ValueError(
            f"{name}: h is {tuple(h.shape)} on {h.device}; allowed: contiguous [split_k, {M}, {S}, {R}] on {y.device}"
        )
    split_k = h.shape[0]
    if h.dtype != (y.dtype if split_k == 1 else torch.float32):
        raise TypeError(f"{name}: h is {h.dtype} with split_k={split_k}; allowed: {y.dtype} for 1, float32 above")
    check_groups(name, groups, M, L, y.device)
    config = config or expand_config_for(M, S, N, R, L)
    if not is_legal_expand(config, R, shared_limit(y.device)):
        raise ValueError(f"{name}: {config} is not legal for R={R}; see is_legal_expand")
    if use_pdl and picked is Implementation.TRITON and torch.cuda.get_device_capability(y.device)[0] < 9:
        raise ValueError(
            f"{name}: use_pdl=True on compute capability {torch.cuda.get_device_capability(y.device)}; "
            f"allowed: 9.0 or more"
        )
    if M == 0:
        return y
    if picked is Implementation.REFERENCE:
        return y.copy_(lora_expand_add_ref(y, h, lora_b, groups, round_h=True))
    grid, arguments, constants = expand_launch(
        y, h, lora_b, groups, config, use_pdl=use_pdl and picked is Implementation.TRITON
    )
    _lora_expand_add_kernel[grid](*arguments, **constants)
    return y


def expand_launch(
    y: torch.Tensor,
    h: torch.Tensor,
    lora_b: Sequence[Operand],
    groups: TokenGroups,
    config: ExpandConfig,
    *,
    use_pdl: bool,
) -> tuple[tuple[int], list[Any], dict[str, Any]]:
    """(grid, arguments in order, compile-time constants) of the expand-add's launch, nothing checked; arguments as
    `lora_expand_add`."""
    M = y.shape[0]
    L, R = lora_b[0].values.shape[0], lora_b[0].columns
    S = len(lora_b)
    widths = [b.values.shape[1] for b in lora_b]
    block_r = max(16, triton.next_power_of_2(R))
    arguments = [
        y, h, *stack_pointers(lora_b), groups.sorted_tokens, groups.active_slots, groups.counts, groups.starts,
        M, *(widths + [0] * (MAX_SLICES - S)), R, L + 1, L, y.stride(0),
    ]  # fmt: skip
    constants = {
        "NUM_SLICES": S,
        "B_SCALED": lora_b[0].format is Format.FP8_E4M3,
        "B_NVFP4": lora_b[0].format is Format.NVFP4,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": block_r,
        "TILES_N": config.tiles_n,
        "SPLIT_K": h.shape[0],
        "EVEN": block_r == R and all(width % (config.block_n * config.tiles_n) == 0 for width in widths),
        "ENTRIES": triton.next_power_of_2(L + 1),
        "USE_PDL": use_pdl,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **({"launch_pdl": True} if use_pdl else {}),
    }
    return (expand_programs(M, widths, L, config),), arguments, constants


def expand_programs(M: int, widths: Sequence[int], L: int, config: ExpandConfig) -> int:
    """Programs of the expand-add for M tokens."""
    span = config.block_n * config.tiles_n
    return num_row_tiles(M, L, config.block_m) * sum(triton.cdiv(width, span) for width in widths)


def lora_beside_gemm(
    gemm: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: Sequence[Operand],
    lora_b: Sequence[Operand],
    groups: TokenGroups,
    *,
    side_stream: torch.cuda.Stream | None = None,
    shrink: ShrinkConfig | None = None,
    expand: ExpandConfig | None = None,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """The hybrid path of one projection: the shrink, the vendor's GEMM, the expand-add into its output.

    gemm: launches the base GEMM on the current stream and returns y [M, N] (quantisation included). x, lora_a, lora_b, groups:
    as `lora_shrink_grouped` and `lora_expand_add`. side_stream: run the shrink there, beside the GEMM (the faster order on an
    H200); None: before it, on the current stream, with the expand-add as the GEMM's programmatic dependent where the GPU
    has that. Safe in eager mode and under graph capture; neither synchronises. Returns y. Raises as the two functions do.
    """
    M, K = x.shape
    L, R, _ = lora_a[0].values.shape
    config = shrink or shrink_config_for(M, len(lora_a), K, R, L)
    # Allocated on the current stream, which joins the side stream before the last use: no block is handed on too early.
    h = torch.empty(
        (config.split_k, M, len(lora_a), R), dtype=x.dtype if config.split_k == 1 else torch.float32, device=x.device
    )
    if side_stream is None:
        lora_shrink_grouped(x, lora_a, groups, out=h, config=config, implementation=implementation)
        dependent = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] >= 9
        return lora_expand_add(
            gemm(), h, lora_b, groups, config=expand, use_pdl=dependent, implementation=implementation
        )
    current = torch.cuda.current_stream(x.device)
    side_stream.wait_stream(current)
    with torch.cuda.stream(side_stream):
        lora_shrink_grouped(x, lora_a, groups, out=h, config=config, implementation=implementation)
    y = gemm()
    current.wait_stream(side_stream)
    return lora_expand_add(y, h, lora_b, groups, config=expand, implementation=implementation)
