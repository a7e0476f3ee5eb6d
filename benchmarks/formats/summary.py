"""The figures of `results/formats_h200.json`, from its rows alone. Null where nothing was measured."""

from __future__ import annotations

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


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every key of KEYS; plain numbers or None."""
    summary: dict[str, Any] = dict.fromkeys(KEYS)
    sizes = {r["provider"]: r["samples_bytes"][0] for r in rows if r["case"] == "adapter_bytes"}
    if sizes:
        for fmt in ("fp8", "nvfp4"):
            stored = sizes["fp8_e4m3" if fmt == "fp8" else fmt]
            summary[f"resident_adapters_{fmt}_over_bf16"] = round(sizes["bf16"] / stored, 4)
    quality = [r for r in rows if r["case"].startswith("quality/")]
    if quality:
        served = [r for r in quality if r["served"] == "copy"]
        summary["quality_checks"] = sum(len(r["checks"]) for r in quality)
        summary["quality_refused"] = sum(not c["passed"] for r in quality for c in r["checks"])
        summary["quality_failed_served"] = sum(any(not c["passed"] for c in r["checks"]) for r in served)
    return summary
