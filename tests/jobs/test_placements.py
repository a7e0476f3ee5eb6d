"""Every placement has its file, differs from the 9B's job in nothing else, and is refused where it cannot fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from epilora import planner
from epilora.config import load_config
from epilora.errors import MemoryInfeasible
from epilora.model_facts import read_facts
from epilora.sizing import RECIPES
from jobs.system import trainer_kwargs

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# file -> engine's base, trainer's own base, offloaded, KV kept while it trains, correction
PLACEMENTS = {
    "two_bf16": ("none", "16bit", False, True, "none"),
    "bf16_offloaded": ("none", "16bit", True, False, "none"),
    "flashrl": ("fp8_per_channel", "16bit", False, True, "tis_token"),
    "flashrl_offloaded": ("fp8_per_channel", "16bit", True, False, "tis_token"),
    "fp8": ("fp8_per_channel", "fp8", False, True, "tis_token"),
    "fp8_offloaded": ("fp8_per_channel", "fp8", True, False, "tis_token"),
    "one_fp8_kv_kept": ("fp8_per_channel", "", False, True, "tis_token"),
    "one_fp8": ("fp8_per_channel", "", False, False, "tis_token"),
    "one_bf16": ("none", "", False, True, "none"),
}


def test_there_is_one_file_for_each() -> None:
    assert {path.stem.removeprefix("placement_") for path in CONFIGS.glob("placement_*.yaml")} == set(PLACEMENTS)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_is_what_it_says_and_nothing_else(name: str) -> None:
    config, usual = load_config(CONFIGS / f"placement_{name}.yaml"), load_config(CONFIGS / "rl_9b.yaml")
    recipe = RECIPES[config.trainer.placement]
    found = (config.engine.quantization, recipe.own, recipe.offloaded, recipe.kv_kept, config.loss.correction.value)
    assert found == PLACEMENTS[name]
    told = trainer_kwargs(config)
    assert (told["own"], told["offloaded"], told["gives_memory_back"]) == (
        recipe.own,
        recipe.offloaded,
        not recipe.kv_kept,
    )
    assert told["device"] == "cuda"
    mine, reference = asdict(config), asdict(usual)
    for section, keys in {
        "engine": ("quantization", "activations"),
        "trainer": ("placement",),
        "loss": ("correction",),
    }.items():
        for key in keys:
            mine[section].pop(key)
            reference[section].pop(key)
    for key in ("name", "out"):
        mine.pop(key), reference.pop(key)
    assert mine == reference


def placed(name: str, shape: str, gpu: str) -> planner.Plan:
    overrides = [f"engine.accelerator_types=[{gpu}]", f"engine.shape={shape}"]
    config = load_config(CONFIGS / f"placement_{name}.yaml", overrides)
    return planner.plan(config, read_facts(config.engine.model_path, shape))


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(MemoryInfeasible, match=r"base.*bfloat16(.|\n)*GiB"):
        placed("two_bf16", "qwen3.5-27b", "H100")
    assert placed("two_bf16", "qwen3.5-27b", "H200").candidates
    with pytest.raises(MemoryInfeasible):
        placed("two_bf16", "qwen3.5-9b", "L40S")
    assert placed("one_fp8", "qwen3.5-9b", "L40S").candidates
