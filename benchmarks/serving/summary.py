"""The figures of `serving_h200.json`, computed from its rows and from nothing else.

A ratio takes both sides from one run: the newest run that measured both. "vLLM's fastest" is the best of the STOCK variants
(default or tuned LoRA kernels, one or two streams) that the run measured for that case. A row of ours counts only if none of
its LoRA projections fell back for another reason than timing. A throughput is the best of an engine's rounds, on both sides: the
first may still compile for a length of prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.serving.engines import NO_LORA, OURS, OURS_FP8, STOCK
from benchmarks.serving.statistics import ratio_interval

Row = dict[str, Any]
MAIN_MODEL, LARGE_MODEL = "qwen3-8b", "qwen2.5-72b"
SLOTS_ONE, SLOTS_MANY = 1, 32
OURS_BASE_ONLY = f"{OURS}_no_adapter"
PROMPT_TOKENS, NEW_TOKENS = 512, 256  # of the throughput rows
TTFT_LIMIT_MS, TPOT_LIMIT_MS = 2000.0, 50.0  # of goodput


def tpot_case(model: str, slots: int, requests: int = 1) -> str:
    """Time per output token of `requests` requests that run together, every one under an adapter of its own."""
    return f"tpot/{model}/s{slots}/b{requests}"


def throughput_case(model: str, tenants: int) -> str:
    """Tokens a second of requests submitted at once."""
    return f"throughput/{model}/t{tenants}/{PROMPT_TOKENS}+{NEW_TOKENS}"


def online_case(metric: str, trace: str, model: str, prompt_tokens: int, capture: int, rate: float) -> str:
    """metric: tpot or ttft. capture: the largest batch with a CUDA graph."""
    return f"online_{metric}/{trace}/{model}/p{prompt_tokens}/c{capture}/r{rate:g}"


def samples(row: Row) -> list[float]:
    """A row's raw values without the zeros that stand for "none" (the time per token of a request of one token)."""
    return [s for s in row.get(f"samples_{row['unit']}", ()) if s > 0]


def counts(row: Row) -> bool:
    """Whether a row has samples and took the path it claims."""
    return bool(samples(row)) and not row.get("fallbacks")


def runs_newest_first(rows: Sequence[Row]) -> list[str]:
    """Run ids, the newest first."""
    return list(dict.fromkeys(row["run_id"] for row in reversed(rows)))


def values(rows: Iterable[Row], run_id: str, case: str, providers: Sequence[str]) -> dict[str, list[float]]:
    """provider -> samples of one run's rows of a case that count; several rows of a provider are pooled."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["run_id"] == run_id and row["case"] == case and row["provider"] in providers and counts(row):
            found.setdefault(row["provider"], []).extend(samples(row))
    return found


def ratio(
    rows: Sequence[Row],
    case: str,
    over: Sequence[str],
    *,
    provider: str = OURS,
    best: Callable[[Iterable[float]], float] = min,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> float | None:
    """statistic(provider) over the best of statistic(`over`), from the newest run that has both; None where none has."""
    for run_id in runs_newest_first(rows):
        ours = values(rows, run_id, case, [provider])
        others = values(rows, run_id, case, over)
        if ours and others:
            return round(statistic(ours[provider]) / best(statistic(v) for v in others.values()), 4)
    return None


def newest_median(rows: Sequence[Row], case: str, provider: str = OURS) -> float | None:
    """Median of the newest run's samples; None where nothing was measured."""
    for run_id in runs_newest_first(rows):
        found = values(rows, run_id, case, [provider])
        if found:
            return round(statistics.median(found[provider]), 4)
    return None


def _worst(found: Iterable[float | None]) -> float | None:
    return max((f for f in found if f is not None), default=None)


def p99(sample: Sequence[float]) -> float:
    """99th percentile, linear between the neighbours."""
    ordered = sorted(sample)
    place = 0.99 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def online_cases(rows: Sequence[Row], metric: str, trace: str, model: str = "") -> list[str]:
    """Cases of a trace (and of one model, if named) in the rows, in order of appearance."""
    start = f"online_{metric}/{trace}/" + (f"{model}/" if model else "")
    return list(dict.fromkeys(row["case"] for row in rows if row["case"].startswith(start)))


def summarise(rows: Sequence[Row]) -> dict[str, float | None]:
    """Every key of the summary; None where it has not been measured."""
    one, many = tpot_case(MAIN_MODEL, SLOTS_ONE), tpot_case(MAIN_MODEL, SLOTS_MANY)
    tenants = throughput_case(MAIN_MODEL, SLOTS_MANY)
    dispatch = sorted({r["case"] for r in rows if r["case"].startswith(f"dispatch_cold/{MAIN_MODEL}/")})
    return {
        "tpot_b1_ms": newest_median(rows, one),
        "tpot_b1_over_vllm_best": ratio(rows, one, STOCK),
        "tpot_b1_over_no_adapter": ratio(rows, one, [NO_LORA]),
        "tpot_b1_32slots_over_vllm_best": ratio(rows, many, STOCK),
        "throughput_32_over_vllm_best": ratio(rows, tenants, STOCK, best=max, statistic=max),
        "throughput_32_over_no_adapter": ratio(rows, tenants, [NO_LORA], statistic=max),
        "throughput_32_fp8_over_vllm_best": ratio(rows, tenants, STOCK, provider=OURS_FP8, best=max, statistic=max),
        "base_only_over_no_lora": _worst(ratio(rows, case, [NO_LORA], provider=OURS_BASE_ONLY) for case in (one, many)),
        "kv_tokens_over_vllm": ratio(rows, f"kv_tokens/{MAIN_MODEL}/s{SLOTS_MANY}", STOCK, best=max),
        "dispatch_cold_s": _worst(newest_median(rows, case) for case in dispatch),
        "online_tpot_worst_ratio": _worst(
            ratio(rows, case, STOCK) for case in online_cases(rows, "tpot", "poisson", MAIN_MODEL)
        ),
        "online_ttft_p99_worst_ratio": _worst(
            ratio(rows, case, STOCK, statistic=p99) for case in online_cases(rows, "ttft", "poisson", MAIN_MODEL)
        ),
        "tpot_72b_over_vllm_best": ratio(rows, tpot_case(LARGE_MODEL, SLOTS_ONE), STOCK),
    }


def goodput(rows: Sequence[Row], run_id: str, ttft_case: str, provider: str) -> float | None:
    """Requests a second whose TTFT and time per token both kept their limits, of one run's online rows.

    Requests of one token count by their TTFT alone. None where the run lacks the rows.
    """
    same = [r for r in rows if r["run_id"] == run_id and r["provider"] == provider and counts(r)]
    first = [r for r in same if r["case"] == ttft_case]
    rest = [r for r in same if r["case"] == ttft_case.replace("online_ttft/", "online_tpot/")]
    if not first or len(first) != len(rest):
        return None
    good, seconds = 0, 0.0
    for ttft, tpot in zip(first, rest, strict=True):
        pairs = zip(ttft["samples_ms"], tpot["samples_ms"], strict=True)
        good += sum(a <= TTFT_LIMIT_MS and b <= TPOT_LIMIT_MS for a, b in pairs)
        seconds += ttft["seconds"]
    return good / seconds


def online_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every online case of every run: ratios to vLLM's fastest with bootstrap 95 % intervals, and goodput of both sides."""
    table = []
    for run_id in dict.fromkeys(row["run_id"] for row in rows):
        for trace in ("poisson", "wildchat"):
            for tpot_name in online_cases(rows, "tpot", trace):
                ttft_name = tpot_name.replace("online_tpot/", "online_ttft/")
                line: dict[str, Any] = {"case": tpot_name.removeprefix("online_tpot/"), "run_id": run_id}
                for metric, case, percentile in (("tpot", tpot_name, 50.0), ("ttft_p99", ttft_name, 99.0)):
                    ours = values(rows, run_id, case, [OURS])
                    others = values(rows, run_id, case, STOCK)
                    if not ours or not others:
                        break
                    statistic = statistics.median if metric == "tpot" else p99
                    best = min(others, key=lambda name: statistic(others[name]))
                    line[metric] = [round(x, 4) for x in ratio_interval(ours[OURS], others[best], percentile)]
                    line[f"{metric}_over"] = best
                    line[f"goodput_{metric}"] = [
                        None if g is None else round(g, 3)
                        for g in (goodput(rows, run_id, ttft_name, name) for name in (OURS, best))
                    ]
                else:
                    table.append(line)
    return table
