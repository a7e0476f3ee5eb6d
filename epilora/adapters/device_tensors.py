"""An adapter's tensors in a GPU's memory, handed to another process as handles: nothing is copied until a slot is filled.

    trainer:  shared = share(tensors)          once; the tensors are updated in place by every optimizer step
              torch.cuda.synchronize()         before each hand-over: the receiver does not wait for the trainer's stream
    engine:   Mapper().all(shared)             views of the same memory; opened once and kept while the same are handed over

The sender keeps the tensors alive and unchanged until the receiver has answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epilora.quant.cuda_ipc import export_tensor, map_tensor
from epilora.quant.manifest import TensorEntry


@dataclass(frozen=True)
class DeviceTensors:
    """Names and handles. owner: who hands them over; a later hand-over of the same owner replaces an earlier one."""

    owner: str
    entries: tuple[tuple[str, TensorEntry], ...]


# Of one trainer, or the same whole adapter on the GPU of each of its ranks, in their order.
HandedOver = DeviceTensors | tuple[DeviceTensors, ...]


def share(owner: str, tensors: Mapping[str, torch.Tensor]) -> DeviceTensors:
    """Handles of CUDA tensors under their names. Raises RuntimeError for memory that cannot be shared."""
    return DeviceTensors(owner, tuple((name, export_tensor(tensor)) for name, tensor in tensors.items()))


class Mapper:
    """Views of what owners handed over; each owner's last hand-over stays open, since opening costs milliseconds."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[DeviceTensors, dict[str, torch.Tensor]]] = {}

    def all(self, given: DeviceTensors) -> dict[str, torch.Tensor]:
        """Views by name. Raises ValueError, RuntimeError (see `cuda_ipc.map_tensor`)."""
        held = self._open.get(given.owner)
        if held is not None and held[0] == given:
            return held[1]
        self._open.pop(given.owner, None)
        views = {name: map_tensor(entry) for name, entry in given.entries}
        self._open[given.owner] = (given, views)
        return views

    def forget(self, owner: str) -> None:
        """Close an owner's views; unknown owners are fine."""
        self._open.pop(owner, None)
