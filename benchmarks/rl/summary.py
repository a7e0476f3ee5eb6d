"""The figures of `rl_h200.json`, computed from its rows and from nothing else.

A ratio takes both sides from one run: the newest run that measured both. Null where it has not been measured.

| rows (`case`, `provider`) | samples |
|---|---|
| `learning/TASK/ARM`, the arm's name, M = seed | final held-out accuracy; `kl` and `step_s` hold one value a training step |
| `learning/TASK/before`, `base` | held-out accuracy before training |
| `train_speed/qwen3-8b`, `fp8_panel` or `bf16` | trained tokens a second |
| `memory/qwen3.5-27b/one_copy`, placement | peak GiB of the GPU, engine and trainer together, by NVML |
| `publish/qwen3-8b`, `one_copy` | ms from the optimizer step's end to the first token of the new version |
| `kv_release/qwen3-8b`, `one_copy` | seconds of release and restore together, at least 60 GiB |
| `host_memory/qwen3-8b`, placement | pinned host GiB |
| `placement/qwen3-8b/capped`, placement, M = rollout tokens | seconds a step |
| `coserve/qwen3-8b/gpu_s`, `together` or `separate`, M = jobs, `rate` | seconds of the GPU (see coserve.py) |
| `coserve/qwen3-8b/ttft_p99`, `.../tpot_p50`, `.../rl_steps_s`, `together` or `alone` | ms, ms, steps a second |

Of co-serving the worst of all numbers of jobs and rates counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
ARMS = {
    "acc_bf16": "bf16",
    "acc_flashrl": "flashrl",
    "acc_w8a8_tis": "w8a8_tis",
    "acc_matched": "matched",
    "acc_w8a8_uncorrected": "w8a8_uncorrected",
}
ONE_COPY = "one_copy"
PLACEMENT_CASE = "placement/qwen3-8b/capped"
COSERVE_CASE = "coserve/qwen3-8b"


def samples(row: Row) -> list[float]:
    """A row's raw samples."""
    return row[f"samples_{row['unit']}"]


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that hold samples, by run, newest run first."""
    ids = dict.fromkeys(row["run_id"] for row in reversed(rows))
    return [[row for row in rows if row["run_id"] == run and samples(row)] for run in ids]


def _newest(rows: Sequence[Row], value: Callable[[list[Row]], float | None], digits: int = 4) -> float | None:
    for same in _runs(rows):
        found = value(same)
        if found is not None:
            return round(found, digits)
    return None


def _median(rows: Sequence[Row], case: str, provider: str) -> float | None:
    found = [row for row in rows if row["case"] == case and row["provider"] == provider]
    return statistics.median(samples(found[-1])) if found else None


def _ratio(rows: Sequence[Row], case: str, ours: str, over: str) -> float | None:
    one, other = _median(rows, case, ours), _median(rows, case, over)
    return None if one is None or other is None else one / other


def _learning(rows: Sequence[Row], arm: str, read: Callable[[Row], list[float]]) -> float | None:
    """Mean over tasks and seeds of an arm's values."""
    found = [
        statistics.fmean(values)
        for row in rows
        if row["case"].startswith("learning/") and row["provider"] == arm and (values := read(row))
    ]
    return statistics.fmean(found) if found else None


def _learning_ratio(rows: Sequence[Row], ours: str, over: str, key: str) -> float | None:
    sides = [_learning(rows, arm, lambda row: row.get(key) or []) for arm in (ours, over)]
    return None if sides[0] is None or not sides[1] else sides[0] / sides[1]


def _fastest_placement(rows: Sequence[Row]) -> float | None:
    """The one copy's step over the fastest placement's, the worst over the numbers of rollout tokens measured."""
    ratios = []
    for tokens in {row["M"] for row in rows if row["case"] == PLACEMENT_CASE}:
        here = {
            row["provider"]: statistics.median(samples(row))
            for row in rows
            if row["case"] == PLACEMENT_CASE and row["M"] == tokens
        }
        if ONE_COPY in here and len(here) > 1:
            ratios.append(here[ONE_COPY] / min(here.values()))
    return max(ratios) if ratios else None


def _coserve(rows: Sequence[Row], name: str, over: str, worst: Callable[[list[float]], float]) -> float | None:
    """Together over alone, at the number of jobs and the rate where it is worst."""
    found: dict[tuple[int, float], dict[str, float]] = {}
    for row in rows:
        if row["case"] == f"{COSERVE_CASE}/{name}":
            found.setdefault((row["M"], row["rate"]), {})[row["provider"]] = statistics.median(samples(row))
    ratios = [sides["together"] / sides[over] for sides in found.values() if {"together", over} <= set(sides)]
    return worst(ratios) if ratios else None


def summarise(rows: Sequence[Row]) -> dict[str, float | None]:
    """Every key of the summary."""
    accuracy = {
        key: _newest(rows, lambda same, arm=arm: _learning(same, arm, samples))  # type: ignore[misc]
        for key, arm in ARMS.items()
    }
    return {
        "acc_before": _newest(rows, lambda same: _learning(same, "base", samples)),
        **accuracy,
        "matched_kl_over_bf16_pair": _newest(rows, lambda same: _learning_ratio(same, "matched", "bf16", "kl")),
        "fp8_trainer_kl_over_flashrl": _newest(rows, lambda same: _learning_ratio(same, "w8a8_tis", "flashrl", "kl")),
        "matched_step_over_w8a8": _newest(rows, lambda same: _learning_ratio(same, "matched", "w8a8_tis", "step_s")),
        "peak_27b_gib": _newest(rows, lambda same: _median(same, "memory/qwen3.5-27b/one_copy", ONE_COPY), 2),
        "train_tokens_s_over_bf16": _newest(
            rows, lambda same: _ratio(same, "train_speed/qwen3-8b", "fp8_panel", "bf16")
        ),
        "publish_ms_8b": _newest(rows, lambda same: _median(same, "publish/qwen3-8b", ONE_COPY), 2),
        "kv_release_s": _newest(rows, lambda same: _median(same, "kv_release/qwen3-8b", ONE_COPY)),
        "one_copy_host_gib": _newest(rows, lambda same: _median(same, "host_memory/qwen3-8b", ONE_COPY), 2),
        "one_copy_step_over_fastest": _newest(rows, _fastest_placement),
        "coserve_gpu_s_over_separate": _newest(rows, lambda same: _coserve(same, "gpu_s", "separate", max)),
        "coserve_ttft_p99_over_alone": _newest(rows, lambda same: _coserve(same, "ttft_p99", "alone", max)),
        "coserve_rl_rate_over_alone": _newest(rows, lambda same: _coserve(same, "rl_steps_s", "alone", min)),
    }
