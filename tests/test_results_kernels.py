"""The committed kernel results: the summary follows from the rows, the measured commit exists, sides of a ratio share a run."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import report
from benchmarks.harness import SCHEMA_VERSION, command_line, write_results
from benchmarks.kernels.summary import FIGURES, Figure, adapter_case, figure_value, summarise

ROOT = pathlib.Path(__file__).parent.parent
PATH = ROOT / "benchmarks" / "results" / "kernels_h200.json"
KEYS = [
    "layer_m1_us",
    "layer_m1_over_no_adapter",
    "layer_m1_over_vllm_best",
    "layer_m8_over_vllm_best",
    "layer_m16_over_no_adapter",
    "layer_m16_over_vllm_best",
    "gemm_m1_over_cutlass",
    "m32_1_over_vllm_best",
    "m32_32_over_vllm_best",
    "hybrid_512_32_over_vllm_best",
    "prefill_2048_32_over_vllm_best",
    "prefill_2048_32_over_vendor_gemm",
    "w8a16_m1_over_marlin",
    "train_fwd_4096_over_bf16",
    "train_bwd_4096_over_bf16",
]


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(PATH.read_text())


def test_summary_has_the_keys_and_follows_from_the_rows(results):
    assert list(FIGURES) == KEYS
    assert results["schema_version"] == SCHEMA_VERSION
    assert results["summary"] == summarise(results["rows"])


def test_commits_exist_and_rows_belong_to_runs(results):
    runs = {run["run_id"]: run for run in results["runs"]}
    assert results["commit"] in {run["commit"] for run in runs.values()}
    for run in runs.values():
        assert run["gpu"] == results["gpu"]
    for row in results["rows"]:
        assert row["run_id"] in runs
        assert row.get("failure") or (row[f"samples_{row['unit']}"] and row["calls_per_path"]), row


def test_our_decode_rows_ran_on_the_cuda_path_only(results):
    rows = [
        r
        for r in results["rows"]
        if r["provider"].startswith("epilora") and r["M"] <= 32 and r["case"].startswith("layer/")
    ]
    assert rows
    for row in rows:
        assert row["calls_per_path"] == {"lora_decode:cuda": 32}, row["provider"]


def rows_of(run: str, **medians: float) -> list[dict]:
    return [
        {"case": adapter_case(1), "M": 1, "provider": p, "samples_us": [v - 1, v, v + 5], "run_id": run}
        for p, v in medians.items()
    ]


def test_a_ratio_never_mixes_runs():
    figure = Figure(adapter_case(1), 1, over="vllm_best")
    rows = rows_of("a", epilora=10.0, vllm_lora_default_one_stream=40.0, vllm_lora_tuned_two_streams=20.0)
    assert figure_value(figure, rows) == 0.5
    assert figure_value(figure, rows + rows_of("b", epilora=5.0)) == 0.5
    assert figure_value(Figure(adapter_case(1), 1), rows + rows_of("b", epilora=5.0)) == 5.0
    assert figure_value(Figure(adapter_case(1), 4), rows) is None


def test_written_file_reads_back(tmp_path):
    rows = rows_of("a", epilora=10.0)
    write_results(tmp_path / "r.json", {"schema_version": 1, "summary": {"x": None}}, rows)
    assert json.loads((tmp_path / "r.json").read_text()) == {"schema_version": 1, "summary": {"x": None}, "rows": rows}


def test_command_line_names_no_places():
    assert command_line("python -m x", ["--out", "/a/b/c.json", "--n", "3"]) == "python -m x --out c.json --n 3"


def test_report_tables_hold_medians_ratios_and_failures(tmp_path):
    rows = rows_of("a", epilora=10.0, vllm_lora_default_one_stream=40.0, vllm_no_adapter=8.0)
    for row in rows:
        row |= {"unit": "us", "floor_us": 5.0}
    rows.append(
        {
            "case": adapter_case(1),
            "M": 1,
            "provider": "marlin",
            "unit": "us",
            "samples_us": [],
            "failure": "absent",
            "run_id": "a",
        }
    )
    text = report.markdown({"rows": rows, "summary": {"x": None}, "commit": "c"}, "name")
    assert "| epilora | 10.0 | 9.4 | 13.0 | 1.250 | 0.250 | 50% |" in text
    assert "| marlin | failed: absent |" in text
    assert "| x | not measured |" in text
    report.plot(rows, "title", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_percentile():
    assert report.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert report.percentile([0.0, 10.0], 0.2) == 2.0
    with pytest.raises(ValueError, match="no samples"):
        report.percentile([], 0.5)
