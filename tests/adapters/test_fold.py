"""Scaling folded into B once, PEFT's patterns, and refusals that name module, shape and what it should be."""

import numpy as np
import pytest
import torch

from epilora.adapters.fold import LinearModule, check_against_base, fold, module_rank_and_scaling
from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

MODULE = "model.layers.0.self_attn.q_proj"
BASE = [LinearModule(MODULE, 6, 4), LinearModule("model.layers.0.mlp.up_proj", 8, 4)]


def pair(module: str = MODULE, rank: int = 2, n: int = 6, k: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{module}.lora_A.weight": torch.arange(rank * k, dtype=torch.float32).reshape(rank, k),
        f"base_model.model.{module}.lora_B.weight": torch.ones(n, rank),
    }


def spec(**fields: object) -> AdapterSpec:
    return AdapterSpec(**{"rank": 2, "alpha": 8.0, "target_modules": ("q_proj", "up_proj"), **fields})


def test_scaling_goes_into_b_and_callers_tensors_stay():
    tensors = pair()
    folded = fold(spec(), tensors)[MODULE]
    assert folded.scaling == 4.0
    assert torch.equal(folded.b_NR, torch.full((6, 2), 4.0))
    assert torch.equal(folded.a_RK, tensors[f"base_model.model.{MODULE}.lora_A.weight"])
    assert torch.equal(tensors[f"base_model.model.{MODULE}.lora_B.weight"], torch.ones(6, 2))
    folded.a_RK.zero_()
    assert tensors[f"base_model.model.{MODULE}.lora_A.weight"].sum() == 28


def test_numpy_and_16_bit_tensors_fold_to_fp32():
    tensors = {name: value.to(torch.bfloat16) for name, value in pair().items()}
    assert fold(spec(), tensors)[MODULE].b_NR.dtype == torch.float32
    tensors = {name: value.numpy() for name, value in pair().items()}
    assert torch.equal(fold(spec(), tensors)[MODULE].b_NR, torch.full((6, 2), 4.0))
    frozen = {name: np.frombuffer(v.numpy().tobytes(), np.float32).reshape(v.shape) for name, v in pair().items()}
    assert torch.equal(fold(spec(), frozen)[MODULE].b_NR, torch.full((6, 2), 4.0))


@pytest.mark.parametrize(
    ("fields", "module", "want"),
    [
        ({}, MODULE, (2, 4.0)),
        ({"use_rslora": True, "rank": 4}, MODULE, (4, 4.0)),  # 8 / sqrt(4)
        ({"rank_pattern": (("q_proj", 4),)}, MODULE, (4, 2.0)),
        ({"alpha_pattern": (("self_attn.q_proj", 2.0),)}, MODULE, (2, 1.0)),
        ({"rank_pattern": (("q_proj", 4), (r".*\.0\..*", 1))}, MODULE, (4, 2.0)),  # the first that matches
        ({"rank_pattern": (("roj", 4),)}, MODULE, (2, 4.0)),  # matches from a dot on only
        ({"rank_pattern": (("^model.layers.0.self_attn.q_proj", 4),)}, MODULE, (4, 2.0)),
    ],
)
def test_patterns_are_pefts(fields, module, want):
    assert module_rank_and_scaling(spec(**fields), module) == want


def test_patterns_agree_with_peft():
    from peft.utils.other import get_pattern_key

    patterns = {"q_proj": 4, r"layers\.[01]\..*": 8, "^model.layers.2.mlp.up_proj": 16, "roj": 32}
    for layer in range(3):
        for leaf in ("self_attn.q_proj", "mlp.up_proj"):
            module = f"model.layers.{layer}.{leaf}"
            want = patterns.get(get_pattern_key(patterns, module), 2)
            assert module_rank_and_scaling(spec(rank_pattern=tuple(patterns.items())), module)[0] == want


def test_padding_is_zeros():
    a_RK, b_NR = fold(spec(), pair())[MODULE].padded(5, torch.float16)
    assert a_RK.shape == (5, 4)
    assert b_NR.shape == (6, 5)
    assert not a_RK[2:].any()
    assert not b_NR[:, 2:].any()
    assert a_RK.dtype == torch.float16
    assert b_NR[0, 0] == 4.0


def change(name_part: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: (value if name_part in name else tensor) for name, tensor in pair().items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, ["no LoRA tensors"]),
        ({"model.x.weight": torch.zeros(1, 1)}, ["model.x.weight", "no LoRA weight"]),
        ({k: v for k, v in pair().items() if "lora_A" in k}, [MODULE, "lora_A only"]),
        (change("lora_A", torch.full((2, 4), float("nan"))), ["not finite"]),
        (change("lora_B", torch.full((6, 2), float("inf"))), ["not finite"]),
        (change("lora_A", torch.zeros(3, 4)), [MODULE, "(3, 4)", "(2, 4)"]),
        (change("lora_B", torch.zeros(6)), ["(6,)", "float matrix"]),
        (pair("model.layers.0.self_attn.k_proj"), ["k_proj", "target_modules"]),
    ],
)
def test_fold_refuses(tensors, words):
    with pytest.raises(AdapterRejected) as caught:
        fold(spec(), tensors)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "max_rank", "words"),
    [
        (pair("model.layers.7.self_attn.q_proj"), 8, ["layers.7", "not among the 2", MODULE]),
        (pair(n=5), 8, [MODULE, "lora_B (5, 2)", "lora_B (6, 2)"]),
        (pair(k=3), 8, [MODULE, "lora_A (2, 3)", "lora_A (2, 4)"]),
        (pair(), 1, [MODULE, "rank 2", "rank <= 1"]),
    ],
)
def test_base_refuses(tensors, max_rank, words):
    with pytest.raises(AdapterRejected) as caught:
        check_against_base(fold(spec(), tensors), BASE, max_rank)
    for word in words:
        assert word in str(caught.value)
    check_against_base(fold(spec(), pair()), BASE, 8)
