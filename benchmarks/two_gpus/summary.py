"""The figures of `two_gpus_h200x2.json`, computed from its rows and from nothing else.

A ratio takes both sides from one run: the newest run that measured both. Null where it has not been measured. "vLLM's best" is
the variant (default or tuned LoRA kernels, one or two streams) beside which ours looks worst.

| rows (`case`, `provider`) | samples |
|---|---|
| `tpot/MODEL/tp2/b1`, ours or a variant of vLLM | ms per output token of one request under an adapter |
| `throughput/MODEL/tp2/t8`, the same | generated tokens a second of requests of 8 tenants |
| `all_reduce/MODEL`, `custom` or `nccl` | ms per output token; facts: what works beside shared weights |
| `equality/MODEL/tp2`, `tp2` or `tp1` | error of each token's log-probability against fp32, nats |
| `pair/steps`, `epilora` | seconds of each RL step of the pair, tenants served meanwhile |
| `pair/publish`, `epilora` | ms from the optimizer step's end until the engine samples from the adapter |
| `pair/killed/PROCESS`, `epilora` | seconds until what went with it was down, and until it was back |
| `spread/rollouts`, `two` or `one` | rollout tokens a second of two engines, of one |
| `spread/killed`, `epilora` | rollouts of each step, an engine killed in one of them |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.serving.engines import OURS, STOCK

Row = dict[str, Any]
MODEL = "qwen2.5-72b"
TENANTS = 8
TPOT, THROUGHPUT = f"tpot/{MODEL}/tp2/b1", f"throughput/{MODEL}/tp2/t{TENANTS}"


def samples(row: Row) -> list[float]:
    """A row's raw samples."""
    return row[f"samples_{row['unit']}"]


def _newest(rows: Sequence[Row], value: Callable[[list[Row]], float | None], digits: int = 4) -> float | None:
    for run in dict.fromkeys(row["run_id"] for row in reversed(rows)):
        found = value([row for row in rows if row["run_id"] == run and samples(row) and not row.get("fallbacks")])
        if found is not None:
            return round(found, digits)
    return None


def _medians(rows: Sequence[Row], case: str) -> dict[str, float]:
    """provider -> median of all its samples of a case."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["case"] == case:
            found.setdefault(row["provider"], []).extend(samples(row))
    return {provider: statistics.median(values) for provider, values in found.items()}


def _over_best(rows: Sequence[Row], case: str, worst: Callable[[Sequence[float]], float]) -> float | None:
    """Ours over each variant of vLLM, every ratio from one run; the worst of them."""
    ratios = [_newest(rows, lambda same, v=variant: _ratio(same, case, OURS, v)) for variant in STOCK]  # type: ignore[misc]
    found = [ratio for ratio in ratios if ratio is not None]
    return worst(found) if found else None


def _ratio(rows: Sequence[Row], case: str, ours: str, over: str) -> float | None:
    found = _medians(rows, case)
    return found[ours] / found[over] if ours in found and over in found else None


def _rms_ratio(rows: Sequence[Row]) -> float | None:
    rms = {}
    for row in rows:
        if row["case"].startswith("equality/"):
            rms[row["provider"]] = statistics.fmean(value**2 for value in samples(row)) ** 0.5
    return rms["tp2"] / rms["tp1"] if {"tp1", "tp2"} <= set(rms) and rms["tp1"] else None


def _count(rows: Sequence[Row], case: str) -> float | None:
    found = [len(samples(row)) for row in rows if row["case"] == case]
    return float(found[-1]) if found else None


def summarise(rows: Sequence[Row]) -> dict[str, float | None]:
    """Every key of the summary."""
    return {
        "tp2_72b_tpot_over_vllm_best": _over_best(rows, TPOT, max),
        "tp2_72b_throughput_8_over_vllm_best": _over_best(rows, THROUGHPUT, min),
        "tp2_logprob_rms_over_one_gpu": _newest(rows, _rms_ratio),
        "tp2_rl_steps": _newest(rows, lambda same: _count(same, "pair/steps")),
        "tp2_publish_ms": _newest(rows, lambda same: _medians(same, "pair/publish").get("epilora"), 2),
        "dp2_rollout_speedup": _newest(rows, lambda same: _ratio(same, "spread/rollouts", "two", "one")),
    }
