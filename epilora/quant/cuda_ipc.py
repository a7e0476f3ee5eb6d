"""GPU tensors for another process on the same machine: export as plain data, map as a view of the same bytes.

A handle names a cudaMalloc allocation of the exporting process and dies with it; both sides reach the GPU by its UUID,
since their device numbers may differ. Pooled virtual memory (vLLM's CuMem, expandable segments) cannot be exported. CUDA
cannot open a handle in the process that made it: there, the exported tensor itself comes back.

A mapping is writable; digests tell whether anybody wrote. Mechanism: torch.multiprocessing's CUDA reductions.
"""

from __future__ import annotations

import os
import uuid
import weakref
from typing import Any

import torch

from .manifest import Location, TensorEntry, Transport

_PROCESS = uuid.uuid4().hex  # this process among all, whatever its pid in its namespace
_PID = os.getpid()
# storage address -> the storage and what CUDA gave for it: a storage is exported once, however many views of it are
_exported: dict[int, tuple[weakref.ref[torch.UntypedStorage], tuple[Any, ...]]] = {}
_opened: dict[tuple[Any, ...], weakref.ref[torch.UntypedStorage]] = {}


def _process() -> str:
    """Token of this process; a fork is another process."""
    global _PROCESS, _PID
    if os.getpid() != _PID:
        _PROCESS, _PID = uuid.uuid4().hex, os.getpid()
        _exported.clear()
        _opened.clear()
    return _PROCESS


def gpu_uuid(device: torch.device) -> str:
    """UUID of a CUDA device, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of_uuid(wanted: str) -> torch.device:
    """This process's device with that UUID. Raises ValueError naming those it sees."""
    seen = [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if wanted not in seen:
        raise ValueError(
            f"the exported tensors lie on GPU {wanted}; this process sees {seen or 'no GPU'}: start it on the engine's GPU"
            " (same CUDA_VISIBLE_DEVICES, or one Ray bundle)"
        )
    return torch.device("cuda", seen.index(wanted))


def export_tensor(tensor: torch.Tensor) -> TensorEntry:
    """Manifest entry of a CUDA tensor; the caller keeps the tensor alive while others map it.

    Shape and strides stay as they are. Raises RuntimeError if the memory cannot be shared (not a cudaMalloc allocation).
    """
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    process, number = _process(), storage.data_ptr()
    reference, shared = _exported.get(number, (None, ()))
    if reference is None or reference() is not storage:
        try:
            _, *parts = storage._share_cuda_()
        except RuntimeError as err:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be exported: {err}; its memory must be"
                " a plain cudaMalloc allocation (no expandable_segments, no pooled allocator)"
            ) from err
        shared = tuple(parts)
        _exported[number] = (weakref.ref(storage), shared)
    return TensorEntry(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        location=Location(
            Transport.CUDA_IPC,
            offset_bytes=int(tensor.storage_offset()) * tensor.element_size(),
            handle=(process, number, *shared),
            gpu_uuid=gpu_uuid(tensor.device),
        ),
    )


def map_tensor(entry: TensorEntry) -> torch.Tensor:
    """A view of an exported tensor's bytes. Raises ValueError (no such GPU here), RuntimeError (the exporter is gone)."""
    location = entry.location
    process, number, *shared = location.handle
    if process == _process():
        known = _exported.get(number)
        storage = None if known is None else known[0]()
        if storage is None:
            raise RuntimeError(f"a tensor of shape {entry.shape} that this process exported was freed since")
    else:
        opened = _opened.get(location.handle)
        storage = None if opened is None else opened()
        if storage is None:
            device = device_of_uuid(location.gpu_uuid)
            torch.cuda.current_stream(device)  # the context must exist
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *shared)
            _opened[location.handle] = weakref.ref(storage)
    dtype = getattr(torch, entry.dtype)
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    flat.set_(storage, location.offset_bytes // flat.element_size(), entry.shape, entry.stride)
    return flat
