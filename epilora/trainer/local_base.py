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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from epilora.adapters.digest import raw_bytes, weights_digest
from epilora.quant.formats import ScaleAxis, format_of_torch_dtype
from epilora.quant.manifest import Location, TensorEntry, Transport, WeightEntry, WeightManifest
from epilora.quant.operand import Operand
from epilora.quant.reference import quantize_weight_ref

from .attach import MappedBase, parameter_name

PACKED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
ROW_PARALLEL = ("o_proj", "down_proj")
_ALIGN = 4096
_VOCAB_ALIGN = 64


@dataclass(frozen=True)
class LocalBase:
    """A manifest and the file behind it; `remove` deletes the file (mappings that exist keep working)."""

    manifest: WeightManifest
    path: Path

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class _Writer:
    """Tensors into one file, page by page; their entries and what the base's digest is of."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.path = Path(folder) / f"epilora-{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}.weights"
        self._file = self.path.open("wb")
        self.entries: list[WeightEntry] = []
        self._digested: list[tuple[str, torch.Tensor]] = []

    def _store(self, tensor: torch.Tensor) -> TensorEntry:
        offset = -(-self._file.tell() // _ALIGN) * _ALIGN
        self._file.seek(offset)
        self._file.write(raw_bytes(tensor))
        kind = str(tensor.dtype).removeprefix("torch.")
        where = Location(Transport.SHM, str(self.path), offset)
        return TensorEntry(tuple(tensor.shape), tensor.contiguous().stride(), kind, where)

    def put(self, name: str, operand: Operand, slices: tuple[tuple[str, int], ...] = ()) -> None:
        scales = None if operand.scales is None else operand.scales.reshape(-1, 1)
        stored = None if scales is None else self._store(scales)
        entry = WeightEntry(name, operand.format, operand.axis, self._store(operand.values), stored, slices=slices)
        self._digested.append((parameter_name(entry), operand.values))
        if scales is not None:
            self._digested.append((f"{name}.weight_scale", scales))
        self.entries.append(entry)

    def close(self, model_path: str, engine: str, tp_rank: int = 0, tp_size: int = 1) -> LocalBase:
        self._file.truncate(-(-self._file.tell() // _ALIGN) * _ALIGN)
        self._file.close()
        digest = weights_digest(self._digested)
        manifest = WeightManifest(engine, model_path, digest, tp_rank, tp_size, tuple(self.entries))
        return LocalBase(manifest, self.path)


def make_local_base(
    model_path: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.float32, name: str = "local"
) -> LocalBase:
    """Quantise the safetensors checkpoint at `model_path` into a file in `folder` (e.g. /dev/shm, or a temporary
    folder).

    dtype: what weights are rounded to before they are quantised, and what embeddings and norms are stored in.
    """
    writer = _Writer(folder, name)
    for module, slices, weight in _modules(Path(model_path), dtype):
        if slices:
            writer.put(module, quantize_weight_ref(weight, ScaleAxis.CHANNEL), slices)
        else:
            kind = format_of_torch_dtype(str(weight.dtype).removeprefix("torch."))
            writer.put(module, Operand(weight, kind, ScaleAxis.NONE))
    return writer.close(str(model_path), name)


def cut_local_base(base: LocalBase, folder: str | Path, size: int) -> list[LocalBase]:
    """The parts of `base` as `size` tensor-parallel ranks of an engine hold them, a file each, by rank.

    Embedding and head are cut into rows rounded up to 64, as an engine pads them. Raises ValueError if a layer does not
    divide.
    """
    mapped = MappedBase(base.manifest)
    made = []
    for rank in range(size):
        writer = _Writer(folder, f"{base.manifest.engine}-{rank}of{size}")
        for entry in base.manifest.entries:
            operand, leaf, slices = mapped.operands[entry.name], entry.name.rsplit(".", 1)[-1], entry.slices
            if leaf in ROW_PARALLEL:
                width = _share(entry.name, operand.values.shape[1], size)
                values = operand.values[:, rank * width : (rank + 1) * width].contiguous()
                operand = replace(operand, values=values)
            elif entry.slices:
                slices = tuple((part, _share(f"{entry.name}: {part}", rows, size)) for part, rows in entry.slices)
                starts = [0]
                for _, rows in entry.slices:
                    starts.append(starts[-1] + rows)
                spans = [
                    slice(start + rank * n, start + (rank + 1) * n)
                    for start, (_, n) in zip(starts, slices, strict=False)
                ]
                scales = operand.scales
                assert scales is not None, "linear layers of a local base are quantised"
                values = torch.cat([operand.values.view(torch.uint8)[span] for span in spans]).view(
                    operand.values.dtype
                )
                operand = replace(
                    operand, values=values, scales=torch.cat([scales.reshape(-1)[span] for span in spans])
                )
            elif leaf in ("embed_tokens", "lm_head"):
                rows = -(-operand.values.shape[0] // (_VOCAB_ALIGN * size)) * _VOCAB_ALIGN
                operand = replace(operand, values=operand.values[rank * rows : (rank + 1) * rows])
            writer.put(entry.name, operand, slices)
        made.append(writer.close(base.manifest.model_path, base.manifest.engine, rank, size))
    return made


def _share(what: str, count: int, size: int) -> int:
    if count % size:
        raise ValueError(f"{what}: {count} does not divide among {size} ranks")
    return count // size


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
