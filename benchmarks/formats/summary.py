"""The figures of `results/formats_h200.json`, from its rows alone. Null where nothing was measured."""

from __future__ import annotations

import statistics
from typing import Any

KEYS = (
    "resident_adapters_fp8_over_bf16",
    "resident_adapters_nvfp4_over_bf16",
    "throughput_32_fp8_over_bf16",
    "throughput_32_nvfp4_over_bf16",
    "w4a16_m1_over_marlin_nvfp4",
    "fp8_block_m1_over_vllm",
    "quality_checks",
    "quality_refused",
    "quality_failed_served",
)


def _ratio(rows: list[dict[str, Any]], case: str, adapters: int, ours: str) -> float | None:
    """Our fastest over the fastest of the others at one token, medians of the newest run that measured both."""
    run: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["case"], row.get("M"), row.get("adapters")) == (case, 1, adapters) and row.get("samples_us"):
            run.setdefault(row["run_id"], {})[row["provider"]] = statistics.median(row["samples_us"])
    for times in reversed(run.values()):
        mine = [t for provider, t in times.items() if provider.startswith(ours)]
        theirs = [t for provider, t in times.items() if not provider.startswith("epilora")]
        if mine and theirs:
            return round(min(mine) / min(theirs), 4)
    return None


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every key of KEYS; plain numbers or None."""
    summary: dict[str, Any] = dict.fromkeys(KEYS)
    sizes = {r["provider"]: r["samples_bytes"][0] for r in rows if r["case"] == "adapter_bytes"}
    if sizes:
        for fmt in ("fp8", "nvfp4"):
            stored = sizes["fp8_e4m3" if fmt == "fp8" else fmt]
            summary[f"resident_adapters_{fmt}_over_bf16"] = round(sizes["bf16"] / stored, 4)
    summary["w4a16_m1_over_marlin_nvfp4"] = _ratio(rows, "layer/nvfp4", 0, "epilora_w4a16")
    summary["fp8_block_m1_over_vllm"] = _ratio(rows, "layer/fp8_block", 1, "epilora")
    quality = [r for r in rows if r["case"].startswith("quality/")]
    if quality:
        served = [r for r in quality if r["served"] == "copy"]
        summary["quality_checks"] = sum(len(r["checks"]) for r in quality)
        summary["quality_refused"] = sum(not c["passed"] for r in quality for c in r["checks"])
        summary["quality_failed_served"] = sum(any(not c["passed"] for c in r["checks"]) for r in served)
    return summary
