"""The batch description made on the host against vLLM's own, entry by entry."""

import types

import numpy as np
import pytest
import torch

from epilora.plugin import batch_mapping, compat

L, ROOM = 5, 64
SLOT_TO_ID = [7, None, 3, 12, None]
BATCHES = {
    "one adapter": [3] * 6,
    "none": [0] * 4,
    "mixed": [0, 7, 7, 0, 12, 3, 7, 0],
    "all slots": [12, 3, 7],
    "a full step": [(0, 3, 7, 12)[i * i % 4] for i in range(ROOM)],
    "empty": [],
}


def fresh(captured=()):
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    meta = LoRAKernelMeta.make(L, ROOM, "cpu", list(captured))
    meta.prepare_tensors(torch.full((ROOM,), 4, dtype=torch.int32))  # what an earlier batch left
    return meta


@pytest.mark.parametrize("captured", [(), (1, 2, 4, 6)])
@pytest.mark.parametrize("name", BATCHES)
def test_every_entry_is_vllms(name, captured):
    slots = batch_mapping.slots_of(BATCHES[name], SLOT_TO_ID)
    assert slots.tolist() == [-1 if i == 0 else SLOT_TO_ID.index(i) for i in BATCHES[name]]
    ours, theirs = fresh(captured), fresh(captured)
    batch_mapping.describe(ours, slots)
    if slots.size:
        theirs.prepare_tensors(torch.from_numpy(slots).long())
    else:
        theirs._reset()
        theirs.no_lora_flag_cpu[0] = True
    for field in compat.KERNEL_META_FIELDS:
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field


def test_an_adapter_in_no_slot_is_an_error():
    with pytest.raises(KeyError, match="99"):
        batch_mapping.slots_of([3, 99], SLOT_TO_ID)


def test_the_wrapper_is_updated_as_vllms_is():
    seen = []
    wrapper = types.SimpleNamespace(
        token_mapping_meta=fresh(), prompt_mapping_meta=fresh(), _update_base_metadata=lambda *given: seen.append(given)
    )
    mapping = types.SimpleNamespace(index_mapping=(3, 3, 0, 12), prompt_mapping=(3, 12), is_prefill=True)
    batch_mapping.update_metadata(wrapper, mapping, SLOT_TO_ID, L + 1, 100)
    assert seen == [(mapping, SLOT_TO_ID, L + 1, 100)]
    assert wrapper.is_prefill
    assert wrapper.token_mapping_meta.token_lora_mapping[:4].tolist() == [2, 2, -1, 3]
    assert wrapper.prompt_mapping_meta.active_lora_ids.tolist() == [2, 3, -1, -1, -1, -1]
    assert wrapper.token_mapping_meta.token_lora_mapping.dtype == torch.int32
    assert isinstance(batch_mapping.slots_of((np.int32(3),), SLOT_TO_ID), np.ndarray)
