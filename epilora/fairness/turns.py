"""A bounded number of places, handed out to clients in turn by virtual token counters. Plain class, one owner.

Below the bound nobody waits. Above it, `spare` places are there for clients that have fewer running than their share
(places * weight / the active clients' weights), so that one which asks little does not wait until requests of one which asks
much have ended. `entries` are whatever the owner keeps of a request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .counters import TokenCounters

T = TypeVar("T")


@dataclass
class TurnQueue(Generic[T]):
    """places: how many may run at a time, above 0. spare: how many more of clients below their share.

    Raises ValueError for other numbers, and for weights that are not above 0.
    """

    places: int
    spare: int = 0
    counters: TokenCounters = field(default_factory=TokenCounters)
    running: int = 0
    _queues: dict[str, deque[tuple[T, float]]] = field(default_factory=dict)
    _running_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.places < 1:
            raise ValueError(f"fairness: places={self.places}; at least 1 is needed")
        if self.spare < 0:
            raise ValueError(f"fairness: spare={self.spare}; 0 (none) or more are allowed")

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def waiting_of(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    def enter(self, client: str, entry: T, estimate: float, weight: float = 1.0) -> bool:
        """Take a place (True), charged with `estimate`, or wait until some `leave` hands one out."""
        self.counters.arrive(client, weight)
        if client not in self._queues and self._may_enter(client, not self._queues):
            self._enter(client, estimate)
            return True
        self._queues.setdefault(client, deque()).append((entry, estimate))
        return False

    def _may_enter(self, client: str, first: bool) -> bool:
        """first: is it this client's turn for one of the ordinary places?"""
        if self.running < self.places:
            return first
        if self.running >= self.places + self.spare:
            return False
        return self._running_of.get(client, 0) < self.places * self.counters.share(client)

    def _enter(self, client: str, estimate: float) -> None:
        self.running += 1
        self._running_of[client] = self._running_of.get(client, 0) + 1
        self.counters.charge(client, estimate)

    def give_up(self, client: str, entry: T) -> None:
        """An entry that waits does so no longer."""
        queue = self._queues[client]
        kept = deque(item for item in queue if item[0] is not entry)
        if kept:
            self._queues[client] = kept
        else:
            del self._queues[client]
        self.counters.leave(client)

    def leave(self, client: str, correction: float) -> list[T]:
        """Give a place back and correct the charge by what the request cost more (less: below 0) than its estimate.

        Returns the entries whose turn it is now.
        """
        self.counters.charge(client, correction)
        self.running -= 1
        self._running_of[client] -= 1
        if not self._running_of[client]:
            del self._running_of[client]
        self.counters.leave(client)
        entered = []
        while waiting := [name for name in self._queues if self._may_enter(name, True)]:
            chosen = self.counters.smallest(waiting)
            entry, estimate = self._queues[chosen].popleft()
            if not self._queues[chosen]:
                del self._queues[chosen]
            self._enter(chosen, estimate)
            entered.append(entry)
        return entered
