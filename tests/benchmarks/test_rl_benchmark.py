"""The RL benchmark's programs in their small form, and the summary recomputed from the results file's rows."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # chosen when triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

from benchmarks.rl import __main__ as program
from benchmarks.rl.summary import samples, summarise

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "rl_h200.json"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("rl") / "rl.json"
    program.main(["gradients", "train_speed", "memory", "--small", "--out", str(out)])
    return json.loads(out.read_text())["rows"]


def test_small_programs_write_the_rows_the_summary_reads(rows: list[dict]) -> None:
    by_case = {(row["case"], row["provider"]): row for row in rows}
    gradient = by_case["gradient/model/qwen3-8b", "registers"]
    assert gradient["samples_cosine"][0] >= 0.9999
    assert gradient["tensors"] == 2 * 14
    assert by_case["gradient/attention/qwen3-8b", "packed"]["samples_cosine"][0] >= 0.9999
    speed = {name: by_case["train_speed/qwen3-8b", name] for name in ("fp8_panel", "bf16")}
    assert all(len(row["samples_tok_s"]) == 1 and row["grad_norm"] > 0 for row in speed.values())
    ratio = speed["fp8_panel"]["samples_tok_s"][0] / speed["bf16"]["samples_tok_s"][0]
    assert summarise(rows)["train_tokens_s_over_bf16"] == pytest.approx(ratio, abs=1e-4)
    memory = by_case["memory/qwen3.5-27b/trainer", "fp8_panel"]
    assert (memory["zero_variance_groups"], memory["sequences"]) == (0, 4)
    assert memory["grad_norm"] > 0
    assert summarise(rows)["peak_27b_gib"] is None  # the trainer alone is not the system


@pytest.mark.vllm
def test_arms_learn_as_parallel_jobs_on_one_engine(tmp_path: Path) -> None:
    out = tmp_path / "rl.json"
    arms = ["flashrl", "w8a8_tis", "matched", "fake_quantised"]
    program.main(["learning", "--small", "--out", str(out), "--arms", *arms])
    found = json.loads(out.read_text())
    rows = {row["provider"]: row for row in found["rows"] if row["provider"] != "base"}
    assert list(rows) == arms
    assert all(len(row["kl"]) == len(row["step_s"]) == 2 and row["base_unchanged"] for row in rows.values())
    assert [row["jobs"] for row in rows.values()] == [2, 2, 1, 1]
    assert rows["fake_quantised"]["kl"][0] < 1e-9  # the values of the codes, unrounded activations, on both sides
    assert rows["matched"]["kl"][0] < 1e-9 < rows["w8a8_tis"]["kl"][0]
    assert found["summary"]["acc_flashrl"] == rows["flashrl"]["samples_accuracy"][0]
    assert found["summary"]["fp8_trainer_kl_over_flashrl"] > 0


@pytest.mark.vllm
def test_the_marlin_control_says_what_it_needs(tmp_path: Path) -> None:
    out = tmp_path / "rl.json"
    with pytest.raises(SystemExit, match="failed: learning"):
        program.main(["learning", "--small", "--out", str(out), "--arms", "marlin"])
    assert "Marlin kernel needs a GPU" in json.loads(out.read_text())["rows"][-1]["failure"]
    with pytest.raises(SystemExit, match="failed: learning"):
        program.main(["learning", "--small", "--out", str(out), "--arms", "marlin", "bf16"])
    assert "a process of its own" in json.loads(out.read_text())["rows"][-1]["failure"]


def test_of_co_serving_the_worst_cell_counts() -> None:
    def row(name: str, provider: str, jobs: int, rate: float, value: float) -> dict:
        facts = {"case": f"coserve/qwen3-8b/{name}", "provider": provider, "M": jobs, "rate": rate, "run_id": "r"}
        return facts | {"unit": "s", "samples_s": [value]}

    rows = [row("gpu_s", side, jobs, rate, value) for side, jobs, rate, value in (
        ("together", 1, 2.0, 8.0), ("separate", 1, 2.0, 10.0), ("together", 2, 8.0, 18.0), ("separate", 2, 8.0, 20.0),
        ("together", 2, 2.0, 99.0),
    )]  # fmt: skip
    rows += [row("rl_steps_s", "together", 1, 2.0, 0.5), row("rl_steps_s", "alone", 1, 2.0, 1.0)]
    rows += [row("rl_steps_s", "together", 2, 2.0, 0.9), row("rl_steps_s", "alone", 2, 2.0, 1.0)]
    found = summarise(rows)
    assert found["coserve_gpu_s_over_separate"] == 0.9
    assert found["coserve_rl_rate_over_alone"] == 0.5
    assert found["coserve_ttft_p99_over_alone"] is None


def learning(arm: str, accuracy: float, kl: float, step_s: float, seed: int, run: str = "r1") -> dict:
    row = {"case": f"learning/chain_sum/{arm}", "provider": arm, "M": seed, "unit": "accuracy", "run_id": run}
    return row | {"samples_accuracy": [accuracy], "kl": [kl, kl], "step_s": [step_s]}


def test_ratios_come_from_the_newest_run_that_has_both_sides() -> None:
    rows = [
        learning("bf16", 0.5, 0.010, 2.0, 0),
        learning("matched", 0.6, 0.012, 2.0, 0),
        learning("w8a8_tis", 0.4, 0.1, 1.0, 0),
        learning("bf16", 0.7, 0.010, 2.0, 1),
        learning("matched", 0.9, 0.5, 2.0, 0, run="r2"),
    ]
    found = summarise(rows)
    assert found["matched_kl_over_bf16_pair"] == pytest.approx(1.2)
    assert found["matched_step_over_w8a8"] == 2.0
    assert found["acc_bf16"] == pytest.approx(0.6)
    assert found["acc_matched"] == 0.9
    assert found["fp8_trainer_kl_over_flashrl"] is None


def test_one_copy_is_compared_with_the_fastest_placement_at_its_worst_length() -> None:
    def row(provider: str, tokens: int, seconds: float) -> dict:
        facts = {"case": "placement/qwen3-8b/capped", "provider": provider, "M": tokens, "run_id": "r"}
        return facts | {"unit": "s", "samples_s": [seconds]}

    rows = [
        row("one_copy", 2048, 10.0),
        row("own_fp8", 2048, 12.0),
        row("one_copy", 8192, 42.0),
        row("own_fp8", 8192, 40.0),
    ]
    assert summarise(rows)["one_copy_step_over_fastest"] == 1.05


def test_the_summary_is_what_the_rows_say() -> None:
    found = json.loads(RESULTS.read_text())
    assert found["summary"] == summarise(found["rows"])
    assert all(math.isfinite(value) for row in found["rows"] for value in samples(row))
