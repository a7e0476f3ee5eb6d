"""PEFT folders in and out, read as if their author were hostile.

Read: only `adapter_config.json` and `adapter_model.safetensors` (or a weights-only `.bin`), only regular files opened
without following links, only up to a stated size; nothing is unpickled. Written: the same two files, which stock
`peft` loads.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_safetensors

from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

from .digest import as_fp32_tensors, spec_to_dict
from .objects import fsync_dir
from .safetensors_io import read_header, read_tensors
from .torch_bin import read_torch_bin

CONFIG_FILE, TENSOR_FILE, BIN_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_ADAPTER_BYTES = 4 << 30


def read_peft_folder(
    folder: str | Path, *, max_bytes: int = MAX_ADAPTER_BYTES
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and fp32 tensors of a PEFT folder. Raises AdapterRejected with the file and the reason."""
    folder = Path(folder)
    if not folder.is_dir():
        raise AdapterRejected(f"{folder} is not a folder")
    config = parse_config_bytes(_read_file(folder / CONFIG_FILE, MAX_CONFIG_BYTES))
    if not (folder / TENSOR_FILE).exists() and (folder / BIN_FILE).exists():
        return config, read_torch_bin(_read_file(folder / BIN_FILE, max_bytes), max_bytes=max_bytes)
    tensors, _ = read_tensors(_read_file(folder / TENSOR_FILE, max_bytes))
    return config, tensors


def parse_config_bytes(data: bytes) -> dict[str, Any]:
    """The JSON object of an adapter_config.json. Raises AdapterRejected."""
    try:
        config = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as err:
        raise AdapterRejected(f"{CONFIG_FILE} is not valid JSON: {err}") from err
    if not isinstance(config, dict):
        raise AdapterRejected(f"{CONFIG_FILE} is not a JSON object")
    return config


def _read_file(path: Path, max_bytes: int) -> bytes:
    """A regular file's bytes.

    Links, devices, pipes and files beyond the limit are refused; growth while reading too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterRejected(f"{path.name} is missing in {path.parent}") from None
    except OSError as err:
        raise AdapterRejected(
            f"{path.name} cannot be opened as a plain file (links are not followed): {err.strerror}"
        ) from err
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRejected(f"{path.name} is not a regular file")
        if status.st_size > max_bytes:
            raise AdapterRejected(f"{path.name} has {status.st_size} bytes; at most {max_bytes} are allowed")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise AdapterRejected(f"{path.name} grew beyond {max_bytes} bytes while it was read")
    return data


def peft_config(spec: AdapterSpec, base_model: str) -> dict[str, Any]:
    """An adapter_config.json that stock PEFT reads as this spec, for inference."""
    data = spec_to_dict(spec)
    targets = data["target_modules"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": data["rank"],
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": "all-linear" if targets == ["all-linear"] else targets,
        "use_rslora": data["use_rslora"],
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def write_peft_folder(
    folder: str | Path, spec: AdapterSpec, tensors: Mapping[str, Any], *, base_model: str = ""
) -> Path:
    """Write the two files a PEFT adapter consists of, each whole or not at all. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        TENSOR_FILE: save_safetensors(as_fp32_tensors(tensors), metadata={"format": "pt"}),
        CONFIG_FILE: json.dumps(peft_config(spec, base_model), indent=2, sort_keys=True).encode() + b"\n",
    }
    for name, data in files.items():
        temp = folder / f".{name}.{os.getpid()}"
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temp, folder / name)
    fsync_dir(folder)
    return folder


def base_from_checkpoint(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Module name -> (out, in) of every 2-D `.weight` in a checkpoint's safetensors files, embeddings and lm_head left
    out.

    Reads headers only. Raises FileNotFoundError if there are no safetensors files.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors files in {folder}: the base's shapes cannot be read")
    base: dict[str, tuple[int, int]] = {}
    for path in files:
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            header, _, _ = read_header(file.read(8 + min(length, size)), size)
        for name, entry in header.items():
            if name.endswith(".weight") and len(entry["shape"]) == 2:
                module = name.removesuffix(".weight")
                if module.rsplit(".", 1)[-1] not in ("lm_head", "embed_tokens", "embed_out", "wte", "word_embeddings"):
                    base[module] = (int(entry["shape"][0]), int(entry["shape"][1]))
    return base
