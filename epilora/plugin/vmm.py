"""Physical GPU memory under fixed addresses: chunks of a reserved range are given back to the device and fetched again.

    reserve [address, address + size)        done by vLLM's CuMem allocator, kept for ever
    chunk i -> cuMemCreate, cuMemMap         `ChunkedRange.restore`
    chunk i -> cuMemUnmap, cuMemRelease      `ChunkedRange.release`

What lies in a released chunk is lost; addresses stay, so CUDA graphs that hold them stay valid. Source: CUDA driver API,
virtual memory management.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Protocol

import torch

CHUNK_BYTES = 64 << 20


class Memory(Protocol):
    """The driver's part: physical allocations and mappings on one device."""

    def granularity(self) -> int: ...

    def create(self, num_bytes: int) -> int: ...

    def map(self, address: int, num_bytes: int, handle: int) -> None: ...

    def allow(self, address: int, num_bytes: int) -> None: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def free(self, handle: int) -> None: ...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


class CudaMemory:
    """`Memory` by libcuda. Raises RuntimeError with CUDA's name of the error and what was asked."""

    def __init__(self, device: int) -> None:
        torch.cuda.current_stream(device)  # the primary context must exist
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._location = _Location(_ON_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=self._location)

    def _call(self, name: str, what: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            free, total = torch.cuda.mem_get_info(self._device)
            raise RuntimeError(
                f"{name} ({what}) on GPU {self._device}: {(text.value or b'?').decode()}; {free} of {total} bytes are free"
            )

    def granularity(self) -> int:
        found = ctypes.c_size_t()
        arguments = (ctypes.byref(found), ctypes.byref(self._properties), ctypes.c_int(_MINIMUM))
        self._call("cuMemGetAllocationGranularity", "minimum", *arguments)
        return found.value

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        arguments = (
            ctypes.byref(handle),
            ctypes.c_size_t(num_bytes),
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        self._call("cuMemCreate", f"{num_bytes} bytes", *arguments)
        return handle.value

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        arguments = (ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0))
        self._call("cuMemMap", f"{num_bytes} bytes", *arguments, ctypes.c_uint64(handle), ctypes.c_uint64(0))

    def allow(self, address: int, num_bytes: int) -> None:
        access = _Access(self._location, _READ_WRITE)
        arguments = (ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemSetAccess", f"{num_bytes} bytes", *arguments)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", f"{num_bytes} bytes", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def free(self, handle: int) -> None:
        self._call("cuMemRelease", "one handle", ctypes.c_uint64(handle))


@dataclass
class ChunkedRange:
    """A reserved address range in chunks; `handles[i]` is chunk i's physical memory, None while it has none.

    num_bytes and chunk_bytes: multiples of the memory's granularity.
    """

    memory: Memory
    address: int
    num_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    handles: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        step = self.memory.granularity()
        if self.chunk_bytes % step or self.num_bytes % step or self.address % step:
            raise ValueError(
                f"ChunkedRange: address {self.address:#x}, {self.num_bytes} bytes in chunks of {self.chunk_bytes};"
                f" all must be multiples of {step}"
            )
        self.handles = [None] * -(-self.num_bytes // self.chunk_bytes)

    def _size(self, index: int) -> int:
        return min(self.chunk_bytes, self.num_bytes - index * self.chunk_bytes)

    def restore(self) -> int:
        """Give every chunk memory; bytes that were fetched. If the device has too little, nothing changes."""
        missing = [index for index, handle in enumerate(self.handles) if handle is None]
        fetched: list[int] = []
        try:
            for index in missing:
                fetched.append(self.memory.create(self._size(index)))
        except RuntimeError:
            for handle in fetched:
                self.memory.free(handle)
            raise
        for index, handle in zip(missing, fetched, strict=True):
            self.memory.map(self.address + index * self.chunk_bytes, self._size(index), handle)
            self.handles[index] = handle
        for first, last in _runs(missing):
            start, end = first * self.chunk_bytes, min(self.num_bytes, (last + 1) * self.chunk_bytes)
            self.memory.allow(self.address + start, end - start)
        return sum(self._size(index) for index in missing)

    def release(self, keep_bytes: int = 0) -> int:
        """Give back every chunk that begins at or past `keep_bytes`; bytes that went. The device must be idle."""
        gone = 0
        for index, handle in enumerate(self.handles):
            if handle is None or index * self.chunk_bytes < keep_bytes:
                continue
            self.memory.unmap(self.address + index * self.chunk_bytes, self._size(index))
            self.memory.free(handle)
            self.handles[index] = None
            gone += self._size(index)
        return gone


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers in a sorted list."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
