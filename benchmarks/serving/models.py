"""Folders that vLLM can load without weights: a config.json of a real model's sizes, weights drawn at random by vLLM.

Sizes come from `epilora/models/shapes`; what else a config.json needs (rope, norms, context) is added here and does not
change how long anything takes.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from epilora.model_facts import SHAPES

POSITIONS = 40960
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": POSITIONS,
    "rope_theta": 1e6,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
_HYBRID = "Qwen3_5ForConditionalGeneration"


def model_names() -> list[str]:
    """Names `model_config` knows."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def model_config(name: str) -> dict[str, Any]:
    """The whole config.json of a model known by its sizes. Raises ValueError for another name or architecture."""
    path = SHAPES / f"{name}.json"
    if not path.exists():
        raise ValueError(f"model={name!r}; known by their sizes are {', '.join(model_names())}")
    sizes = json.loads(path.read_text())
    sizes.pop("about")
    architecture = sizes["architectures"][0]
    if architecture == _HYBRID:
        return {
            "architectures": ["Qwen3_5ForCausalLM"],  # the text part alone: no vision tower is built
            "model_type": "qwen3_5_text",
            **_COMMON,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            **sizes["text_config"],
        }
    if architecture not in _MODEL_TYPES:
        raise ValueError(f"model={name!r}: architecture {architecture} has no template here")
    return {"model_type": _MODEL_TYPES[architecture], **_COMMON, **sizes}


def model_folder(name: str, root: pathlib.Path) -> pathlib.Path:
    """A folder under `root` with the model's config.json; `name` may also be a checkpoint folder and comes back as it is.

    A checkpoint folder is recognised by its config.json.
    """
    given = pathlib.Path(name)
    if (given / "config.json").exists():
        return given
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(name), indent=1))
    return folder
