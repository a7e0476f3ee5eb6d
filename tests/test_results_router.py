"""The committed router results: the summary is what the rows give, their commits exist, the bars hold for what was run."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.router_cpu import FIGURES, RESULTS, summarise

ROOT = Path(__file__).resolve().parent.parent
AT_LEAST = {"requests_over_bare_serve": 0.8, "jain": 0.95, "rl_rate_over_solo": 0.5, "malformed_adapters": 60}
AT_LEAST |= {"malformed_requests": 60}
AT_MOST = {"added_p99_ms": 15.0, "resolve_ms": 5.0, "list_http_ms": 25.0, "worst_p99_over_solo": 2.0}
AT_MOST |= {"rl_on_p99_over_off": 2.0}


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    again = summarise(document["rows"])
    assert again.keys() == document["summary"].keys() == set(FIGURES)
    for key, value in document["summary"].items():
        assert again[key] == value or math.isclose(again[key], value, rel_tol=1e-9), key


def test_bars(document: dict) -> None:
    summary = document["summary"]
    assert {key: summary[key] for key in AT_LEAST if summary[key] is not None and summary[key] < AT_LEAST[key]} == {}
    assert {key: summary[key] for key in AT_MOST if summary[key] is not None and summary[key] > AT_MOST[key]} == {}


def test_every_malformed_case_got_its_answer(document: dict) -> None:
    rows = [row for row in document["rows"] if row["case"].startswith("malformed")]
    assert [row for row in rows if row["got"] != row["wanted"]] == []
    assert len({(row["case"], row["name"]) for row in rows}) == len(rows)


def test_the_soak_mixed_nothing_and_its_memory_is_flat(document: dict) -> None:
    for row in (row for row in document["rows"] if row["case"] in ("soak", "hammer")):
        assert (row["mixed"], row.get("lost", 0), row["left_running"]) == (0, 0, 0)
        assert set(row["refusals"]) <= {"no_free_slot", "engine_unavailable"}
        assert row["growth_mib_per_h"] <= 16 or row["case"] == "hammer"
