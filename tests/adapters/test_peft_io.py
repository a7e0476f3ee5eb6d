"""PEFT folders: round trip, what PEFT itself writes, and refusals."""

import json

import pytest
import torch

from epilora.adapters.peft_io import config_of, read_peft, spec_of, write_peft
from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

SPEC = AdapterSpec(4, 6.5, ("q_proj", "up_proj"), True, (("q_proj", 2),), (("up_proj", 3.0),))


def test_round_trip(tmp_path):
    tensors = {
        "base_model.model.m.q_proj.lora_A.weight": torch.randn(2, 3),
        "base_model.model.m.q_proj.lora_B.weight": torch.randn(5, 2),
    }
    write_peft(tmp_path / "a", SPEC, tensors, base_model="tiny")
    spec, read = read_peft(tmp_path / "a")
    assert spec == SPEC
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["base_model_name_or_path"]) == (
        4,
        6.5,
        True,
        "tiny",
    )


def test_peft_reads_our_config():
    from peft import LoraConfig

    config = LoraConfig(**{k: v for k, v in config_of(SPEC).items() if k != "peft_type"})
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 6.5, True)
    assert set(config.target_modules) == {"q_proj", "up_proj"}
    assert config.rank_pattern == {"q_proj": 2}


def test_reads_what_peft_writes(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(3, 5))
    peft_model = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    peft_model.save_pretrained(tmp_path)
    spec, tensors = read_peft(tmp_path)
    assert (spec.rank, spec.alpha, spec.target_modules, spec.scaling) == (2, 4.0, ("q_proj",), 2.0)
    assert {tuple(t.shape) for t in tensors.values()} == {(2, 3), (5, 2)}
    assert set(tensors) == {"base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"}


def test_all_linear_is_pefts_shorthand():
    from peft import LoraConfig

    spec = AdapterSpec(2, 4.0, ("all-linear",))
    assert LoraConfig(target_modules=config_of(spec)["target_modules"]).target_modules == "all-linear"
    assert spec_of(config_of(spec)) == spec


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "IA3", "IA3"),
        ("bias", "all", "bias"),
        ("use_dora", True, "use_dora"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("target_modules", [], "target_modules"),
        ("target_modules", ".*_proj", "regular expression"),
    ],
)
def test_refuses(field, value, words):
    with pytest.raises(AdapterRejected, match=words):
        spec_of({**config_of(SPEC), field: value})


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(AdapterRejected, match="no such folder"):
        read_peft(tmp_path / "nowhere")
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(AdapterRejected, match=r"adapter_config.json is missing.*other\.txt"):
        read_peft(tmp_path)
    with pytest.raises(AdapterRejected, match="'r' is missing"):
        spec_of({"lora_alpha": 2, "target_modules": ["q_proj"]})
