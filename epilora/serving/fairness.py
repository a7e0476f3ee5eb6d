"""Who goes next when the engines are full: virtual token counters over tenants and RL jobs.

    counter[c] += (INPUT_WEIGHT * prompt tokens + OUTPUT_WEIGHT * completion tokens) / weight[c]

The waiting client with the smallest counter goes next, first come first served within a client. A client that comes
back after having had nothing waiting or running starts at the smallest counter among the active ones, so idleness
earns no credit (Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588, section 4: VTC). An
admitted request is charged an estimate at once and the difference when it has finished.

`FairGate` gives out a bounded number of places in that order; below the bound nobody waits. Plain classes; one event
loop owns a gate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def service(prompt_tokens: float, completion_tokens: float) -> float:
    """Cost of a request in virtual tokens: an output token counts for two, as it takes an engine step of its own."""
    return INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * completion_tokens


@dataclass
class _Client:
    counter: float = 0.0
    weight: float = 1.0
    active: int = 0  # waiting and running requests


class TokenCounters:
    """The counters alone. Raises ValueError for weights that are not above 0."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._floor = 0.0

    def arrive(self, client: str, weight: float = 1.0) -> None:
        """A request of this client came in."""
        if weight <= 0:
            raise ValueError(f"fairness: weight of {client} is {weight}; it must be above 0")
        entry = self._clients.setdefault(client, _Client())
        entry.weight = weight
        if entry.active == 0:
            active = [other.counter for other in self._clients.values() if other.active]
            self._floor = min(active) if active else self._floor
            entry.counter = max(entry.counter, self._floor)
        entry.active += 1

    def charge(self, client: str, cost: float) -> None:
        """Add served tokens (negative: give an estimate back)."""
        entry = self._clients[client]
        entry.counter += cost / entry.weight
        self._floor = max(self._floor, min((c.counter for c in self._clients.values() if c.active), default=0.0))

    def leave(self, client: str) -> None:
        """A request of this client has ended, or gave up waiting."""
        entry = self._clients[client]
        entry.active -= 1
        if entry.active == 0:
            # Clients are few, but names come from configuration that may change: forget those that owe nothing.
            idle = [name for name, c in self._clients.items() if not c.active and c.counter <= self._floor]
            for name in idle:
                del self._clients[name]

    def counter(self, client: str) -> float:
        """Virtual tokens charged so far, 0 for a client never seen or forgotten."""
        entry = self._clients.get(client)
        return entry.counter if entry else 0.0

    def smallest(self, clients: list[str]) -> str:
        """The client that goes next. clients: those that wait, in order of arrival (which breaks ties)."""
        return min(clients, key=lambda client: self._clients[client].counter)


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


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 when all shares are equal, 1/n when one client has everything."""
    total = sum(shares)
    return total * total / (len(shares) * sum(share * share for share in shares)) if total else 1.0
