"""The figures of `kernels_h200.json`, computed from its rows and from nothing else.

A ratio takes both sides from one run: the newest run that measured both. `vllm_best` is the fastest of the providers whose
names start with `vllm_lora_` (default or tuned kernels, one or two streams) for that case, M and run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS, OURS_BASE = "epilora", "epilora_no_adapter"
VLLM_LORA_PREFIX = "vllm_lora_"
VLLM_BASE = "vllm_no_adapter"


def adapter_case(num_adapters: int, rank: int = 64, slots: int = 8, model: str = "qwen3-8b") -> str:
    """Name of the case 'one decoder layer of `model`, this many distinct adapters of this rank in so many slots'."""
    return f"layer/{model}/r{rank}/a{num_adapters}/s{slots}"


@dataclass(frozen=True)
class Figure:
    """One key of the summary: the time of `provider` in `case` at `M`, over that of `over` (None: microseconds)."""

    case: str
    M: int
    provider: str = OURS
    over: str | None = None


ONE = adapter_case(1)
FIGURES: dict[str, Figure] = {
    "layer_m1_us": Figure(ONE, 1),
    "layer_m1_over_no_adapter": Figure(ONE, 1, over=VLLM_BASE),
    "layer_m1_over_vllm_best": Figure(ONE, 1, over="vllm_best"),
    "layer_m8_over_vllm_best": Figure(ONE, 8, over="vllm_best"),
    "layer_m16_over_no_adapter": Figure(ONE, 16, over=VLLM_BASE),
    "layer_m16_over_vllm_best": Figure(ONE, 16, over="vllm_best"),
    "gemm_m1_over_cutlass": Figure(ONE, 1, OURS_BASE, VLLM_BASE),
    "m32_1_over_vllm_best": Figure(adapter_case(1, slots=32), 32, over="vllm_best"),
    "m32_32_over_vllm_best": Figure(adapter_case(32, slots=32), 32, over="vllm_best"),
    "hybrid_512_32_over_vllm_best": Figure(adapter_case(32, slots=32), 512, over="vllm_best"),
    "prefill_2048_32_over_vllm_best": Figure(adapter_case(32, slots=32), 2048, over="vllm_best"),
    "prefill_2048_32_over_vendor_gemm": Figure(adapter_case(32, slots=32), 2048, over=VLLM_BASE),
    "w8a16_m1_over_marlin": Figure("w8a16/qwen3-8b", 1, over="marlin"),
    "train_fwd_4096_over_bf16": Figure("train_forward/qwen3-8b", 4096, over="bf16"),
    "train_bwd_4096_over_bf16": Figure("train_backward/qwen3-8b", 4096, over="bf16"),
}


def median_us(row: dict[str, Any]) -> float:
    """Median of a row's samples in microseconds."""
    return statistics.median(row["samples_us"])


def figure_value(figure: Figure, rows: Sequence[dict[str, Any]]) -> float | None:
    """The figure from the newest run that has every side of it; None when no run has."""
    for run_id in dict.fromkeys(row["run_id"] for row in reversed(rows)):
        same = [
            r
            for r in rows
            if r["run_id"] == run_id and r["case"] == figure.case and r["M"] == figure.M and r.get("samples_us")
        ]
        ours = [median_us(r) for r in same if r["provider"] == figure.provider]
        if not ours:
            continue
        if figure.over is None:
            return round(ours[-1], 2)
        if figure.over == "vllm_best":
            others = [median_us(r) for r in same if r["provider"].startswith(VLLM_LORA_PREFIX)]
        else:
            others = [median_us(r) for r in same if r["provider"] == figure.over]
        if others:
            return round(ours[-1] / min(others), 4)
    return None


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Every key of the summary; None where it has not been measured."""
    return {key: figure_value(figure, rows) for key, figure in FIGURES.items()}
