"""Configuration: files, overrides, and the messages for what cannot work."""

from pathlib import Path

import pytest
from omegaconf.errors import ConfigKeyError, ValidationError

from epilora.config import load_config, to_yaml
from epilora.config.schema import Activations

FOLDER = Path(__file__).resolve().parents[2] / "configs"
SERVE = FOLDER / "serve.yaml"  # Ray Serve's, see tests/actors/test_serve_cli.py
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path != SERVE)
BASE = ["engine.model_path=folder", "task.path=package.module:task"]


def test_defaults_and_overrides() -> None:
    config = load_config(None, [*BASE, "rl.steps=7", "engine.activations=w8a8", "loss.correction=tis_token", "name=x"])
    assert (config.rl.steps, config.engine.activations, config.out) == (7, Activations.w8a8, "runs/x")
    text = to_yaml(config)
    assert "steps: 7" in text
    assert "out: runs/x\n" in text  # interpolations are resolved


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_configuration_loads_and_prints(path: Path) -> None:
    config = load_config(path)
    again = load_config(None, ["engine.model_path=x", "task.path=x:y"])
    assert config.rl.steps > 0
    assert to_yaml(config) != to_yaml(again)


def test_a_file_goes_before_what_it_extends_and_overrides_before_both(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("engine: {model_path: m}\ntask: {path: 'a:b'}\nrl: {steps: 3, group_size: 2}\n")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\nrl: {group_size: 4, max_tokens: 9}\n")
    config = load_config(tmp_path / "more.yaml")
    assert (config.rl.steps, config.rl.group_size, config.rl.max_tokens) == (3, 4, 9)
    config = load_config(tmp_path / "more.yaml", ["rl.steps=5", "rl.group_size=6"])
    assert (config.rl.steps, config.rl.group_size, config.rl.max_tokens) == (5, 6, 9)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- engine\n- task\n")
    with pytest.raises(ValueError, match="holds ListConfig; a configuration is a mapping"):
        load_config(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["engine.nope=1"], ConfigKeyError, "engine.nope"),
        (["rl.steps=soon"], ValidationError, "rl.steps"),
        (["engine.activations=w4a4"], ValidationError, "w8a8"),
        (["lora.rank=64"], ValueError, "engine.max_lora_rank=16"),
        (["engine.dtype=int8"], ValueError, "float32, float16, bfloat16"),
        (["rl.group_size=1"], ValueError, "rl.group_size=1"),
        (["rl.max_staleness=-1"], ValueError, "rl.max_staleness=-1; allowed: >= 0"),
        (["engine.tensor_parallel=0"], ValueError, "engine.tensor_parallel=0"),
        (["engine.max_loras=1"], ValueError, "engine.max_loras=1; allowed: >= 2"),
        (["tenants=[{name: t}]"], ValueError, "tenants[t]: give task"),
        (["tenants=[{name: t, rank: 64, prompts_task: {path: 'a:b'}}]"], ValueError, "tenants[t].rank=64 exceeds"),
        (["deterministic=true", "tenants=[{name: t, prompts_task: {path: 'a:b'}}]"], ValueError, "synchronous"),
        (["rl.max_staleness=9"], ValueError, "engine.max_loras=8 is too few: 11"),
        (["deterministic=true", "rl.max_staleness=1"], ValueError, "synchronous"),
        (["tenants=[{name: x, y: 'z': 1}]"], ValueError, "not valid YAML"),
        (["quick"], ValueError, "not key=value"),
        (["trainer.dtype=bfloat16"], ValueError, "loss.correction=none"),
    ],
)
def test_what_cannot_work_is_refused_with_the_key(overrides: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        load_config(None, [*BASE, *overrides])
    assert words in str(caught.value)


def test_every_slot_may_be_needed_at_once() -> None:
    config = load_config(None, [*BASE, "rl.max_staleness=6"])  # and the policy's current and next version
    assert config.rl.max_staleness + 2 == config.engine.max_loras == 8


def test_missing_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"engine\.model_path, task\.path"):
        load_config(None)


def test_missing_file_lists_what_exists(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        load_config(tmp_path / "none.yaml")
