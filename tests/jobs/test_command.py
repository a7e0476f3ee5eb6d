"""The command line of every job: what `--dry-run` shows, and that nothing starts for it."""

from __future__ import annotations

import sys

import pytest
import ray
import yaml

from epilora.config.schema import JobConfig
from jobs.command import job_main


async def never(config: JobConfig) -> None:
    raise AssertionError("the job ran")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["job", *arguments])
    job_main(never, description="a job")


def test_dry_run_prints_configuration_and_placement_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--config", "configs/rl_small.yaml", "--dry-run", "rl.steps=7", "engine.kv_cache_mib=32")
    shown = capsys.readouterr().out
    settings, plan = shown.split("\nplacement: one bundle")
    resolved = yaml.safe_load(settings)
    assert resolved["rl"]["steps"] == 7
    assert resolved["out"] == f"runs/{resolved['name']}"  # interpolations are resolved
    assert "{'CPU': 1.0}" in plan
    assert "KV cache" in plan
    assert " 32.0" in plan
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "configs/none.yaml"], "no configuration file configs/none.yaml"),
        (["--config", "configs/rl_small.yaml", "engine.nope=1"], "engine.nope"),
        (["--config", "configs/rl_small.yaml", "--dry-run", "engine.kv_cache_mib=100000000"], "does not fit"),
    ],
)
def test_what_cannot_work_ends_with_the_reason_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert words in str(caught.value)
    assert not ray.is_initialized()
