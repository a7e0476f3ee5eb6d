"""The two-GPU benchmark: its summary, its models, and its programs in their small form on two CPU ranks and two CPU engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.even_ids import EvenIds
from benchmarks.random_model import TINY, random_checkpoint
from benchmarks.rl.placements import PLACEMENTS, _config
from benchmarks.rl.random_job import FULL, job_config, tenants_setting
from benchmarks.two_gpus import __main__ as program
from benchmarks.two_gpus.summary import THROUGHPUT, TPOT, summarise
from epilora.errors import MemoryInfeasible


def row(case: str, provider: str, values: list[float], run: str = "r", **facts: object) -> dict:
    return {"case": case, "provider": provider, "M": 1, "unit": "x", "samples_x": values, "run_id": run, **facts}


def test_ratios_are_over_vllms_best_of_the_newest_run_with_both_sides() -> None:
    rows = [
        row(TPOT, "epilora", [9.0, 10.0, 11.0]),
        row(TPOT, "vllm_lora_default", [20.0]),
        row(TPOT, "vllm_lora_tuned", [12.5]),
        row(TPOT, "epilora", [1.0], run="alone"),  # nothing beside it
        row(TPOT, "epilora", [10.0], run="later"),  # beside another variant, which is slower
        row(TPOT, "vllm_lora_default_two_streams", [16.0], run="later"),
        row(THROUGHPUT, "epilora", [220.0]),
        row(THROUGHPUT, "vllm_lora_default", [100.0]),
        row(THROUGHPUT, "vllm_lora_tuned", [200.0]),
        row("equality/qwen3-8b/tp2", "tp1", [3.0, 4.0]),
        row("equality/qwen3-8b/tp2", "tp2", [6.0, 8.0]),
        row("pair/steps", "epilora", [1.0] * 6),
        row("pair/publish", "epilora", [30.0, 50.0, 40.0]),
        row("spread/rollouts", "two", [180.0]),
        row("spread/rollouts", "one", [100.0]),
    ]
    assert summarise(rows) == {
        "tp2_72b_tpot_over_vllm_best": 0.8,
        "tp2_72b_throughput_8_over_vllm_best": 1.1,
        "tp2_logprob_rms_over_one_gpu": 2.0,
        "tp2_rl_steps": 6.0,
        "tp2_publish_ms": 40.0,
        "dp2_rollout_speedup": 1.8,
    }
    rows[0]["fallbacks"] = ["a projection was left to vLLM"]  # that row does not count
    assert summarise(rows)["tp2_72b_tpot_over_vllm_best"] == 0.625
    assert set(summarise([]).values()) == {None}


def test_the_task_rewards_even_ids_and_the_tokenizer_spells_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = random_checkpoint("qwen3-8b", tmp_path / "m", **TINY)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode([4, 7, 10, 198, 1], skip_special_tokens=True)
    assert text == "t4 t7 t10 t198"
    assert tokenizer.encode(text) == [4, 7, 10, 198]
    task = EvenIds(200, 5)
    problem = task.problem("train", 3)
    assert len(tokenizer.encode(problem.prompt)) == 5
    assert problem != task.problem("train", 4)
    assert task.score(text, problem) == 0.75
    assert task.score("", problem) == 0.0


def test_jobs_on_random_models_are_planned_for_the_gpus_that_run_them(tmp_path: Path) -> None:
    """The 8B shape: which placements fit the cap, and with what cache."""
    from benchmarks.serving.models import model_folder

    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "complete").touch()
    model_folder("qwen3-8b", tmp_path)
    found = {}
    for name in PLACEMENTS:
        try:
            found[name] = _config(FULL, tmp_path, name, 3, True).engine.kv_cache_mib / 1024
        except MemoryInfeasible:
            found[name] = 0.0
    assert found["one_copy"] == max(found.values()) > 20
    assert found["two_bf16"] < found["own_fp8"] < found["one_copy"]
    assert found["one_fp8_kv_kept"] < found["one_copy"]
    uncapped = _config(FULL, tmp_path, "two_bf16", 3, False)
    assert uncapped.engine.kv_cache_mib == 48 * 1024
    pair = job_config(
        FULL, tmp_path / "qwen3-8b", tmp_path, "engine.tensor_parallel=2", tenants_setting(4, 2.0, FULL, 64)
    )
    assert [t.name for t in pair.tenants] == ["t0", "t1", "t2", "t3"]
    assert pair.rl.max_tokens == 512


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["equality", "all_reduce", "pair", "spread", "serving"])
def test_a_part_runs_in_its_small_form(part: str, tmp_path: Path) -> None:
    out = tmp_path / "two.json"
    groups = ["--groups", "3"] if part == "serving" else []  # the pair that needs no tuned tables
    program.main([part, "--tiny", "--out", str(out), "--work", str(tmp_path / "work"), *groups])
    found = json.loads(out.read_text())
    assert found["summary"] == summarise(found["rows"])
    assert not [r for r in found["rows"] if "failure" in r]
    rows = {(r["case"], r["provider"]): r for r in found["rows"]}
    if part == "equality":
        assert 0.5 < found["summary"]["tp2_logprob_rms_over_one_gpu"] < 2.0
    elif part == "all_reduce":
        for provider in ("nccl", "custom"):  # the same thing on a CPU
            one = rows["all_reduce/qwen3-8b", provider]
            assert one["ranks_exported"] == 2
            assert one["tokens_equal_shared"]
            assert one["tokens_equal_restored"]
            assert one["tokens_equal_nccl"]
            assert one["base_unchanged"]
    elif part == "pair":
        steps = rows["pair/steps", "epilora"]
        assert steps["every_tenant_answered"]
        assert steps["base_unchanged"]
        assert found["summary"]["tp2_rl_steps"] == 6
        for number, what in enumerate(("trainer_rank", "engine_rank"), 1):
            killed = rows[f"pair/killed/{what}", "epilora"]
            assert killed["left_alive"] == []
            assert killed["resumed_to_step"] == 6 + number
            assert killed["base_unchanged"]
    elif part == "spread":
        killed = rows["spread/killed", "epilora"]
        assert killed["base_unchanged"]
        assert len(killed["samples_tokens"]) == 4
        assert max(killed["mismatch"]) < 1e-4
        assert found["summary"]["dp2_rollout_speedup"] > 0
    else:
        assert found["summary"]["tp2_72b_tpot_over_vllm_best"] > 0
