"""The committed fault campaign: its summary and its page are what the rows give, and the bars hold."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults.plan import KINDS, STAND_IN, VLLM, plan
from benchmarks.faults.report import BEGIN, DOCS, END, table
from benchmarks.faults_cpu import RESULTS, summarise

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def document() -> dict:
    return json.loads(RESULTS.read_text())


def faults(document: dict) -> list[dict]:
    return [row for row in document["rows"] if row["case"] == "fault"]


def test_summary_is_recomputed_from_rows(document: dict) -> None:
    assert summarise(document["rows"]) == document["summary"]


def test_named_commits_exist(document: dict) -> None:
    for commit in {document["commit"], *(run["commit"] for run in document["runs"])}:
        subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=True)


def test_the_faults_are_those_of_the_seeded_plan_each_once(document: dict) -> None:
    planned = {(f.setting, f.index): (f.kind, f.activity) for setting in (STAND_IN, VLLM) for f in plan(setting)}
    seen = [(row["setting"], row["index"]) for row in faults(document)]
    assert len(set(seen)) == len(seen)
    for row in faults(document):
        assert planned[row["setting"], row["index"]] == (row["kind"], row["activity"])


def test_every_setting_that_was_run_was_run_to_its_end(document: dict) -> None:
    seen = Counter(row["setting"] for row in faults(document))
    assert {setting: len(plan(setting)) for setting in seen} == seen
    assert STAND_IN in seen
    assert {row["kind"] for row in faults(document)} == set(KINDS)
    assert document["summary"]["in_flight"] >= 60


def test_bars(document: dict) -> None:
    summary = document["summary"]
    for key in ("lost_versions", "failed_requests", "leaks", "wrong_answers", "not_recovered", "publishes_failed"):
        assert summary[key] == 0, key
    assert summary["cut_without_event"] == 0
    assert summary["acknowledged_versions"] >= 100
    assert summary["steps_lost"] == 0
    if any(row["setting"] == VLLM for row in faults(document)):
        assert summary["resumed_bit_equal"] == 1
        assert summary["faults"] >= 200


def test_the_page_shows_what_was_measured(document: dict) -> None:
    assert f"{BEGIN}\n{table(document)}\n{END}" in DOCS.read_text()
