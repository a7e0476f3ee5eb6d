"""Map an engine's exported weights and read them as typed operands.

The file of a shared-memory manifest is mapped once with PROT_READ and MAP_SHARED; every tensor is a view of that
mapping, so the base exists once however many trainers attach, and a stray write ends in a fault. A GPU's weights are
mapped through their CUDA IPC handles, found by the GPU's UUID; such a mapping is writable, the digest tells.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence

import torch

from epilora.adapters.digest import weights_digest
from epilora.errors import BaseMismatch, EngineDead, UnsupportedKernel
from epilora.quant.cuda_ipc import map_tensor
from epilora.quant.manifest import TensorEntry, Transport, WeightEntry, WeightManifest
from epilora.quant.operand import Operand

# Parameters that are listed under their full name; every other entry is the `weight` of the module it names.
_NAMED_LEAVES = ("bias", "input_scale", "A_log", "dt_bias")


def parameter_name(entry: WeightEntry) -> str:
    """The engine's parameter name of an entry's values: the entry's name, plus `.weight` unless it names another
    leaf.
    """
    return entry.name if entry.name.rsplit(".", 1)[-1] in _NAMED_LEAVES else f"{entry.name}.weight"


def base_digest(manifest: WeightManifest, operands: Mapping[str, Operand]) -> str:
    """sha256 over names, stored values and scales, as the engine that exported `manifest` computes it."""
    named = []
    for entry in manifest.entries:
        operand, name = operands[entry.name], parameter_name(entry)
        named.append((name, operand.values))
        if operand.scales is not None:
            named.append((f"{name.removesuffix('.weight')}.weight_scale", operand.scales))
        if operand.global_scale is not None:
            named.append((f"{name.removesuffix('.weight')}.weight_global_scale", operand.global_scale))
    return weights_digest(named)


class MappedBase:
    """The base model of one manifest, mapped. Keep it alive while views of it are used.

    manifest: what was attached. operands: entry name -> operand over the mapping.
    """

    def __init__(self, manifest: WeightManifest, *, verify: bool = True) -> None:
        """Map the manifest's tensors.

        Raises FileNotFoundError (shared memory) or EngineDead (GPU) if the engine is gone, ValueError if its GPU is not
        visible here, BaseMismatch (if `verify`) when the bytes do not have the manifest's digest.
        """
        self.manifest = manifest
        self._maps: dict[str, mmap.mmap] = {}
        self.operands: dict[str, Operand] = {}
        for entry in manifest.entries:
            self.operands[entry.name] = Operand(
                values=self._view(entry.values),
                format=entry.format,
                axis=entry.axis,
                scales=None if entry.scales is None else self._view(entry.scales),
                block=entry.block,
                global_scale=None if entry.global_scale is None else self._view(entry.global_scale),
            )
        if verify:
            found = self.digest()
            if found != manifest.base_digest:
                raise BaseMismatch(
                    f"engine {manifest.engine!r}: mapped bytes have digest {found[:16]}, its manifest says "
                    f"{manifest.base_digest[:16]}; export the weights again"
                )

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        if entry.location.transport is Transport.CUDA_IPC:
            try:
                return map_tensor(entry)
            except RuntimeError as err:
                raise EngineDead(
                    f"engine {self.manifest.engine!r}: its weights cannot be mapped: {err}; handles die with the engine that"
                    " made them: export the weights again from a running one"
                ) from err
        path = entry.location.path
        if path not in self._maps:
            if not os.path.exists(path):
                raise FileNotFoundError(
                    f"exported weights {path} are gone: is the engine still up? Export the weights again"
                )
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._maps[path] = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(descriptor)
        if 0 in entry.shape:  # a rank of a small vocabulary may have no rows of it
            return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        span = 1 + sum((extent - 1) * step for extent, step in zip(entry.shape, entry.stride, strict=True))
        with warnings.catch_warnings():
            # torch warns that it cannot mark the tensor read-only; the mapping itself refuses writes.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(
                self._maps[path], dtype=getattr(torch, entry.dtype), count=span, offset=entry.location.offset_bytes
            )
        return flat.as_strided(entry.shape, entry.stride)

    def digest(self) -> str:
        """sha256 of the mapped bytes now; equals the manifest's base_digest unless something wrote to them."""
        return base_digest(self.manifest, self.operands)

    def loaded(self) -> contextlib.AbstractContextManager[None]:
        """A mapped base is always there."""
        return contextlib.nullcontext()

    def wait_for_layer(self, index: int) -> None:
        """Nothing to wait for."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The mapped files."""
        return tuple(self._maps)


def attach_single(manifests: Sequence[WeightManifest]) -> MappedBase:
    """The base of the only manifest. Raises UnsupportedKernel for none or several ranks."""
    if len(manifests) != 1 or manifests[0].tp_size != 1:
        ranks = [f"{m.engine} rank {m.tp_rank}/{m.tp_size}" for m in manifests]
        raise UnsupportedKernel(
            f"this trainer attaches to one whole base, got {ranks}; give it as many ranks (trainer.sharded), or start the "
            "engine with tensor parallel size 1"
        )
    return MappedBase(manifests[0])
