"""The committed results on storage formats: the summary is what the rows give, nothing that failed is served."""

import json
from pathlib import Path

import pytest

from benchmarks.formats.summary import KEYS, summarise

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "formats_h200.json"


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    assert summarise(document["rows"]) == document["summary"]
    assert tuple(document["summary"]) == KEYS


def test_bars(document: dict) -> None:
    summary = document["summary"]
    assert summary["resident_adapters_fp8_over_bf16"] >= 1.9
    assert summary["resident_adapters_nvfp4_over_bf16"] >= 3.4
    assert summary["quality_checks"] >= 24
    assert summary["quality_failed_served"] == 0


def test_the_planted_conversion_was_refused_for_what_it_did(document: dict) -> None:
    (planted,) = [r for r in document["rows"] if r["provider"] == "nvfp4/planted"]
    assert planted["served"] == "original"
    assert any(not check["passed"] for check in planted["checks"])


def test_error_aware_conversion_beats_rounding_on_every_trained_adapter(document: dict) -> None:
    rows = {(r["case"], r["provider"]): r for r in document["rows"] if r["case"].startswith("quality/")}
    for (case, provider), row in rows.items():
        if provider.endswith("/aware"):
            plain = rows[case, provider.replace("aware", "plain")]
            pairs = zip(row["samples_relative_error"], plain["samples_relative_error"], strict=True)
            assert all(aware < rounded for aware, rounded in pairs), case


def test_a_copy_that_fails_is_not_served() -> None:
    row = {"case": "quality/x", "provider": "nvfp4/aware", "served": "copy", "checks": [{"passed": False}]}
    assert summarise([row])["quality_failed_served"] == 1
    assert summarise([row | {"served": "original"}])["quality_failed_served"] == 0


def test_ratios_are_of_one_run_and_of_the_fastest() -> None:
    def row(case: str, provider: str, us: list[float], adapters: int, run: str, M: int = 1) -> dict:
        return {"case": case, "provider": provider, "M": M, "samples_us": us, "adapters": adapters, "run_id": run}

    rows = [
        row("layer/nvfp4", "epilora_w4a16", [30.0, 10.0, 20.0], 0, "a"),
        row("layer/nvfp4", "vllm_marlin", [40.0], 0, "a"),
        row("layer/nvfp4", "vllm_marlin", [1.0], 1, "a"),
        row("layer/nvfp4", "vllm_marlin", [1.0], 0, "a", M=8),
        row("layer/nvfp4", "epilora_w4a16", [5.0], 0, "b"),  # nothing to compare with in its run
        row("layer/fp8_block", "epilora_k1_k2", [70.0], 1, "a"),
        row("layer/fp8_block", "epilora_hybrid_vllm_cutlass", [60.0], 1, "a"),
        row("layer/fp8_block", "vllm_cutlass", [100.0], 1, "a"),
        row("layer/fp8_block", "vllm_triton", [], 1, "a"),
    ]
    summary = summarise(rows)
    assert summary["w4a16_m1_over_marlin_nvfp4"] == 0.5
    assert summary["fp8_block_m1_over_vllm"] == 0.6
    assert summarise(rows[1:4])["w4a16_m1_over_marlin_nvfp4"] is None
