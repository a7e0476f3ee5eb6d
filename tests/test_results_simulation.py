"""The committed simulation: the summary is what the rows give, its inputs are committed, and it agrees with the small real run."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from benchmarks import simulate_report
from benchmarks.simulate import ASSUMED, RESULTS, load_s, start_s, summarise

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    again = summarise(document["rows"])
    assert again.keys() == document["summary"].keys()
    assert all(math.isclose(again[key], value, rel_tol=1e-9) for key, value in document["summary"].items())


def test_named_commits_exist(document: dict) -> None:
    for commit in {document["commit"], *(row["commit"] for row in document["rows"])}:
        subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=True)


def test_times_are_the_measured_ones_and_the_rest_is_named(document: dict) -> None:
    assert document["assumed"] == ASSUMED
    for row in document["rows"]:
        if row["case"] in ("scale", "growth", "fairness"):
            assert row["setup"]["load_s"] == load_s()
            assert {key: row["setup"][key] for key in ASSUMED if key in row["setup"]} == {
                key: ASSUMED[key] for key in ASSUMED if key in row["setup"]
            }
        if row["case"] == "growth":
            assert row["setup"]["start_s"] == start_s()


def test_size(document: dict) -> None:
    scale = [row for row in document["rows"] if row["case"] == "scale"]
    assert {(row["setup"]["engines"], row["adapters"]) for row in scale} == {(1000, 100_000)}


def test_the_simulation_agrees_with_the_small_real_run(document: dict) -> None:
    """The store's memory is left out: loads are few, and the page's table shows how far it is off."""
    summary = document["summary"]
    for name in ("slot_hit_rate", "ttft_p50_ms", "ttft_p99_ms"):
        assert summary[f"simulated_over_real_{name}"] == pytest.approx(1.0, abs=0.15), name


def test_the_pages_tables_are_those_of_the_results(document: dict) -> None:
    assert simulate_report.DOCS.read_text() == simulate_report.text_with(simulate_report.tables(document))
