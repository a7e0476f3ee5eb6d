"""The committed router results: all of them are there, the summary is what the rows give, the bars hold."""

import json
import math

import pytest

from benchmarks.readme_rows import ROUTER_ROWS
from benchmarks.router_cpu import FIGURES, RESULTS, summarise

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
    assert again.keys() == document["summary"].keys() == set(FIGURES)
    for key, value in document["summary"].items():
        assert again[key] == value or math.isclose(again[key], value, rel_tol=1e-9), key
    assert {key for _, key, _ in ROUTER_ROWS} < set(FIGURES)


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
