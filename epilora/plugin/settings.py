"""Switches of the plugin: `additional_config={"epilora": {...}}` of the engine, or environment variables of the process.

| key | variable | values | default |
|---|---|---|---|
| activations | | w8a8, w8a16 | w8a8 |
| path | EPILORA_PATH | auto, decode, hybrid, hybrid_streams, fused, vendor, stock, op (CPU: the GPU's code in plain torch) | auto |
| quantise | EPILORA_QUANTISE | graph (vLLM's, fused by its compiler), op (in our kernels) | graph |
| adapters | EPILORA_ADAPTERS | 16bit, fp8 (slots stored in FP8, one scale a row), nvfp4 (NVFP4; rank and features multiples of 16) | 16bit |
| require | EPILORA_REQUIRE | 0, 1 (an error instead of a layer left to vLLM) | 0 |
| batch_invariant | EPILORA_BATCH_INVARIANT | 0, 1 (one order of sums at every batch size) | 0 |
| timed | EPILORA_TIMED | 0, 1 (time the paths at load) | 1 |

The engine's own configuration beats the variable. EPILORA_DISABLE=1 (see `register`) leaves stock vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from epilora.quant.formats import Format

ACTIVATIONS = ("w8a8", "w8a16")
SLOT_FORMATS = {"fp8": Format.FP8_E4M3, "nvfp4": Format.NVFP4}  # of slots that are not 16-bit
PATHS = ("auto", "decode", "hybrid", "hybrid_streams", "fused", "vendor", "stock", "op")
ALLOWED: dict[str, tuple[str, ...]] = {
    "activations": ACTIVATIONS,
    "path": PATHS,
    "quantise": ("graph", "op"),
    "adapters": ("16bit", *SLOT_FORMATS),
    "require": ("0", "1"),
    "batch_invariant": ("0", "1"),
    "timed": ("0", "1"),
}


class Kind(StrEnum):
    """Who computes a LoRA layer.

    CPU: grouped rows in plain torch. FUSED: base and adapters in our operator. BESIDE: vLLM's base, our adapter kernels.
    STOCK: vLLM's own code.
    """

    CPU = "lora_cpu"
    FUSED = "lora_fused"
    BESIDE = "lora_beside"
    STOCK = "lora_stock"


@dataclass(frozen=True)
class Settings:
    """The switches of one engine; meanings in the module's table."""

    activations: str = "w8a8"
    path: str = "auto"
    quantise: str = "graph"
    adapters: str = "16bit"
    require: bool = False
    batch_invariant: bool = False
    timed: bool = True

    def traced(self) -> str:
        """What changes the code that vLLM's compiler sees, for its cache key."""
        return f"{self.activations} {self.path} {self.quantise} {self.adapters} {int(self.batch_invariant)}"


def settings_of(vllm_config: Any, environment: Mapping[str, str] | None = None) -> Settings:
    """The switches of an engine from its config (None: defaults and variables only). Raises ValueError for an unknown key
    or value."""
    environment = os.environ if environment is None else environment
    extra = getattr(vllm_config, "additional_config", None) or {}
    ours = dict(extra.get("epilora") or {}) if isinstance(extra, dict) else {}
    unknown = set(ours) - set(ALLOWED)
    if unknown:
        raise ValueError(f"additional_config epilora.{sorted(unknown)[0]}: unknown; allowed are {', '.join(ALLOWED)}")
    values: dict[str, Any] = {}
    for field in fields(Settings):
        variable = f"EPILORA_{field.name.upper()}"
        if field.name in ours:
            value, origin = ours[field.name], f"additional_config epilora.{field.name}"
        elif field.name != "activations" and environment.get(variable, ""):
            value, origin = environment[variable], variable
        else:
            continue
        text = str(int(value)) if isinstance(value, bool | int) else value
        if text not in ALLOWED[field.name]:
            raise ValueError(f"{origin}={value!r}; allowed are {', '.join(ALLOWED[field.name])}")
        values[field.name] = text == "1" if field.type == "bool" else text
    found = Settings(**values)
    if found.adapters in SLOT_FORMATS and found.path in ("vendor", "stock"):
        raise ValueError(
            f"adapters={found.adapters} with path={found.path}: vLLM's own kernels read 16-bit slots; allowed are {', '.join(p for p in PATHS if p not in ('vendor', 'stock'))}"
        )
    return found
