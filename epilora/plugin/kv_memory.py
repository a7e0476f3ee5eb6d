"""A worker's KV cache as memory that can be given away and comes back at the same addresses.

vLLM's CuMem allocator reserves the addresses (`enable_cumem_allocator`). We take its physical memory over once, in
chunks, so that a share can stay mapped: blocks 0 .. kept-1 are the first bytes of every layer's tensor. Only allocations
that hold nothing but one KV tensor are touched; block tables and the like keep their memory.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epilora.errors import UnsupportedKernel

from .vmm import CHUNK_BYTES, ChunkedRange, Memory

logger = logging.getLogger(__name__)

_SLACK_BYTES = 2 << 20  # the allocator rounds a tensor up to this


@dataclass(frozen=True)
class Allocation:
    """One allocation of the pool: address, bytes, and how its own memory is taken from it and given back."""

    address: int
    num_bytes: int
    detach: Callable[[], None]
    attach: Callable[[], None]


def flatten(kv_caches: Sequence[Any]) -> list[torch.Tensor]:
    """The runner's KV tensors in one list (recurrent layers hold several each)."""
    found: list[torch.Tensor] = []
    for cache in kv_caches:
        found += [cache] if isinstance(cache, torch.Tensor) else flatten(cache)
    return found


class KvMemory:
    """All KV tensors of one worker.

    num_blocks: blocks of the scheduler. Memory is released from the end of every tensor.
    """

    def __init__(
        self,
        kv_caches: Sequence[Any],
        num_blocks: int,
        allocations: Sequence[Allocation],
        memory: Memory,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Take the allocations' memory over; what lay in them is lost. The device must be idle.

        Raises UnsupportedKernel if a KV tensor has no allocation of its own.
        """
        self.num_blocks = num_blocks
        self._views = flatten(kv_caches)
        found: dict[int, Allocation] = {}
        for view in self._views:
            storage = view.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            own = next(
                (a for a in allocations if a.address == start and size <= a.num_bytes < size + _SLACK_BYTES), None
            )
            if own is None:
                raise UnsupportedKernel(
                    f"release_kv: a KV tensor of {size} bytes has no allocation of its own in the KV pool; start the engine"
                    " with the CuMem allocator and a KV cache of at least 10 MiB for each layer"
                )
            found[start] = own
        self._allocations = list(found.values())
        self.ranges: list[ChunkedRange] = []
        for own in self._allocations:
            own.detach()
            chunked = ChunkedRange(memory, own.address, own.num_bytes, min(chunk_bytes, own.num_bytes))
            chunked.restore()
            self.ranges.append(chunked)

    @property
    def mapped_bytes(self) -> int:
        return sum(r._size(i) for r in self.ranges for i, handle in enumerate(r.handles) if handle is not None)

    def release(self, kept_blocks: int) -> int:
        """Give back all memory but that of blocks 0 .. kept_blocks - 1; bytes that went. The device must be idle.

        Raises UnsupportedKernel if a share is to stay and a tensor does not hold its blocks one after another.
        """
        if kept_blocks:
            self._check_layout()
        gone = 0
        for chunked in self.ranges:
            gone += chunked.release(-(-chunked.num_bytes * kept_blocks // self.num_blocks) if kept_blocks else 0)
        return gone

    def restore(self) -> int:
        """Fetch what was released; bytes."""
        return sum(chunked.restore() for chunked in self.ranges)

    def give_back(self) -> None:
        """Hand the ranges back to vLLM's allocator, which frees them its own way."""
        for chunked, own in zip(self.ranges, self._allocations, strict=True):
            chunked.release()
            own.attach()
        self.ranges, self._allocations = [], []

    def _check_layout(self) -> None:
        for view in self._views:
            page = view.untyped_storage().nbytes() // self.num_blocks
            per_block = view.shape[0] // self.num_blocks  # kernels may cut a block into several
            if view.shape[0] % self.num_blocks or view.stride(0) * view.element_size() * per_block != page:
                raise UnsupportedKernel(
                    f"release_kv: a KV tensor of shape {tuple(view.shape)}, strides {view.stride()} does not hold its"
                    f" {self.num_blocks} blocks one after another, so no share of it can stay; use keep_fraction=0"
                )


def pool_allocations(tag: str = "kv_cache") -> list[Allocation]:
    """The CuMem allocator's allocations under `tag` that hold one tensor; none where that allocator is not in use."""
    from vllm.device_allocator import cumem

    if not cumem.cumem_available or cumem.CuMemAllocator.instance is None:
        return []
    tensors = {
        segment["address"]: sum(block["state"] == "active_allocated" for block in segment["blocks"])
        for segment in torch.cuda.memory_snapshot()
    }

    def allocation(data: Any) -> Allocation:
        handle = data.handle  # (device, bytes, address, physical memory)
        return Allocation(
            handle[2], handle[1], lambda: cumem.unmap_and_release(handle), lambda: cumem.create_and_map(handle)
        )

    pool = cumem.CuMemAllocator.instance.pointer_to_data
    return [allocation(data) for address, data in pool.items() if data.tag == tag and tensors.get(address, 1) == 1]


def pool_argument(engine_args: Any) -> str:
    """The argument of vLLM's EngineArgs that puts the KV cache into the CuMem pool."""
    known = inspect.signature(engine_args).parameters
    return "enable_cumem_allocator" if "enable_cumem_allocator" in known else "enable_sleep_mode"


def keep_weights_plain() -> None:
    """Leave all but the KV cache out of the CuMem pool: its memory cannot be exported. Idempotent.

    Where this vLLM's worker has no such choice, a warning says so, and `export_weights` will refuse.
    """
    from vllm.v1.worker.gpu_worker import Worker

    stock = getattr(Worker, "_maybe_get_memory_pool_context", None)
    if getattr(stock, "_epilora", False):
        return
    if stock is None or list(inspect.signature(stock).parameters) != ["self", "tag"]:
        logger.warning("EpiLoRA: Worker._maybe_get_memory_pool_context(tag) is missing: weights cannot be exported")
        return

    @functools.wraps(stock)
    def context(self: Any, tag: str) -> Any:
        return stock(self, tag) if tag == "kv_cache" else contextlib.nullcontext()

    context._epilora = True  # type: ignore[attr-defined]
    Worker._maybe_get_memory_pool_context = context  # type: ignore[method-assign]
