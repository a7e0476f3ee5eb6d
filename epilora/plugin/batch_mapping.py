"""vLLM's description of a batch's adapters, made on the host instead of asked of the GPU.

Stock vLLM sorts and counts the slots of a step's tokens on the GPU and reads two of the results back: whenever the batch changes (a
request comes or goes, a prompt's next part) the host waits for the previous step to end, four times. The slots are known on the
host; here they are sorted and counted there, and copied asynchronously. The arrays are the same, entry by entry.

Legend: M tokens, L adapter slots.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def slots_of(adapter_ids: Sequence[int], slot_to_id: Sequence[int | None]) -> np.ndarray:
    """[M] int32: the slot of each token's adapter, -1 for id 0. Raises KeyError for an adapter that is in no slot."""
    slot_of = {adapter: slot for slot, adapter in enumerate(slot_to_id) if adapter is not None}
    ids, where = np.unique(np.asarray(adapter_ids, dtype=np.int64), return_inverse=True)
    return np.array([slot_of[int(i)] if i > 0 else -1 for i in ids], dtype=np.int32)[where]


def describe(meta: Any, slots: np.ndarray) -> None:
    """Fill a LoRAKernelMeta for these slots, as its `prepare_tensors` does, without waiting for the GPU.

    meta: on any device; its arrays have room for M tokens and L + 1 entries. slots: [M] int32, -1 for none.
    """
    present, counts = np.unique(slots, return_counts=True)
    nobody = not slots.size or bool(present.size == 1 and present[0] == -1)
    entries = meta.active_lora_ids.numel()
    active = np.full(entries, -1, np.int32)
    per_slot, starts = np.zeros(entries, np.int32), np.zeros(entries + 1, np.int32)
    meta.no_lora_flag_cpu[0] = nobody
    parts = [(meta.active_lora_ids, active), (meta.num_tokens_per_lora, per_slot), (meta.lora_token_start_loc, starts)]
    number = 0
    if not nobody:
        number = int(present.size)
        active[:number], per_slot[:number] = present, counts
        starts[1 : number + 1] = np.cumsum(counts)
        captured = meta.captured_lora_counts  # a graph's grid was made for the next of these
        at = bisect.bisect_left(captured, number)
        number = captured[at] if at < len(captured) else number
        order = np.argsort(slots, kind="stable").astype(np.int32)
        parts += [
            (meta.token_lora_mapping[: slots.size], slots),
            (meta.token_indices_sorted_by_lora_ids[: slots.size], order),
        ]
    meta.num_active_loras_cpu[0] = number
    _copy(parts)


def _copy(parts: list[tuple[torch.Tensor, np.ndarray]]) -> None:
    """Copy host arrays to tensors, from one pinned buffer where they are on a GPU (torch keeps it until the copies are done)."""
    packed = torch.from_numpy(np.concatenate([values for _, values in parts]))
    if parts[0][0].is_cuda:
        packed = packed.pin_memory()
    start = 0
    for target, values in parts:
        target.copy_(packed[start : start + values.size], non_blocking=True)
        start += values.size


def update_metadata(
    wrapper: Any, mapping: Any, slot_to_id: Sequence[int | None], max_loras: int, vocab_size: int, **_: Any
) -> None:
    """`PunicaWrapperGPU.update_metadata` with both descriptions made on the host."""
    wrapper.is_prefill = mapping.is_prefill
    wrapper._update_base_metadata(mapping, slot_to_id, max_loras, vocab_size)
    describe(wrapper.token_mapping_meta, slots_of(mapping.index_mapping, slot_to_id))
    describe(wrapper.prompt_mapping_meta, slots_of(mapping.prompt_mapping, slot_to_id))
