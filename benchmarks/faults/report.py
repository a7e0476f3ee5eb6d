"""The table in docs/faults.md: what each fault did to tenants and to the RL job, written from the results file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.readme import with_block

DOCS = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- from benchmarks/results/faults_cpu.json -->", "<!-- end -->"


def table(document: dict[str, Any]) -> str:
    """The figures as Markdown."""
    summary = document["summary"]
    lines = [
        "| killed (setting) | faults | with a step, publish or stream in flight | back after, median (worst) | slowest request, median (worst) "
        "| asked again | failed | cut streams | steps repeated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary["by_kind"].items():
        slowest = "-"
        if "slowest_request_s_p50" in row:
            slowest = f"{row['slowest_request_s_p50']:.1f} s ({row['slowest_request_s_max']:.1f})"
        back = f"{row['recovery_s_p50']:.1f} s ({row['recovery_s_max']:.1f})"
        asked = f"{row['asked_again']} of {row['requests']}" if row["requests"] else "-"
        lines.append(
            f"| {name} | {row['faults']} | {row['in_flight']} | {back} | {slowest} | {asked} | {row['failed_requests']} "
            f"| {row['cut_streams']} | {row['steps_lost']} |"
        )
    lines += [
        "",
        f"{summary['faults']} faults, {summary['in_flight']} of them with an RL step, a publish or a stream in flight; "
        f"{summary['not_recovered']} were not recovered from in time. Of {summary['requests']} requests that a fault touched "
        f"{summary['asked_again']} were asked a second time and {summary['failed_requests']} failed all the same; "
        f"{summary['cut_streams']} streams were cut after their first token, {summary['cut_without_event']} of them without an error "
        f"event. Of {summary['acknowledged_versions']} versions the store had confirmed {summary['lost_versions']} were lost. "
        f"{summary['leaks']} faults leaked a placement group, a GPU or an actor; after {summary['files_left']} a dead engine's file was still in "
        f"shared memory. {_compared(document)}",
    ]
    return "\n".join(lines)


def _compared(document: dict[str, Any]) -> str:
    """What the RL run's checkpoints said, in a sentence."""
    rows = [row for row in document["rows"] if row["case"] == "resumed"]
    if not rows:
        return "The RL run was not compared yet with one without faults."
    row = rows[0]
    equal = "differ in some steps from" if row["differing"] else "are byte for byte"
    return (
        f"Of the RL run's {row['faulted_steps']} steps {row['steps']} checkpoints (the initial one among them) were compared: they "
        f"{equal} those of a run without faults."
    )


def write(document: dict[str, Any]) -> None:
    """Put the table into the page, between its two marks."""
    DOCS.write_text(with_block(DOCS.read_text(), BEGIN, END, table(document)))
