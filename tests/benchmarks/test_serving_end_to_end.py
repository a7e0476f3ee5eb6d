"""The whole benchmark on the tiny model, small: both engines in processes of their own, every question once."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.serving.engines import OURS, STOCK
from benchmarks.serving.summary import goodput, summarise

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("serving")
    command = [sys.executable, "-m", "benchmarks.serving", "--tiny", "--model", "epilora/models/tiny-arith"]
    command += [
        "--variants",
        OURS,
        STOCK[0],
        "--waves",
        "smoke",
        "--rounds",
        "2",
        "--throughput-rounds",
        "2",
        "--rates",
        "4",
        "--requests",
        "6",
    ]
    done = subprocess.run(
        [*command, "--work", str(folder / "work"), "--out", str(folder / "out.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def rows_of(results: dict, start: str) -> dict[str, dict]:
    return {row["provider"]: row for row in results["rows"] if row["case"].startswith(start)}


def test_every_question_has_its_rows_and_none_failed(results):
    assert [row for row in results["rows"] if row.get("failure")] == []
    assert set(rows_of(results, "start/")) == {OURS, STOCK[0]}
    tpot = rows_of(results, "tpot/tiny-arith/s2/b1")
    assert set(tpot) == {OURS, STOCK[0], f"{OURS}_no_adapter", f"{STOCK[0]}_no_adapter"}
    assert all(len(row["samples_ms"]) >= 1 and min(row["samples_ms"]) > 0 for row in tpot.values())
    assert len(tpot[OURS]["samples_ms"]) == 2
    throughput = rows_of(results, "throughput/")
    assert {len(row["samples_tok_s"]) for row in throughput.values()} == {2}
    assert set(throughput) == {OURS, STOCK[0]}
    assert results["summary"] == summarise(results["rows"])


def test_each_engine_is_what_it_says(results):
    starts = rows_of(results, "start/")
    assert "layers" in starts[OURS]["features"]
    assert starts[STOCK[0]]["features"] == []
    paths = rows_of(results, "tpot/")[OURS]["paths"]
    assert paths["lora_cpu"] > 0
    assert "lora_stock" not in paths
    engines = [row["engine"] for row in rows_of(results, "throughput/").values() if row["engine"]["slots"]]
    ours, stock = ({k: v for k, v in e.items() if k != "variant"} for e in engines)
    assert ours == stock


def test_online_rows_keep_every_request_in_order(results):
    for metric in ("ttft", "tpot"):
        rows = rows_of(results, f"online_{metric}/poisson/tiny-arith/p8/c0/r4")
        assert set(rows) == {OURS, STOCK[0]}
        assert all(len(row["samples_ms"]) == 6 for row in rows.values())
    (run,) = {row["run_id"] for row in results["rows"]}
    found = goodput(results["rows"], run, "online_ttft/poisson/tiny-arith/p8/c0/r4", OURS)
    assert found is not None
    assert 0 <= found <= 6


def test_ours_is_no_further_from_fp32_than_stock(results):
    for batch in ("base", "adapters"):
        rows = rows_of(results, f"equality/tiny-arith/{batch}")
        ours, stock = rows[OURS], rows[STOCK[0]]
        assert len(ours["samples_nats"]) == len(stock["samples_nats"]) > 20
        assert 0 < stock["rms"] < 0.5  # activations rounded to bf16 and FP8; another model or adapter would be past 1
        assert ours["rms"] <= 1.02 * stock["rms"]
        assert stock["equal_to_stock"] == len(stock["samples_nats"])
    assert rows_of(results, "equality/tiny-arith/base")[OURS]["equal_to_stock"] == len(
        rows_of(results, "equality/tiny-arith/base")[OURS]["samples_nats"]
    )


def test_profiles_and_report(results):
    profiles = rows_of(results, "profile/tiny-arith/s2/b1")
    assert set(profiles) == {OURS, STOCK[0]}
    assert all(row["profile"]["steps"] > 5 and row["profile"]["step_us"] > 0 for row in profiles.values())
    text = report.markdown(results, "serving")
    assert "over vLLM's fastest" in text
    assert "online: ours over vLLM's fastest, bootstrap 95 % intervals" in text
