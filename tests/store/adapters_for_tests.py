"""Small adapters and a base description that the store's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from epilora.types import AdapterSpec

BASE = {
    f"model.layers.{layer}.self_attn.{name}": shape
    for layer in range(2)
    for name, shape in (("q_proj", (12, 8)), ("v_proj", (6, 8)))
} | {f"model.layers.{layer}.mlp.down_proj": (8, 16) for layer in range(2)}
SPEC = AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
QV = [module for module in BASE if module.endswith(("q_proj", "v_proj"))]


def tensors(seed: int = 0, *, modules: list[str] | None = None, rank: int = 4) -> dict[str, np.ndarray]:
    """PEFT tensors for `modules` of BASE, fp32."""
    rng = np.random.default_rng(seed)
    out = {}
    for module in QV if modules is None else modules:
        n, k = BASE[module]
        out[f"base_model.model.{module}.lora_A.weight"] = rng.normal(size=(rank, k)).astype(np.float32)
        out[f"base_model.model.{module}.lora_B.weight"] = rng.normal(size=(n, rank)).astype(np.float32)
    return out


def config(**changes: Any) -> dict[str, Any]:
    """A valid adapter_config.json with `changes`; a change to ... drops the field."""
    data: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/tiny",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "modules_to_save": None,
    }
    data |= changes
    return {key: value for key, value in data.items() if value is not ...}
