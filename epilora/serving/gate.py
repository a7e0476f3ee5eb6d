"""The router's gate: a bounded number of requests at the engines, tenants taking turns by virtual token counters.

Below the bound nobody waits. Plain class; one event loop owns a gate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from epilora.fairness.counters import TokenCounters


@dataclass
class Turn:
    """One request's place. `finish` once, with what it really cost."""

    gate: FairGate
    client: str
    estimate: float
    open: bool = True

    def finish(self, cost: float) -> None:
        """Give the place back and correct the charge. Later calls do nothing."""
        if self.open:
            self.open = False
            self.gate._finish(self, cost)


@dataclass
class _Waiting:
    future: asyncio.Future[None]
    estimate: float


@dataclass
class FairGate:
    """At most `places` requests at a time, by virtual token counters. queue_limit: waiting requests per client."""

    places: int
    queue_limit: int = 1024
    counters: TokenCounters = field(default_factory=TokenCounters)
    running: int = 0
    _queues: dict[str, deque[_Waiting]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.places < 1:
            raise ValueError(f"fairness: places={self.places}; at least 1 is needed")

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def waiting_of(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    async def enter(self, client: str, estimate: float, weight: float = 1.0) -> Turn:
        """Wait for a place. Raises asyncio.QueueFull if the client has `queue_limit` requests waiting already."""
        if self.waiting_of(client) >= self.queue_limit:
            raise asyncio.QueueFull(f"{client} has {self.queue_limit} requests waiting already")
        self.counters.arrive(client, weight)
        if self.running < self.places and not self._queues:
            self.running += 1
            self.counters.charge(client, estimate)
            return Turn(self, client, estimate)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), estimate)
        self._queues.setdefault(client, deque()).append(waiting)
        try:
            await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled():
                self._finish(Turn(self, client, estimate), 0.0)  # the place came while we were being cancelled
            else:
                self._drop(client, waiting)
                self.counters.leave(client)
            raise
        return Turn(self, client, estimate)

    def _drop(self, client: str, waiting: _Waiting) -> None:
        queue = self._queues[client]
        queue.remove(waiting)
        if not queue:
            del self._queues[client]

    def _finish(self, turn: Turn, cost: float) -> None:
        self.counters.charge(turn.client, cost - turn.estimate)
        self.running -= 1
        self.counters.leave(turn.client)
        self._next()

    def _next(self) -> None:
        while self.running < self.places and self._queues:
            client = self.counters.smallest(list(self._queues))
            waiting = self._queues[client].popleft()
            if not self._queues[client]:
                del self._queues[client]
            if waiting.future.done():
                continue  # cancelled; its owner cleans up
            self.running += 1
            self.counters.charge(client, waiting.estimate)
            waiting.future.set_result(None)
