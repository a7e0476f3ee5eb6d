"""LoRA on the CPU: rows grouped by adapter, two small GEMMs a group, over the engine's own slot buffers.

    for each slot s with rows r:    y[r, slice] += (x[r] A_s^T) B_s^T

Stock vLLM 0.28 gathers one copy of A and B per token ([M, N, R] elements) and reads index -1 as the last slot, so that
base rows batched with adapter rows get an adapter. Here rows without an adapter are in no group and stay as they are.

Legend: M tokens, K in features, N out features, R rank, L slots. S slices packed along N. The arithmetic is
`epilora.kernels.cpu_reference.lora_delta`: sums in fp32, the [M, R] intermediate not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from epilora.kernels.cpu_reference import ACCUMULATE_DTYPE


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
    a_LSK: torch.Tensor,
    b_slices: tuple[torch.Tensor, ...],
    *,
    rows: RowGroups,
    ranks: list[list[int]],
) -> None:
    """Add every group's delta to y in place; rows in no group are not written.

    y_MN: [M', N] fp32, M' >= rows.num_rows (rows past it are padding). x_MK: [M', K], any float dtype.
    a_LSK: [L, S * R, K], the A of all S slices below one another, so that one GEMM shrinks for all of them.
    b_slices: per slice [L, 1, N_i, R], the N_i summing to N. ranks: [slice][slot], columns of B in use; 0: nothing
    there.
    """
    rank_stride = a_LSK.shape[1] // len(b_slices)
    x_MK = x_MK.to(ACCUMULATE_DTYPE)
    for slot, group in rows.groups:
        used = [slot_ranks[slot] for slot_ranks in ranks]
        if not any(used):
            continue
        neighbours = isinstance(group, slice)
        a_SK = a_LSK[slot, : used[0]] if len(used) == 1 else a_LSK[slot]
        h_MS = F.linear(x_MK[group], a_SK.to(ACCUMULATE_DTYPE))
        # Neighbouring rows: B's GEMM adds onto y itself. Scattered rows: their deltas side by side, one scattered add.
        target = y_MN[group] if neighbours else y_MN.new_zeros(h_MS.shape[0], y_MN.shape[1])
        column = 0
        for index, (b_LNR, rank) in enumerate(zip(b_slices, used, strict=True)):
            width = b_LNR.shape[2]
            if rank:
                h_MR = h_MS[:, index * rank_stride : index * rank_stride + rank]
                target[:, column : column + width].addmm_(h_MR, b_LNR[slot, 0, :, :rank].t().to(ACCUMULATE_DTYPE))
            column += width
        if isinstance(group, torch.Tensor):
            y_MN.index_add_(0, group, target)


def describe_batch(punica_wrapper: Any, max_loras: int) -> None:
    """Give a CPU wrapper the batch description that vLLM's GPU wrapper has (`token_mapping_meta`), once, so that the
    operators of `gpu_ops` can be run in plain torch. `register` keeps it up to date."""
    if getattr(punica_wrapper, "token_mapping_meta", None) is None:
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        most = punica_wrapper._token_lora_indices.numel()
        punica_wrapper.token_mapping_meta = LoRAKernelMeta.make(max_loras, most, device="cpu")
