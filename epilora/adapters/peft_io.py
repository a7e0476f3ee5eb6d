"""PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`, read and written.

Tensors are fp32 under PEFT's keys, scaling not folded. What an engine slot cannot hold is refused when reading: DoRA,
biases, modules saved whole, other PEFT methods. Format: https://huggingface.co/docs/peft (checkpoint format).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

from .digest import as_tensor
from .fold import ALL_LINEAR

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "megatron_config",
    "lora_bias",
    "alora_invocation_tokens",
)


def config_of(spec: AdapterSpec, base_model: str = "") -> dict[str, Any]:
    """The spec as PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": 0.0,
        # PEFT knows the shorthand as a plain string only
        "target_modules": ALL_LINEAR if ALL_LINEAR in spec.target_modules else sorted(spec.target_modules),
        "use_rslora": spec.use_rslora,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def spec_of(config: Mapping[str, Any]) -> AdapterSpec:
    """The spec in an adapter_config.json. Raises AdapterRejected for what no slot can hold, naming the field and its
    value.
    """
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterRejected(f"{CONFIG_NAME}: peft_type={config['peft_type']!r}; only LORA adapters are served")
    if config.get("bias", "none") != "none":
        raise AdapterRejected(f"{CONFIG_NAME}: bias={config['bias']!r}; only 'none' is served")
    for field in _UNSUPPORTED:
        if config.get(field):
            raise AdapterRejected(
                f"{CONFIG_NAME}: {field}={config[field]!r} is not supported; train without it or merge it into the base"
            )
    targets = config.get("target_modules")
    if not targets:
        raise AdapterRejected(f"{CONFIG_NAME}: target_modules={targets!r}; it must name at least one module")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise AdapterRejected(
            f"{CONFIG_NAME}: target_modules={targets!r} is a regular expression; list the module names instead"
        )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except KeyError as err:
        raise AdapterRejected(f"{CONFIG_NAME}: {err.args[0]!r} is missing") from err
    return AdapterSpec(
        rank=rank,
        alpha=alpha,
        target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        use_rslora=bool(config.get("use_rslora", False)),
        rank_pattern=tuple((str(k), int(v)) for k, v in (config.get("rank_pattern") or {}).items()),
        alpha_pattern=tuple((str(k), float(v)) for k, v in (config.get("alpha_pattern") or {}).items()),
    )


def write_peft(
    folder: str | pathlib.Path, spec: AdapterSpec, tensors: Mapping[str, Any], *, base_model: str = ""
) -> None:
    """Write an adapter folder (made if missing). tensors: PEFT's keys, any float dtype, stored as fp32."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: as_tensor(tensors[name]).to(torch.float32).contiguous() for name in sorted(tensors)}
    save_file(stored, str(folder / TENSORS_NAME), metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config_of(spec, base_model), indent=2) + "\n")


def read_peft(folder: str | pathlib.Path) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """(spec, tensors in fp32) of an adapter folder.

    Raises AdapterRejected: a file missing (the message lists what the folder holds), or what `spec_of` refuses.
    """
    folder = pathlib.Path(folder)
    for name in (CONFIG_NAME, TENSORS_NAME):
        if not (folder / name).is_file():
            held = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise AdapterRejected(f"{folder}: {name} is missing; the folder holds {held}")
    spec = spec_of(json.loads((folder / CONFIG_NAME).read_text()))
    return spec, {name: tensor.to(torch.float32) for name, tensor in load_file(str(folder / TENSORS_NAME)).items()}
