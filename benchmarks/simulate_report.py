"""The tables in docs/scale.md, written from the results file.

python -m benchmarks.simulate_report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.readme import with_block
from benchmarks.simulate import RESULTS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- from benchmarks/results/simulation.json -->", "<!-- end -->"
ARRANGEMENTS = {
    "as_built_500_per_s": "as built: one router, one store; 500 requests/s",
    "as_built": "the same, 4,000 requests/s",
    "store_per_node": "a store a node (does not exist), 4,000 requests/s",
    "store_per_node_16_routers": "... and 16 routers, each knowing its own loads alone",
    "store_per_node_zipf_0.8": "a store a node, exponent 0.8",
    "store_per_node_zipf_1.2": "a store a node, exponent 1.2",
}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def tables(document: dict[str, Any]) -> str:
    """The figures as Markdown."""
    summary = document["summary"]
    lines = [
        "| 1,000 engines of 32 slots, 100,000 adapters, Zipf | in a slot | waited for another's load | store's memory | disk "
        "| answered in time | TTFT p50 | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, words in ARRANGEMENTS.items():
        tiers = " | ".join(_percent(summary[f"{name}_hit_{tier}"]) for tier in ("slot", "engine", "host", "disk"))
        lines.append(
            f"| {words} | {tiers} | {_percent(summary[f'{name}_answered'])} | {summary[f'{name}_ttft_p50_ms']:.0f} ms "
            f"| {summary[f'{name}_ttft_p99_ms']:.0f} ms |"
        )
    lines += [
        "",
        "| the small system | real | simulated | simulated / real |",
        "|---|---:|---:|---:|",
    ]
    for name, words in (
        ("slot_hit_rate", "adapters found in a slot"),
        ("host_hit_rate", "loads found in the store's memory"),
    ):
        both = (summary[f"real_{name}"], summary[f"simulated_{name}"])
        lines.append(f"| {words} | {_percent(both[0])} | {_percent(both[1])} | {both[1] / both[0]:.3f} |")
    for q in (50, 99):
        both = (summary[f"real_ttft_p{q}_ms"], summary[f"simulated_ttft_p{q}_ms"])
        lines.append(f"| TTFT p{q} | {both[0]:.0f} ms | {both[1]:.0f} ms | {both[1] / both[0]:.3f} |")
    lines += [
        "",
        "| GPU-hours of an engine an adapter (merged fine-tunes) over those of 1,000 shared engines | one a GPU "
        f"| {_fit(document)} merged copies a GPU | requests that find theirs down |",
        "|---|---:|---:|---:|",
    ]
    for rate in ("500", "4000"):
        for idle, words in (
            ("always_up", "always up"),
            ("idle_1800s", "let go after 30 idle minutes"),
            ("idle_300s", "after 5"),
        ):
            name = f"{rate}_per_s_{idle}"
            lines.append(
                f"| {int(rate):,} requests/s, {words} | {summary[f'separate_gpu_hours_over_ours_{name}']:.1f} "
                f"| {summary[f'packed_gpu_hours_over_ours_{name}']:.1f} | {_percent(summary[f'separate_cold_share_{name}'])} |"
            )
    first = next(row for row in document["rows"] if row["case"] == "growth")
    lines += [
        "",
        _fairness(summary),
        "",
        f"Growth: one engine at first, {first['rate']:.0f} requests/s over {first['adapters']:,} adapters, at most 32 engines, "
        f"{first['setup']['start_s']:.0f} s a start: {summary['growth_engines_at_end']} engines after an hour, "
        f"{summary['growth_engine_hours']:.1f} engine-hours; TTFT p99 by quarter of an hour "
        + ", ".join(f"{summary[f'growth_{start}s_ttft_p99_ms']:.0f}" for start in (0, 900, 1800, 2700))
        + " ms.",
    ]
    return "\n".join(lines)


def _fairness(summary: dict[str, Any]) -> str:
    if "jain_turns" not in summary:
        return "Fairness at this size: not measured yet (`python -m benchmarks.simulate fairness`)."
    return (
        "Fairness with three times the load that the places bear, ten of 100 tenants asking for half of it: Jain's index "
        f"{summary['jain_turns']:.3f} with virtual token counters, {summary['jain_fifo']:.3f} first come, first served."
    )


def _fit(document: dict[str, Any]) -> int:
    return next(row["merged_copies_per_gpu"] for row in document["rows"] if row["case"] == "gpu_hours")


def text_with(tables_: str) -> str:
    """The page with these tables between its two marks."""
    return with_block(DOCS.read_text(), BEGIN, END, tables_)


if __name__ == "__main__":
    DOCS.write_text(text_with(tables(json.loads(RESULTS.read_text()))))
