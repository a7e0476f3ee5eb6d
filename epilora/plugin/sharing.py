"""One copy of the base: the engine's parameters moved into one file in shared memory that others map read-only.

Each tensor is copied once to a page-aligned offset, the engine's parameter is rebound to the mapping (a weight stays
the [K, N] view with strides (1, K) of its [N, K] bytes), and the mapping is protected: a stray write ends in a fault,
not in a silently different base. Trainers map the same file; the pages exist once in memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from epilora.errors import MemoryInfeasible
from epilora.quant.formats import Format, ScaleAxis, format_of_torch_dtype
from epilora.quant.manifest import Location, TensorEntry, Transport, WeightEntry

PAGE_BYTES = mmap.PAGESIZE
_SCALE = "weight_scale"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SharedTensor:
    """A tensor to share: `bytes_view` is its row-major form (a weight as [N, K]); `rows` of it are listed in the
    manifest.
    """

    bytes_view: torch.Tensor
    rows: int | None = None  # None: all


class SharedFile:
    """One file of shared memory that holds tensors, mapped read-only after it was filled. Keep it alive while they are
    used.
    """

    def __init__(self, path: str, tensors: Sequence[SharedTensor]) -> None:
        """Create `path` and copy the tensors into it.

        tensors: contiguous CPU tensors. Raises MemoryInfeasible if the file system cannot hold them, FileExistsError.
        """
        self.path = path
        self.offsets: list[int] = []
        size = 0
        for shared in tensors:
            self.offsets.append(size)
            size += -(-shared.bytes_view.nbytes // PAGE_BYTES) * PAGE_BYTES
        self.num_bytes = max(size, PAGE_BYTES)
        descriptor = _locked_file(path)
        self._lock: int | None = descriptor
        try:
            try:
                os.posix_fallocate(descriptor, 0, self.num_bytes)  # now, rather than a SIGBUS when a page is touched
            except OSError as err:
                space = os.statvfs(os.path.dirname(path) or ".")
                free = space.f_bavail * space.f_frsize
                raise MemoryInfeasible(
                    f"{path} needs {self.num_bytes} bytes for the base's weights, its file system has {free} free;"
                    f" enlarge it (docker: --shm-size) or choose another shm_dir"
                ) from err
            self._map = mmap.mmap(descriptor, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            self.unlink()
            raise
        self.views: list[torch.Tensor] = []
        try:
            for shared, offset in zip(tensors, self.offsets, strict=True):
                source = shared.bytes_view
                view = torch.frombuffer(self._map, dtype=source.dtype, count=source.numel(), offset=offset)
                view = view.view(source.shape)
                view.copy_(source)
                self.views.append(view)
            self._protect()
        except BaseException:
            self.unlink()
            raise

    def _protect(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(self.num_bytes), mmap.PROT_READ):
            error = ctypes.get_errno()
            raise OSError(error, f"mprotect of {self.path}: {os.strerror(error)}")

    def entry(self, index: int, rows: int | None = None) -> TensorEntry:
        """Manifest entry of tensor `index` (its first `rows` rows if given)."""
        view = self.views[index] if rows is None else self.views[index][:rows]
        return TensorEntry(
            shape=tuple(view.shape),
            stride=tuple(view.stride()),
            dtype=str(view.dtype).removeprefix("torch."),
            location=Location(Transport.SHM, self.path, self.offsets[index]),
        )

    def unlink(self) -> None:
        """Remove the file's name; the memory is freed when the last mapping goes. Repeated calls do nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if os.path.exists(self.path):
            os.unlink(self.path)


def weight_entries(
    stored: Mapping[str, TensorEntry], slices: Mapping[str, Sequence[tuple[str, int]]]
) -> tuple[WeightEntry, ...]:
    """Manifest entries of stored parameters: an FP8 weight and its `weight_scale` become one.

    stored: by the parameter's name. slices: by module, what is packed in its weight along N.
    """
    entries = []
    for name, values in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == _SCALE:
            continue
        fmt = format_of_torch_dtype(values.dtype)
        scales = stored.get(f"{module}.{_SCALE}") if fmt is Format.FP8_E4M3 else None
        axis = ScaleAxis.NONE
        if scales is not None:
            axis = ScaleAxis.CHANNEL if max((1, *scales.shape)) > 1 else ScaleAxis.TENSOR
        is_weight = leaf == "weight"
        entries.append(
            WeightEntry(
                name=module if is_weight else name,
                format=fmt,
                axis=axis,
                values=values,
                scales=scales,
                slices=tuple(slices.get(module, ())) if is_weight else (),
            )
        )
    return tuple(entries)


def _locked_file(path: str) -> int:
    """Descriptor of a new file that is locked before it has its name; the lock is held while this process lives.

    Renamed, not linked anew: the kernel then lists this process's mappings under `path` (epilora/memory.py counts those).
    Raises FileExistsError.
    """
    unnamed = f"{path}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists; a base's file has a name of its own")
        os.rename(unnamed, path)
    except BaseException:
        os.unlink(unnamed)
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(folder: str, prefix: str) -> list[str]:
    """Remove files `prefix*` whose engine was killed before it could (nobody holds their lock); their paths."""
    removed = []
    for path in sorted(pathlib.Path(folder).glob(f"{prefix}*.weights")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # its engine ended just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            path.unlink(missing_ok=True)
            removed.append(str(path))
        finally:
            os.close(descriptor)
    return removed


def drop_pages(tensor: torch.Tensor, keep_fraction: float = 0.0) -> int:
    """Give a CPU tensor's whole pages past its first `keep_fraction` back to the operating system; returns their bytes.

    The values there become zero. For private anonymous memory only (what torch allocates), never for a shared mapping.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr() + int(storage.nbytes() * keep_fraction)
    first = -(-start // PAGE_BYTES) * PAGE_BYTES
    last = (storage.data_ptr() + storage.nbytes()) // PAGE_BYTES * PAGE_BYTES
    if last <= first:
        return 0
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise: {os.strerror(error)}")
    return last - first
