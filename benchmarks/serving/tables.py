"""Markdown of serving rows, for `benchmarks.report`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.engines import NO_LORA, STOCK
from benchmarks.serving.profiling import CLASSES
from benchmarks.serving.summary import Row, counts, online_table, samples

_HIGHER_IS_BETTER = ("tok_s", "tokens")


def is_serving(rows: Sequence[Row]) -> bool:
    """Whether a case's rows come from the serving benchmark."""
    return any(row["unit"] != "us" or "engine" in row for row in rows)


def _over(value: float, others: Sequence[float], unit: str) -> str:
    if not others:
        return "-"
    return f"{value / (max(others) if unit in _HIGHER_IS_BETTER else min(others)):.3f}"


def serving_table(rows: Sequence[Row]) -> str:
    """One case of one run, every provider: median, spread, and ratios to LoRA off and to vLLM's fastest."""
    measured = [row for row in rows if samples(row)]
    unit = measured[0]["unit"] if measured else rows[0]["unit"]
    medians = [(row, statistics.median(samples(row))) for row in measured]
    off = [m for row, m in medians if row["provider"] == NO_LORA]
    stock = [m for row, m in medians if row["provider"] in STOCK]
    lines = [
        f"| provider | median {unit} | lowest | highest | samples | over LoRA off | over vLLM's fastest |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if not samples(row):
            reason = " ".join(row.get("failure", "no samples").split()).replace("|", "\\|")
            lines.append(f"| {row['provider']} | failed: {reason[-200:]} | | | | | |")
            continue
        values = samples(row)
        middle = statistics.median(values)
        shown = [f"{v:.4g}" if v < 1e4 else f"{v:.0f}" for v in (middle, min(values), max(values))]
        name = row["provider"] if counts(row) else f"{row['provider']} (does not count: {'; '.join(row['fallbacks'])})"
        ratios = [_over(middle, off, unit), _over(middle, stock, unit)]
        lines.append(f"| {name} | " + " | ".join([*shown, str(len(values)), *ratios]) + " |")
    profiled = [row for row in rows if "profile" in row]
    return "\n".join([*lines, *(["", *profile_lines(profiled)] if profiled else [])])


def profile_lines(rows: Sequence[Row]) -> list[str]:
    """GPU microseconds and launches a step by kernel class."""
    labels = [label for label, _ in CLASSES] + ["other"]
    lines = [
        "| GPU us a step (kernels) | " + " | ".join(labels) + " | no kernel runs | host, first to last launch |",
        "|---|" + "---:|" * (len(labels) + 2),
    ]
    for row in rows:
        found: dict[str, Any] = row["profile"]
        cells = [f"{found['gpu_us'].get(label, 0):.0f} ({found['launches'].get(label, 0):.0f})" for label in labels]
        lines.append(
            f"| {row['provider']} | " + " | ".join(cells) + f" | {found['gap_us']:.0f} | {found['host_us']:.0f} |"
        )
    return lines


def online_lines(rows: Sequence[Row]) -> list[str]:
    """Every online case: ratios to vLLM's fastest with bootstrap 95 % intervals, goodput of ours and of it."""
    table = online_table(rows)
    if not table:
        return []
    lines = [
        "## online: ours over vLLM's fastest, bootstrap 95 % intervals",
        "",
        "| case | run | median time per token | p99 TTFT | goodput, requests/s: ours / vLLM |",
        "|---|---|---:|---:|---:|",
    ]
    for line in table:
        ratios = ["{:.3f} [{:.3f}, {:.3f}]".format(*line[metric]) for metric in ("tpot", "ttft_p99")]
        ours, theirs = ("-" if g is None else f"{g:.2f}" for g in line["goodput_tpot"])
        lines.append(f"| {line['case']} | {line['run_id']} | {ratios[0]} | {ratios[1]} | {ours} / {theirs} |")
    return [*lines, ""]
