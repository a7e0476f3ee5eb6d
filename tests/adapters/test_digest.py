"""Digests tell apart what differs, and agree with the store's."""

import torch

from epilora.adapters.digest import adapter_digest, slot_digest, weights_digest
from epilora.store.digest import adapter_digest as store_digest
from epilora.types import AdapterSpec

SPEC = AdapterSpec(4, 8.0, ("v_proj", "q_proj"), rank_pattern=(("q_proj", 2),), alpha_pattern=(("v_proj", 3.0),))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"base_model.model.m{i}.lora_{s}.weight": torch.randn(3, 4, generator=generator) for i in (1, 0) for s in "AB"
    }


def test_adapter_digest_is_the_stores():
    for cast in (torch.float32, torch.bfloat16, torch.float16):
        given = {name: tensor.to(cast) for name, tensor in tensors().items()}
        assert adapter_digest(SPEC, given) == store_digest(SPEC, given)
    arrays = {name: tensor.numpy() for name, tensor in tensors().items()}
    assert adapter_digest(SPEC, arrays) == adapter_digest(SPEC, tensors()) == store_digest(SPEC, arrays)


def test_adapter_digest_sees_every_part():
    base = adapter_digest(SPEC, tensors())
    reordered = dict(reversed(list(tensors().items())))
    assert adapter_digest(SPEC, reordered) == base
    changed = tensors()
    changed["base_model.model.m0.lora_A.weight"][0, 0] += 1e-6
    assert adapter_digest(SPEC, changed) != base
    assert adapter_digest(AdapterSpec(4, 8.5, ("v_proj", "q_proj")), tensors()) != base
    turned = {name: tensor.t().contiguous().reshape(tensor.shape) for name, tensor in tensors().items()}
    assert adapter_digest(SPEC, turned) != base


def test_slot_digest_ignores_empty_modules_only():
    a, b = torch.ones(2, 3), torch.zeros(4, 2)
    base = slot_digest({"m": (a, b)})
    assert slot_digest({"m": (a, b), "n": (torch.zeros(2, 3), torch.zeros(4, 2))}) == base
    assert slot_digest({"n": (a, b)}) != base
    assert slot_digest({"m": (a.half(), b.half())}) != base
    one_bit = a.clone()
    one_bit[1, 2] += 1e-7
    assert slot_digest({"m": (one_bit, b)}) != base


def test_weights_digest_orders_names_and_sees_layout():
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn)
    assert weights_digest([("x", x), ("y", y)]) == weights_digest([("y", y), ("x", x)])
    assert weights_digest([("x", x)]) != weights_digest([("x", x.t())])
    assert weights_digest([("x", x)]) != weights_digest([("x", x.reshape(3, 2))])
    assert weights_digest([("x", x.t())]) == weights_digest([("x", x.t().contiguous())])
