"""A base made without an engine: quantise a checkpoint to FP8 per channel into a file and list it in a manifest.

    scale = max(amax / 448, 1 / (448 * 512)) per output channel,   code = e4m3(clamp(w / scale, -448, 448))

on weights rounded to `dtype` first: what vLLM's online `fp8_per_channel` gives, under the names and packing an engine
exports (`qkv_proj`, `gate_up_proj`). For tests, experiments and supervised training where no engine runs; a trainer
beside an engine maps the engine's own bytes and never quantises.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from epilora.adapters.digest import raw_bytes, weights_digest
from epilora.quant.formats import ScaleAxis, format_of_torch_dtype
from epilora.quant.manifest import Location, TensorEntry, Transport, WeightEntry, WeightManifest
from epilora.quant.reference import quantize_weight_ref

from .attach import parameter_name

PACKED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_ALIGN = 4096


@dataclass(frozen=True)
class LocalBase:
    """A manifest and the file behind it; `remove` deletes the file (mappings that exist keep working)."""

    manifest: WeightManifest
    path: Path

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def make_local_base(
    model_path: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.float32, name: str = "local"
) -> LocalBase:
    """Quantise the safetensors checkpoint at `model_path` into a file in `folder` (e.g. /dev/shm, or a temporary
    folder).

    dtype: what weights are rounded to before they are quantised, and what embeddings and norms are stored in.
    """
    model_path = Path(model_path)
    entries: list[WeightEntry] = []
    digested: list[tuple[str, torch.Tensor]] = []
    path = Path(folder) / f"epilora-{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}.weights"
    with path.open("wb") as file:

        def store(tensor: torch.Tensor) -> TensorEntry:
            offset = -(-file.tell() // _ALIGN) * _ALIGN
            file.seek(offset)
            file.write(raw_bytes(tensor))
            kind = str(tensor.dtype).removeprefix("torch.")
            return TensorEntry(
                tuple(tensor.shape), tuple(tensor.stride()), kind, Location(Transport.SHM, str(path), offset)
            )

        for module, slices, weight in _modules(model_path, dtype):
            if slices:
                operand = quantize_weight_ref(weight, ScaleAxis.CHANNEL)
                assert operand.scales is not None, "FP8 operands carry scales"
                scales = operand.scales.reshape(-1, 1)
                entry = WeightEntry(
                    module, operand.format, operand.axis, store(operand.values), store(scales), slices=slices
                )
                digested += [(parameter_name(entry), operand.values), (f"{module}.weight_scale", scales)]
            else:
                kind = format_of_torch_dtype(str(weight.dtype).removeprefix("torch."))
                entry = WeightEntry(module, kind, ScaleAxis.NONE, store(weight))
                digested.append((parameter_name(entry), weight))
            entries.append(entry)
        file.truncate(-(-file.tell() // _ALIGN) * _ALIGN)
    manifest = WeightManifest(
        engine=name,
        model_path=str(model_path),
        base_digest=weights_digest(digested),
        tp_rank=0,
        tp_size=1,
        entries=tuple(entries),
    )
    return LocalBase(manifest, path)


def _modules(model_path: Path, dtype: torch.dtype) -> Iterator[tuple[str, tuple[tuple[str, int], ...], torch.Tensor]]:
    """(engine module name, slices or () for what is not a linear layer, weight in `dtype`), packed as an engine
    packs.
    """
    index = _weight_index(model_path)
    tied = json.loads((model_path / "config.json").read_text()).get("tie_word_embeddings", False)

    def read(name: str) -> torch.Tensor:
        with safe_open(index[name], framework="pt") as file:
            return file.get_tensor(name).to(dtype).contiguous()

    leads = {parts[0]: (packed, parts) for packed, parts in PACKED}
    followers = {part for _, parts in PACKED for part in parts[1:]}
    for name in sorted(index):
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if leaf == "bias":
            raise ValueError(
                f"{name}: biases are not packed by make_local_base; export the base from an engine instead"
            )
        if last in followers or (tied and module == "lm_head"):
            continue
        if leaf != "weight":  # a parameter of its own, such as a delta net's A_log
            yield name, (), read(name)
            continue
        if last in leads:
            packed, parts = leads[last]
            weights = [read(f"{parent}.{part}.weight") for part in parts]
            slices = tuple((part, weight.shape[0]) for part, weight in zip(parts, weights, strict=True))
            yield f"{parent}.{packed}", slices, torch.cat(weights)
        else:
            weight = read(name)
            is_linear = weight.dim() == 2 and last not in ("embed_tokens", "lm_head")
            yield module, ((last, weight.shape[0]),) if is_linear else (), weight


def _weight_index(model_path: Path) -> dict[str, str]:
    """Tensor name -> safetensors file. Raises FileNotFoundError if the folder has none."""
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_path} has no *.safetensors; give a Hugging Face model folder")
    index = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            index.update({name: str(path) for name in file.keys()})  # noqa: SIM118 (no iterator)
    return index
