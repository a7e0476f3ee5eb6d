"""The weight manifest: what an engine exports so that a trainer can compute on the very same bytes.

One entry per stored tensor, with everything needed to map it: where the bytes are (`shm`: a file and an offset;
`cuda_ipc`: a handle), how they are laid out, and how to read them (format, axis, block). Plain data, picklable, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .formats import Format, ScaleAxis


class Transport(str, Enum):
    SHM = "shm"
    CUDA_IPC = "cuda_ipc"


@dataclass(frozen=True)
class Location:
    """Where one tensor's bytes are.

    transport shm: `path` is a file (page-aligned `offset_bytes`), mapped read-only.
    transport cuda_ipc: `handle` is what torch's reduce_tensor returned as arguments; `gpu_uuid` names the device.
    """

    transport: Transport
    path: str = ""
    offset_bytes: int = 0
    handle: tuple[Any, ...] = ()
    gpu_uuid: str = ""


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. `stride` is in elements; a weight of shape [N, K] is listed as [N, K] however the engine holds it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # torch dtype name, e.g. "float8_e4m3fn"
    location: Location


@dataclass(frozen=True)
class WeightEntry:
    """One parameter of the base model as the engine holds it.

    name: the engine's module path, e.g. `model.layers.0.self_attn.qkv_proj`.
    slices: names of the checkpoint's modules packed along N with their widths, e.g. (("q_proj", 96), ("k_proj", 32), ...);
        a single pair when nothing is packed; empty for tensors that are not a linear layer's (norms, embeddings).
    values, scales, global_scale: the stored tensors; scales is None for 16/32-bit formats.
    """

    name: str
    format: Format
    axis: ScaleAxis
    values: TensorEntry
    scales: TensorEntry | None = None
    global_scale: TensorEntry | None = None
    block: tuple[int, int] | None = None
    slices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class WeightManifest:
    """All base weights of one tensor-parallel rank of one engine.

    model_path: folder with config.json and tokenizer. base_digest: sha256 over names, codes and scales in sorted order.
    """

    engine: str
    model_path: str
    base_digest: str
    tp_rank: int
    tp_size: int
    entries: tuple[WeightEntry, ...] = field(default_factory=tuple)

    def entry(self, name: str) -> WeightEntry:
        """The entry called `name`. Raises KeyError naming the nearest ones."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        close = [e.name for e in self.entries if e.name.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][:3]
        raise KeyError(f"{name!r} is not among the {len(self.entries)} exported weights; similar: {close}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        sizes = {"float8_e4m3fn": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
        total = 0
        for entry in self.entries:
            for tensor in (entry.values, entry.scales, entry.global_scale):
                if tensor is not None:
                    count = 1
                    for extent in tensor.shape:
                        count *= extent
                    total += count * sizes[tensor.dtype]
        return total
