"""The committed CPU results: the summary is what the rows give, the commit exists, the bars hold."""

import json
import math

import pytest

from benchmarks import quickstart_smollm2
from benchmarks.quickstart_cpu import RESULTS, summarise
from benchmarks.readme import README, rewritten


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    again = summarise(document["rows"])
    assert again.keys() == document["summary"].keys()
    assert all(math.isclose(again[key], value, rel_tol=1e-9) for key, value in document["summary"].items())


@pytest.fixture(scope="module")
def smollm2() -> dict:
    return json.loads(quickstart_smollm2.SMOLLM2_RESULTS.read_text())


def test_smollm2_summary_is_recomputed_from_its_row(smollm2: dict) -> None:
    again = quickstart_smollm2.summarise(smollm2["rows"])
    assert again.keys() == smollm2["summary"].keys()
    assert all(math.isclose(again[key], value, rel_tol=1e-9) for key, value in smollm2["summary"].items())


def test_smollm2_shows_what_it_is_for(smollm2: dict) -> None:
    """One copy of a real base, engine and trainer in agreement, tenants untouched; its accuracy is told, not required."""
    summary = smollm2["summary"]
    assert smollm2["rows"][0]["parameters"] == 134_515_008
    assert summary["trainer_private_bound_mib"] == pytest.approx(
        134_515_008 / 2**20 + 400
    )  # a quarter of four bytes each
    assert summary["trainer_peak_private_mib"] <= summary["trainer_private_bound_mib"]
    assert 0.99 <= summary["base_copies"] <= 1.01
    assert summary["checksum_equal"]
    assert summary["answers_wrong"] == 0
    assert summary["answers_equal"] > 0
    assert summary["mixed_steps"] >= 50
    assert summary["mismatch_mean"] < 1e-4


def test_readme_shows_what_the_results_files_say() -> None:
    text = README.read_text()
    assert rewritten(text) == text


def test_bars(document: dict) -> None:
    summary = document["summary"]
    assert summary["seeds"] >= 3
    assert summary["gain_points"] >= 20
    assert summary["gain_points_mean"] >= 30
    assert summary["main_job_s"] <= 240
    assert summary["peak_rss_gb"] <= 4
    assert summary["mixed_steps"] >= 50
    assert 0.99 <= summary["base_copies"] <= 1.01
    assert summary["cpu_lora_tokens_s_over_stock"] >= 2
    assert summary["mismatch_w8a8_over_w8a16_float32"] >= 1000
    assert summary["mismatch_w8a8_over_w8a16_float16"] >= 15
    assert summary["mismatch_w8a8_over_w8a16_bfloat16"] >= 2.5
    for row in document["rows"]:
        if row["case"] == "main_job":
            result = row["result"]
            assert result["checksum_equal"]
            assert result["base_read_only"]
            assert result["answers_wrong"] == 0
            assert result["tenant_errors"] == []
            assert result["eval_before"]["well_formed"] >= 0.9
            for tenant in result["tenants"]:
                if tenant["accuracy_base"] is not None:
                    assert tenant["accuracy_adapter"] - tenant["accuracy_base"] >= 0.10
