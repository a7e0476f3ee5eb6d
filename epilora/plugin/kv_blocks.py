"""The scheduler's half of a KV release: blocks whose memory is away are not handed out, rollouts wait meanwhile.

All requests are preempted first (they keep what they have generated and compute their keys and values anew), so that no
block is in use when memory goes. With nothing kept, nothing runs until `restore`. With a share kept, tenants' requests
go on in blocks 1 .. kept-1 and rollouts are parked outside the scheduler's queues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epilora.errors import MemoryInfeasible

from .step_thread import StepThread

EVERYTHING, ROLLOUTS = frozenset({"tenant", "rollout"}), frozenset({"rollout"})


class KvRelease:
    """Releases and restores the KV cache of one in-process engine. Runs in the step thread.

    workers: calls a worker method on every rank and returns their results.
    """

    def __init__(self, steps: StepThread, workers: Callable[..., list[Any]]) -> None:
        self._steps, self._workers = steps, workers
        self._scheduler = steps.engine.engine_core.engine_core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._kept: int | None = None  # blocks that still have memory; None: all
        self._parked: list[Any] = []

    @property
    def num_blocks(self) -> int:
        return len(self._pool.blocks)

    def kept_blocks(self, keep_fraction: float) -> int:
        """Blocks that stay for a fraction. Raises ValueError if it is no fraction or too few for one request."""
        if not 0.0 <= keep_fraction < 1.0:
            raise ValueError(f"release_kv: keep_fraction={keep_fraction}; allowed is 0 to below 1")
        if keep_fraction == 0.0:
            return 0
        kept = int(self.num_blocks * keep_fraction)
        configured = self._scheduler.vllm_config
        groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        longest = configured.model_config.max_model_len
        needed = 1 + groups * -(-longest // configured.cache_config.block_size)  # block 0 is never handed out
        if kept < needed:
            raise ValueError(
                f"release_kv: keep_fraction={keep_fraction} keeps {kept} of {self.num_blocks} blocks; one request of"
                f" {longest} tokens may need {needed}: keep at least {needed / self.num_blocks:.3f}, or 0"
            )
        return kept

    def release(self, keep_fraction: float = 0.0) -> int:
        """Give memory back on every rank; bytes of rank 0. Raises ValueError, UnsupportedKernel (nothing changes then)."""
        kept = self.kept_blocks(keep_fraction)
        if self._kept is not None:
            if kept == self._kept:
                return 0
            self.restore()
        self._steps.engine.reset_prefix_cache(reset_running_requests=True)
        self._restrict(kept)
        try:
            released = self._workers("epilora_release_kv", kept, self.num_blocks)
        except BaseException:
            self._lift()
            raise
        return released[0]

    def restore(self) -> None:
        """Fetch the memory and let everything run again. Raises MemoryInfeasible; call again when memory is free."""
        if self._kept is None:
            return
        try:
            self._workers("epilora_restore_kv")
        except RuntimeError as err:
            raise MemoryInfeasible(
                f"restore_kv: {err}; the KV cache stays released: let the trainer free memory (torch.cuda.empty_cache)"
                " and call restore_kv again"
            ) from err
        self._lift()

    def _restrict(self, kept: int) -> None:
        self._kept = kept
        if kept == 0:
            self._steps.hold(EVERYTHING)
            return
        for block in self._pool.blocks[kept:]:
            self._pool.free_block_queue.remove(block)
        self._pool.num_gpu_blocks = kept
        self._steps.hold(ROLLOUTS)
        ids = self._steps.held_ids()
        for waiting in self._queues():
            found = [request for request in waiting if request.request_id in ids]
            waiting.remove_requests(found)
            self._parked += found

    def _lift(self) -> None:
        if self._kept:
            self._pool.free_block_queue.append_n(self._pool.blocks[self._kept :])
            self._pool.num_gpu_blocks = self.num_blocks
        for request in reversed(self._parked):
            if request.request_id in self._scheduler.requests:  # not aborted meanwhile
                self._scheduler.waiting.prepend_request(request)
        self._parked, self._kept = [], None
        self._steps.hold(frozenset())

    def _queues(self) -> list[Any]:
        names = ("waiting", "skipped_waiting")
        return [getattr(self._scheduler, name) for name in names if hasattr(self._scheduler, name)]
