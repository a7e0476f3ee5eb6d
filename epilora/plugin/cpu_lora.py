"""LoRA on the CPU: rows grouped by adapter, two small GEMMs a group, over the engine's own slot buffers.

    for each slot s with rows r:    y[r, slice] += (x[r] A_s^T) B_s^T

Stock vLLM 0.28 gathers one copy of A and B per token ([M, N, R] elements) and reads index -1 as the last slot, so that base rows
batched with adapter rows get an adapter. Here rows without an adapter are in no group and stay as they are.

Legend: M tokens, K in features, N out features, R rank, L slots. Sums run in fp32 (`epilora.kernels.cpu_reference`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epilora.kernels.cpu_reference import lora_delta


@dataclass(frozen=True)
class RowGroups:
    """Rows of a batch by slot. groups: (slot, rows) pairs, rows a slice if they are neighbours, else int64 indices."""

    groups: tuple[tuple[int, slice | torch.Tensor], ...]
    num_rows: int


NO_ROWS = RowGroups((), 0)


def group_rows(token_lora_indices: torch.Tensor) -> RowGroups:
    """Group a mapping by slot. token_lora_indices: [M] integers on the CPU, slot of each row, negative for none."""
    num_rows = token_lora_indices.numel()
    groups: list[tuple[int, slice | torch.Tensor]] = []
    for slot in torch.unique(token_lora_indices).tolist():
        if slot < 0:
            continue
        rows = torch.nonzero(token_lora_indices == slot).flatten()
        first, last = int(rows[0]), int(rows[-1])
        neighbours = last - first + 1 == rows.numel()
        groups.append((slot, slice(first, last + 1) if neighbours else rows))
    return RowGroups(tuple(groups), num_rows)


def add_lora(
    y_MN: torch.Tensor,
    x_MK: torch.Tensor,
    a_slices: tuple[torch.Tensor, ...],
    b_slices: tuple[torch.Tensor, ...],
    output_slices: tuple[int, ...],
    rows: RowGroups,
    ranks: list[list[int]],
) -> None:
    """Add every group's delta to y in place; rows in no group are not written.

    y_MN: [M', N], fp32 or the dtype of x; M' >= rows.num_rows (rows past it are padding). x_MK: [M', K].
    a_slices, b_slices: per slice [L, 1, R, K] and [L, 1, N_i, R]; output_slices: the N_i, summing to N.
    ranks: [slice][slot], ranks really used (0: the slot holds nothing for this slice).
    """
    for slot, group in rows.groups:
        whole = isinstance(group, slice) and group.start == 0 and group.stop == x_MK.shape[0]
        x_group = x_MK if whole else x_MK[group]
        offset = 0
        for a_LRK, b_LNR, width, slot_ranks in zip(a_slices, b_slices, output_slices, ranks, strict=True):
            rank = slot_ranks[slot]
            if rank:
                delta = lora_delta(x_group, a_LRK[slot, 0, :rank], b_LNR[slot, 0, :, :rank], out_dtype=torch.float32)
                out = y_MN[:, offset : offset + width]
                if isinstance(group, slice):
                    out[group] += delta
                elif out.dtype == torch.float32:
                    out.index_add_(0, group, delta)
                else:  # one rounding of the sum, not of the delta and again of the sum
                    out[group] = (out[group].float() + delta).to(out.dtype)
            offset += width
