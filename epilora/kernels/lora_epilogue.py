"""What the epilogue of a GEMM with 16-bit activations adds for the adapters: y += h B^T, by slot and slice.

A tile may hold rows of several adapters and columns of several slices: for every active slot with a row in the tile, and every slice
with a column in it, the tile's h is multiplied by that adapter's slice of B and added to that adapter's rows. h is summed over its
parts in order and rounded once to the activations' dtype. FP8 and NVFP4 adapters are widened exactly; FP8's row scales and
NVFP4's global scale multiply the fp32 product.

Legend: M tokens, N = sum of N_s out features, S slices, R rank, L adapter slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..quant.formats import Format
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import MAX_RANK, check_groups, check_stacks, stack_pointers
from .lora_expand import TokenGroups
from .nvfp4_tile import load_nvfp4_rows, nvfp4_unit
from .tiles import widen_e4m3


@dataclass(frozen=True)
class LoraTerm:
    """What the epilogue adds for the adapters.

    h: [split_k, M, S, R] from `lora_shrink_grouped` (parts are added in order), or [1, M, S, R] in x's dtype.
    lora_b: S operands [L, N_s, R] in x's dtype, FP8 with row scales or NVFP4; alpha / rank folded in.
    slots: int32 [M] slot of every token, -1 for none; None: every token uses slot 0 (one adapter, as in training).
    groups: the step's groups; needed with `slots`, whose stale entries only they tell apart.
    """

    h: torch.Tensor
    lora_b: Sequence[Operand]
    slots: torch.Tensor | None = None
    groups: TokenGroups | None = None

    @property
    def rank(self) -> int:
        return self.lora_b[0].columns

    @property
    def widths(self) -> list[int]:
        """N_s of every slice."""
        return [b.values.shape[1] for b in self.lora_b]


def add_lora_term_ref(y: torch.Tensor, x_dtype: torch.dtype, lora: LoraTerm) -> torch.Tensor:
    """y [M, N] fp32 with the term added in place, plain torch; h is rounded once to x's dtype, as the kernels do."""
    h = lora.h.float().sum(0).to(x_dtype).float()
    num_slots = lora.lora_b[0].values.shape[0]
    if lora.slots is None:
        chosen = [(0, torch.ones(y.shape[0], dtype=torch.bool, device=y.device))]
    else:
        assert lora.groups is not None, "slots come with groups"
        listed = lora.groups.active_slots.tolist()
        chosen = [(slot, lora.slots[: y.shape[0]] == slot) for slot in listed if 0 <= slot < num_slots]
    reals = [dequantize(b) for b in lora.lora_b]
    for slot, rows in chosen:
        column = 0
        for s, stack in enumerate(reals):
            real = stack[slot]
            y[rows, column : column + real.shape[0]] += h[rows, s] @ real.t()
            column += real.shape[0]
    return y


def check_lora_term(name: str, lora: LoraTerm, x: torch.Tensor, N: int) -> None:
    """Check a term for x [M, K] and N out features. Raises TypeError or ValueError naming argument, value and what is allowed."""
    M = x.shape[0]
    check_stacks(name, "lora.lora_b", lora.lora_b, x)
    widths, R, S, L = lora.widths, lora.rank, len(lora.lora_b), lora.lora_b[0].values.shape[0]
    if sum(widths) != N or any(b.columns != R for b in lora.lora_b) or not 1 <= R <= MAX_RANK:
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
    slots = lora.slots
    if slots is None:
        return
    if lora.groups is None:
        raise ValueError(f"{name}: lora.slots given without lora.groups; give both, or neither for one adapter")
    if slots.dtype != torch.int32 or slots.dim() != 1 or slots.numel() < M or slots.device != x.device:
        raise ValueError(
            f"{name}: lora.slots is {slots.dtype} {tuple(slots.shape)}; "
            f"allowed: int32 with at least {M} entries on {x.device}"
        )
    check_groups(name, lora.groups, M, L, x.device)


def term_arguments(lora: LoraTerm | None, N: int, nothing: torch.Tensor) -> tuple[list[Any], list[int], dict[str, Any]]:
    """(h, B pointers, slots, active slots; widths, entries, slots; compile-time constants) of a launch. nothing: any tensor."""
    if lora is None:
        constants = {"R": 16, "NUM_SLICES": 1, "LORA": 0, "B_SCALED": False, "B_NVFP4": False, "SPLIT_H": 1}
        return [nothing] * 15, [N, 0, 0, 0, 2, 1], constants | {"BLOCK_R": 16}
    pointers = [lora.h, *stack_pointers(lora.lora_b), nothing, nothing]
    if lora.slots is not None and lora.groups is not None:
        pointers[-2:] = [lora.slots, lora.groups.active_slots]
    R, S, L = lora.rank, len(lora.lora_b), lora.lora_b[0].values.shape[0]
    constants = {
        "R": R,
        "NUM_SLICES": S,
        "LORA": 1 if lora.slots is None else 2,
        "B_SCALED": lora.lora_b[0].format is Format.FP8_E4M3,
        "B_NVFP4": lora.lora_b[0].format is Format.NVFP4,
        "SPLIT_H": lora.h.shape[0],
        "BLOCK_R": max(16, triton.next_power_of_2(R)),
    }
    return pointers, [*lora.widths, *[0] * (4 - S), L + 1, L], constants


@triton.jit
def _add_slice(
    acc, h_ptr, b_ptr, bs_ptr, bg_ptr, slot, offs_m, mask_m, offs_n, start, width, stride_part, stride_row,
    R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_H: tl.constexpr, SCALED: tl.constexpr, NVFP4: tl.constexpr,
    SWAP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
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
    if NVFP4:
        b = load_nvfp4_rows(b_ptr, bs_ptr, b_row.to(tl.int64), mask_n, R, BLOCK_N, BLOCK_R, dtype)
        whole = tl.load(bg_ptr + slot) * nvfp4_unit(dtype)
        if SWAP:
            acc += tl.dot(b, tl.trans(h), input_precision="ieee") * whole
        else:
            acc += tl.dot(h, tl.trans(b), input_precision="ieee") * whole
    else:
        b = tl.load(
            b_ptr + b_row.to(tl.int64)[:, None] * R + offs_r[None, :],
            mask=mask_n[:, None] & (offs_r < R)[None, :],
            other=0.0,
        )
        if SCALED:
            scale = tl.load(bs_ptr + b_row, mask=mask_n, other=0.0)
            b = widen_e4m3(b, dtype)
            if SWAP:
                acc += tl.dot(b, tl.trans(h), input_precision="ieee") * scale[:, None]
            else:
                acc += tl.dot(h, tl.trans(b), input_precision="ieee") * scale[None, :]
        elif SWAP:
            acc = tl.dot(b, tl.trans(h), acc, input_precision="ieee")
        else:
            acc = tl.dot(h, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def add_lora_term(
    acc, h_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr, bs0_ptr, bs1_ptr, bs2_ptr, bs3_ptr, bg0_ptr, bg1_ptr, bg2_ptr, bg3_ptr, slots_ptr, active_ptr,
    M, n0, n1, n2, n3, num_entries, num_slots, offs_m, mask_m, offs_n, tile_from,
    R: tl.constexpr, NUM_SLICES: tl.constexpr, LORA: tl.constexpr, B_SCALED: tl.constexpr, B_NVFP4: tl.constexpr, SPLIT_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SWAP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] fp32 (SWAP: transposed) with the term of the tile that begins at column `tile_from`.

    LORA: 1 slot 0 for every row, 2 by slots and active slots.
    """
    stride_part = M.to(tl.int64) * NUM_SLICES * R
    stride_row: tl.constexpr = NUM_SLICES * R
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
            if tile_from < n0:
                acc = _add_slice(
                    acc, h_ptr, b0_ptr, bs0_ptr, bg0_ptr, slot, offs_m, rows, offs_n, 0, n0, stride_part, stride_row,
                    R, BLOCK_N, BLOCK_R, SPLIT_H, B_SCALED, B_NVFP4, SWAP, dtype,
                )  # fmt: skip
            if NUM_SLICES > 1:
                start = n0
                if (tile_from < start + n1) & (tile_from + BLOCK_N > start):
                    acc = _add_slice(
                        acc, h_ptr + R, b1_ptr, bs1_ptr, bg1_ptr, slot, offs_m, rows, offs_n, start, n1, stride_part, stride_row,
                        R, BLOCK_N, BLOCK_R, SPLIT_H, B_SCALED, B_NVFP4, SWAP, dtype,
                    )  # fmt: skip
            if NUM_SLICES > 2:
                start = n0 + n1
                if (tile_from < start + n2) & (tile_from + BLOCK_N > start):
                    acc = _add_slice(
                        acc, h_ptr + 2 * R, b2_ptr, bs2_ptr, bg2_ptr, slot, offs_m, rows, offs_n, start, n2, stride_part, stride_row,
                        R, BLOCK_N, BLOCK_R, SPLIT_H, B_SCALED, B_NVFP4, SWAP, dtype,
                    )  # fmt: skip
            if NUM_SLICES > 3:
                start = n0 + n1 + n2
                if tile_from + BLOCK_N > start:
                    acc = _add_slice(
                        acc, h_ptr + 3 * R, b3_ptr, bs3_ptr, bg3_ptr, slot, offs_m, rows, offs_n, start, n3, stride_part, stride_row,
                        R, BLOCK_N, BLOCK_R, SPLIT_H, B_SCALED, B_NVFP4, SWAP, dtype,
                    )  # fmt: skip
    return acc
