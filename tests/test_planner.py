"""The planner's arithmetic, and its refusals."""

import json
from pathlib import Path

import pytest

from epilora import planner
from epilora.config import load_config
from epilora.errors import MemoryInfeasible

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def model(folder: Path, config: dict) -> planner.ModelFacts:
    (folder / "config.json").write_text(json.dumps(config))
    return planner.read_model(folder)


def config(*overrides: str):
    return load_config(None, ["engine.model_path=m", "task.path=a:b", *overrides])


def test_parameters_of_known_models(tmp_path: Path) -> None:
    tiny = model(tmp_path, TINY)
    # per layer: q 96*96, k and v 32*96, o 96*96, gate, up, down 3 * 288*96
    assert tiny.linear_parameters == 2 * (2 * 96 * 96 + 2 * 32 * 96 + 3 * 288 * 96)
    big = model(tmp_path, QWEN3_8B)
    assert big.linear_parameters + big.other_parameters == 8_190_735_360  # the published count of Qwen3-8B
    assert big.kv_bytes_per_token == 2 * 36 * 8 * 128


def test_cpu_plan_adds_up_and_refuses_with_the_sum(tmp_path: Path) -> None:
    facts = model(tmp_path, TINY)
    plan = planner.plan(config("trainer.placement=shared_kv_kept"), facts, available_bytes=8 * planner.GIB)
    assert plan.total_bytes == sum(line.count_bytes for line in plan.memory)
    assert plan.bundle == {"CPU": 1.0}
    codes = next(line for line in plan.memory if "codes" in line.what)
    assert codes.count_bytes == facts.linear_parameters
    with pytest.raises(MemoryInfeasible, match=r"(?s)sum.*available.*1024\.0 MiB"):
        planner.plan(config(), facts, available_bytes=1 * planner.GIB)


def test_cpu_refuses_a_base_of_the_trainers_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="own_bf16 needs a GPU"):
        planner.plan(config("trainer.placement=own_bf16"), model(tmp_path, TINY))


def test_gpu_plan_names_what_fits_and_why_the_rest_does_not(tmp_path: Path) -> None:
    facts = model(tmp_path, QWEN3_8B)
    gpu = [
        "engine.num_gpus=0.5",
        "trainer.num_gpus=0.5",
        "engine.dtype=bfloat16",
        "trainer.dtype=bfloat16",
        "engine.kv_cache_mib=40000",
    ]
    plan = planner.plan(config(*gpu, "trainer.placement=shared_kv_kept"), facts)
    assert "H200" in plan.accelerators
    assert "GiB needed" in plan.refusals["L40S"]
    assert plan.bundle["GPU"] == 1.0
    two = planner.plan(config(*gpu, "trainer.placement=own_bf16"), facts)
    assert two.total_bytes - plan.total_bytes == 2 * 8_190_735_360
    with pytest.raises(MemoryInfeasible, match="no known GPU"):
        planner.plan(config(*gpu, "engine.kv_cache_mib=900000", "trainer.placement=shared_kv_kept"), facts)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        model(tmp_path, {**TINY, "architectures": ["MambaForCausalLM"]})
