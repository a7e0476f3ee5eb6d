"""A base in the trainer's own memory: a copy of the engine's codes, or the checkpoint's weights in 16 bits.

For the placements that do not share the engine's copy. Resident, it stays on the device. Offloaded, it waits in pinned host
memory while the engine samples, and `loaded` brings it to the device for a training step: the copies of all layers are
queued at once on a stream of their own, in the order of the layers, and each layer's first use waits for its own copy only, so
that the first layers compute while the last ones travel. Afterwards the device memory is given back.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from epilora.errors import MemoryInfeasible, UnsupportedKernel
from epilora.quant.formats import Format, ScaleAxis, format_of_torch_dtype
from epilora.quant.manifest import WeightEntry, WeightManifest
from epilora.quant.operand import Operand

from .attach import base_digest
from .base import BaseWeights
from .ranks import Ranks

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ALIGN = 256


class OwnBase:
    """manifest: of the engine's base it stands for. operands: entry name -> operand in own memory."""

    paths: tuple[str, ...] = ()

    def __init__(
        self, manifest: WeightManifest, operands: Mapping[str, Operand], device: torch.device, *, offloaded: bool
    ) -> None:
        """Copy `operands` (on any device) to `device`, or to host memory if `offloaded`."""
        self.manifest = manifest
        self.device = device
        groups: dict[int, list[str]] = {}
        for name in operands:
            found = _LAYER.search(name)
            groups.setdefault(int(found[1]) if found else -1, []).append(name)
        self.operands: dict[str, Operand] = {}
        self._groups: dict[int, _Group] = {}
        for index in sorted(groups):
            group = _Group({name: operands[name] for name in groups[index]}, device, offloaded)
            self._groups[index] = group
            self.operands |= group.operands
        self._stream = torch.cuda.Stream(device) if offloaded and device.type == "cuda" else None
        self.offloaded = offloaded

    @property
    def num_bytes(self) -> int:
        """Of the copy, wherever it is."""
        return sum(group.num_bytes for group in self._groups.values())

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that an offloaded copy keeps."""
        return self.num_bytes if self.offloaded and self.device.type == "cuda" else 0

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """The base is on the device inside (layer by layer, see `wait_for_layer`)."""
        if not self.offloaded:
            yield
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for group in self._groups.values():
            group.fetch(self._stream)
        try:
            self.wait_for_layer(-1)
            yield
        finally:
            for group in self._groups.values():
                group.drop()

    def wait_for_layer(self, index: int) -> None:
        """Make the current stream wait for the copy of decoder layer `index` (-1: what lies outside the layers)."""
        if index in self._groups:
            self._groups[index].wait()

    def digest(self) -> str:
        """Of the copy as it is now, where it rests; equals the manifest's base_digest for a copy of the engine's codes."""
        resting: dict[str, Operand] = {}
        for group in self._groups.values():
            resting |= group.resting()
        return base_digest(self.manifest, resting)


class _Group:
    """Operands that travel together: views of one flat device buffer, and its host copy."""

    def __init__(self, operands: Mapping[str, Operand], device: torch.device, offloaded: bool) -> None:
        self._like = dict(operands)
        self.num_bytes = 0
        for _, tensor in self._parts():
            self.num_bytes += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.operands = self._views(self._flat)
        for (name, part), tensor in self._parts():
            getattr(self.operands[name], part).copy_(tensor)
        self._like = {name: _without_data(operand) for name, operand in operands.items()}
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if offloaded:
            self._host = _pinned(self.num_bytes) if device.type == "cuda" else torch.empty_like(self._flat)
            self._host.copy_(self._flat)
            self.drop()

    def _parts(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for name, operand in self._like.items():
            for part in ("values", "scales", "global_scale"):
                tensor = getattr(operand, part)
                if tensor is not None:
                    yield (name, part), tensor

    def _views(self, flat: torch.Tensor) -> dict[str, Operand]:
        found, start = dict(self._like), 0
        for (name, part), tensor in self._parts():
            view = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            found[name] = replace(found[name], **{part: view})  # type: ignore[arg-type]  # the part's name is data
            start += -(-tensor.nbytes // _ALIGN) * _ALIGN
        return found

    def resting(self) -> dict[str, Operand]:
        """Operands over the host copy of an offloaded group, over the device buffer of a resident one."""
        return self.operands if self._host is None else self._views(self._host)

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        assert self._host is not None, "only an offloaded group travels"
        self._flat.untyped_storage().resize_(self.num_bytes)  # views keep pointing to the storage
        if stream is None:
            self._flat.copy_(self._host)
            return
        with torch.cuda.stream(stream):
            self._flat.copy_(self._host, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._flat.device).wait_event(self._event)
            self._event = None

    def drop(self) -> None:
        self.wait()  # a copy that nobody waited for must not write into memory that has been given back
        self._flat.untyped_storage().resize_(0)


def _without_data(operand: Operand) -> Operand:
    """The same shapes and dtypes without memory."""

    def empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    values = torch.empty(operand.values.shape, dtype=operand.values.dtype, device="meta")
    return replace(operand, values=values, scales=empty(operand.scales), global_scale=empty(operand.global_scale))


def _pinned(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory of exactly that size (torch's own pinned allocator rounds up to a power of two)."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code:
        raise MemoryInfeasible(
            f"cudaHostRegister of {num_bytes} bytes of host memory failed with CUDA error {code}: an offloaded base needs them "
            "page-locked; raise the memory lock limit (ulimit -l) or choose a placement without offloading"
        )
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return tensor


def copy_codes(mapped: BaseWeights, device: torch.device, *, offloaded: bool) -> OwnBase:
    """A second copy of the very same bytes."""
    return OwnBase(mapped.manifest, mapped.operands, device, offloaded=offloaded)


def sixteen_bit(
    mapped: BaseWeights, dtype: torch.dtype, device: torch.device, *, offloaded: bool, ranks: Ranks | None = None
) -> OwnBase:
    """The checkpoint's weights in `dtype` for every linear layer, as trainers that know no low-precision base hold them.

    ranks: the others, if `mapped` is one rank's part. Everything else (embeddings, norms) is copied from the engine. Raises FileNotFoundError if the model's folder has no
    safetensors, UnsupportedKernel if a weight is stored in less than 16 bits there.
    """
    files = _weight_files(Path(mapped.manifest.model_path))
    operands: dict[str, Operand] = {}
    for entry in mapped.manifest.entries:
        operand = mapped.operands[entry.name]
        if entry.slices and operand.scales is not None:
            weight = torch.cat([_read(files, name, dtype, ranks) for name in _checkpoint_names(entry)])
            if weight.shape != operand.values.shape:
                raise ValueError(
                    f"{entry.name}: the checkpoint has {tuple(weight.shape)}, the engine {tuple(operand.values.shape)}"
                )
            operand = Operand(weight, _format(dtype), ScaleAxis.NONE)
        operands[entry.name] = operand
    return OwnBase(mapped.manifest, operands, device, offloaded=offloaded)


def _format(dtype: torch.dtype) -> Format:
    return format_of_torch_dtype(str(dtype).removeprefix("torch."))


def _checkpoint_names(entry: WeightEntry) -> list[str]:
    parent = entry.name.rpartition(".")[0]
    return [f"{parent}.{leaf}.weight" if parent else f"{leaf}.weight" for leaf, _ in entry.slices]


def _weight_files(folder: Path) -> dict[str, Path]:
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    if not files:
        raise FileNotFoundError(
            f"{folder} has no *.safetensors: a trainer with 16-bit weights of its own reads them from the checkpoint"
        )
    return files


def _read(files: Mapping[str, Path], name: str, dtype: torch.dtype, ranks: Ranks | None) -> torch.Tensor:
    if name not in files:
        raise KeyError(f"{name} is not in the checkpoint's safetensors")
    with safe_open(files[name], framework="pt") as file:
        weight = file.get_tensor(name)
    if weight.element_size() < 2:
        raise UnsupportedKernel(f"{name} is stored as {weight.dtype}: the checkpoint holds no 16-bit weights")
    if ranks is not None:
        weight = ranks.cut(name.removesuffix(".weight"), *weight.shape).of_weight(weight)
    return weight.to(dtype)
