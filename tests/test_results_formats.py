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
