"""The committed router results: the summary is what the rows give, their commits exist, the bars hold for what was run."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.router_cpu import RESULTS, summarise

ROOT = Path(__file__).resolve().parent.parent
AT_LEAST = {"requests_over_bare_serve": 0.8, "jain": 0.95, "rl_rate_over_solo": 0.5, "malformed_adapters": 60}
AT_LEAST |= {"malformed_requests": 60}
AT_MOST = {"added_p99_ms": 15.0, "resolve_ms": 5.0, "list_http_ms": 25.0, "worst_p99_over_solo": 2.0}
AT_MOST |= {"rl_on_p99_over_off": 2.0}
AT_LEAST |= {"soak_s": 3600, "hammer_s": 240}


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    again = summarise(document["rows"])
    assert again.keys() == document["summary"].keys()
    assert all(math.isclose(again[key], value, rel_tol=1e-9) for key, value in document["summary"].items())


def test_bars(document: dict) -> None:
    summary = document["summary"]
    assert {key: summary[key] for key in AT_LEAST if summary[key] < AT_LEAST[key]} == {}
    assert {key: summary[key] for key in AT_MOST if summary[key] > AT_MOST[key]} == {}


def test_every_malformed_case_got_its_answer(document: dict) -> None:
    rows = [row for row in document["rows"] if row["case"].startswith("malformed")]
    assert [row for row in rows if row["got"] != row["wanted"]] == []
    assert len({(row["case"], row["name"]) for row in rows}) == len(rows)


@pytest.mark.parametrize("case", ["soak", "hammer"])
def test_nothing_was_mixed_or_lost(document: dict, case: str) -> None:
    (row,) = (row for row in document["rows"] if row["case"] == case)
    assert (row["mixed"], row["lost"], row["left_running"]) == (0, 0, 0)
    assert set(row["refusals"]) <= {"no_free_slot", "engine_unavailable"}
    assert row["answers"] + row["streams"] > 10 * row["refused"]


def test_the_soaks_memory_is_flat_by_its_rule(document: dict) -> None:
    (row,) = (row for row in document["rows"] if row["case"] == "soak")
    assert document["summary"]["soak_is_flat"] is True
    assert row["rss_mib"][-1][0] >= 3600  # the curve covers the hour
    assert len(row["rss_mib"]) >= 150
    assert row["growth_mib_per_h"] <= 16
