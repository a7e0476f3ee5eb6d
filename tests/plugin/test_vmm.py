"""Chunked memory under fixed addresses, against a driver that refuses what CUDA would refuse."""

import ctypes
import mmap

import pytest
import torch

from epilora.errors import UnsupportedKernel
from epilora.plugin.kv_memory import Allocation, KvMemory
from epilora.plugin.vmm import ChunkedRange

STEP = 2 << 20


class FakeDriver:
    """A device of `limit` bytes. Mappings may not overlap, only whole mappings are unmapped, access needs mappings."""

    def __init__(self, limit=64 * STEP):
        self.limit = limit
        self.physical: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.allowed: set[int] = set()
        self.calls: list[str] = []
        self._next = 0

    def granularity(self):
        return STEP

    def create(self, num_bytes):
        assert num_bytes % STEP == 0
        if sum(self.physical.values()) + num_bytes > self.limit:
            raise RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self._next += 1
        self.physical[self._next] = num_bytes
        return self._next

    def map(self, address, num_bytes, handle):
        assert self.physical[handle] == num_bytes
        assert all(address + num_bytes <= a or a + n <= address for a, (n, _) in self.mapped.items())
        self.mapped[address] = (num_bytes, handle)

    def allow(self, address, num_bytes):
        self.calls.append("allow")
        inside = [a for a in self.mapped if address <= a < address + num_bytes]
        assert sum(self.mapped[a][0] for a in inside) == num_bytes
        self.allowed |= set(inside)

    def unmap(self, address, num_bytes):
        assert self.mapped[address][0] == num_bytes
        del self.mapped[address]
        self.allowed.discard(address)

    def free(self, handle):
        assert handle not in [h for _, h in self.mapped.values()]
        del self.physical[handle]

    @property
    def used(self):
        return sum(self.physical.values())


def test_a_range_comes_and_goes_in_chunks():
    driver = FakeDriver()
    chunked = ChunkedRange(driver, address=STEP * 100, num_bytes=10 * STEP, chunk_bytes=4 * STEP)
    assert chunked.restore() == 10 * STEP
    assert {a // STEP: n // STEP for a, (n, _) in driver.mapped.items()} == {100: 4, 104: 4, 108: 2}
    assert driver.allowed == set(driver.mapped)
    assert driver.calls == ["allow"]  # one call for a run of chunks
    assert chunked.release(keep_bytes=4 * STEP + 1) == 2 * STEP  # the second chunk begins before what is kept
    assert driver.used == 8 * STEP
    assert chunked.release(keep_bytes=4 * STEP) == 4 * STEP
    kept = driver.mapped[STEP * 100]
    assert chunked.restore() == 6 * STEP
    assert driver.mapped[STEP * 100] == kept  # what stayed was never touched
    assert chunked.release() == 10 * STEP
    assert (driver.used, driver.mapped, driver.physical) == (0, {}, {})


def test_too_little_memory_changes_nothing():
    driver = FakeDriver(limit=9 * STEP)
    chunked = ChunkedRange(driver, address=0, num_bytes=10 * STEP, chunk_bytes=4 * STEP)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        chunked.restore()
    assert (driver.used, driver.mapped, chunked.handles) == (0, {}, [None, None, None])
    driver.limit = 10 * STEP
    assert chunked.restore() == 10 * STEP


def test_sizes_that_cannot_be_mapped_are_refused():
    with pytest.raises(ValueError, match="multiples of 2097152"):
        ChunkedRange(FakeDriver(), address=0, num_bytes=STEP + 1)


BLOCKS, PAGE = 16, STEP


def aligned_bytes(num_bytes):
    """A tensor whose memory begins at a multiple of STEP, as a CUDA allocation does."""
    region = mmap.mmap(-1, num_bytes + STEP)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % STEP
    return torch.frombuffer(region, dtype=torch.int8, count=num_bytes, offset=offset)


def caches(shape=(BLOCKS, PAGE // 4)):
    """Two layers' KV tensors, the pool's allocations that hold them, and a log of what became of their own memory."""
    log = []

    def allocation(raw, layer):
        return Allocation(
            raw.data_ptr(), raw.nbytes, lambda: log.append(("detach", layer)), lambda: log.append(("attach", layer))
        )

    raws = [aligned_bytes(BLOCKS * PAGE) for _ in range(2)]
    made = [allocation(raw, layer) for layer, raw in enumerate(raws)]
    return [raw.view(torch.float32).view(shape) for raw in raws], made, log


def test_a_share_of_the_blocks_stays():
    tensors, allocations, log = caches()
    driver = FakeDriver()
    memory = KvMemory([tensors[0], [tensors[1]]], BLOCKS, allocations, driver, chunk_bytes=4 * STEP)
    assert log == [("detach", 0), ("detach", 1)]
    assert memory.mapped_bytes == driver.used == 2 * BLOCKS * PAGE
    gone = memory.release(kept_blocks=5)  # two chunks of 4 pages hold the first 5 blocks
    assert (gone, memory.mapped_bytes) == (2 * 8 * STEP, 2 * 8 * STEP)
    assert memory.restore() == gone
    assert memory.release(0) == 2 * BLOCKS * PAGE
    assert driver.used == 0
    memory.restore()
    memory.give_back()
    assert driver.physical == {}
    assert log[2:] == [("attach", 0), ("attach", 1)]


def test_a_block_that_kernels_cut_in_two_is_still_one():
    tensors, allocations, _ = caches(shape=(2 * BLOCKS, PAGE // 8))
    memory = KvMemory(tensors, BLOCKS, allocations, FakeDriver(), chunk_bytes=STEP)
    assert memory.release(kept_blocks=5) == 2 * 11 * PAGE


def test_what_is_not_block_major_keeps_no_share():
    tensors, allocations, _ = caches(shape=(2, BLOCKS, PAGE // 8))
    memory = KvMemory(tensors, BLOCKS, allocations, FakeDriver(), chunk_bytes=4 * STEP)
    with pytest.raises(UnsupportedKernel, match=r"shape \(2, 16, 262144\).*keep_fraction=0"):
        memory.release(kept_blocks=5)
    assert memory.release(0) == 2 * BLOCKS * PAGE


def test_a_tensor_in_a_shared_segment_is_left_alone():
    tensors, allocations, log = caches()
    with pytest.raises(UnsupportedKernel, match="no allocation of its own"):
        KvMemory([tensors[0]], BLOCKS, allocations[1:], FakeDriver())
    assert log == []


@pytest.mark.vllm
def test_only_the_cache_is_in_the_pool(monkeypatch, caplog):
    import contextlib

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    from epilora.plugin.kv_memory import keep_weights_plain, pool_argument

    assert pool_argument(EngineArgs) == "enable_cumem_allocator"

    def stock(self, tag):
        return f"pool {tag}"

    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", stock)
    keep_weights_plain()
    keep_weights_plain()
    patched = Worker._maybe_get_memory_pool_context
    assert patched(None, tag="kv_cache") == "pool kv_cache"
    assert patched.__wrapped__ is stock
    for tag in ("weights", "runtime", "cudagraph"):
        assert isinstance(patched(None, tag=tag), contextlib.nullcontext)
    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", lambda self: None)
    keep_weights_plain()
    assert "weights cannot be exported" in caplog.text
