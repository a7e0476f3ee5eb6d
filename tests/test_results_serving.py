"""The committed serving results: the summary follows from the rows, both sides of a ratio had equal settings, losses are there."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import readme, report
from benchmarks.harness import SCHEMA_VERSION
from benchmarks.readme_rows import SERVING_ROWS
from benchmarks.serving.engines import OURS, STOCK
from benchmarks.serving.summary import summarise

ROOT = pathlib.Path(__file__).parent.parent
PATH = ROOT / "benchmarks" / "results" / "serving_h200.json"


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(PATH.read_text())


def test_summary_follows_from_the_rows(results):
    assert results["schema_version"] == SCHEMA_VERSION
    assert results["summary"] == summarise(results["rows"])


def test_commits_exist_and_rows_belong_to_runs(results):
    runs = {run["run_id"]: run for run in results["runs"]}
    for run in runs.values():
        assert run["gpu"] == results["gpu"]
    for row in results["rows"]:
        assert row["run_id"] in runs
        assert row.get("failure") or row[f"samples_{row['unit']}"], row


def test_engines_of_one_case_and_run_differ_in_nothing_but_the_variant(results):
    settings: dict[tuple[str, str], dict] = {}
    for row in results["rows"]:
        if "engine" not in row or row["engine"]["slots"] == 0:
            continue
        told = {k: v for k, v in row["engine"].items() if k not in ("variant", "tuned")}
        first = settings.setdefault((row["run_id"], row["case"]), told)
        assert told == first, row["case"]


def test_ours_took_its_own_layers_and_stock_none_of_them(results):
    starts = [r for r in results["rows"] if r["case"].startswith("start/") and not r.get("failure")]
    assert {OURS} < {r["provider"] for r in starts}
    for row in starts:
        if row["provider"].startswith(OURS):
            assert "layers" in row["features"]
        else:
            assert row["features"] == []
        if row["provider"] in STOCK:
            assert not row.get("dispatch")


def test_report_shows_every_row(results):
    text = report.markdown(results, "serving_h200")
    for row in results["rows"]:
        assert f"## {row['case']}," in text
    for key, value in results["summary"].items():
        assert f"| {key} | {'not measured' if value is None else value} |" in text


def test_readme_block_shows_every_figure(results):
    assert {key for _, key, _ in SERVING_ROWS} == set(results["summary"])
    text = readme.summary_block("serving_h200.json", SERVING_ROWS, "head")
    for what, key, form in SERVING_ROWS:
        value = results["summary"][key]
        assert f"| {what} | {'not measured' if value is None else form.format(value)} |" in text
