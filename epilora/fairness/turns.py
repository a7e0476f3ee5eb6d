"""A bounded number of places, handed out to clients in turn by virtual token counters. Plain class, one owner.

Below the bound nobody waits. `entries` are whatever the owner keeps of a request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .counters import TokenCounters

T = TypeVar("T")


@dataclass
class TurnQueue(Generic[T]):
    """places: how many may run at a time, above 0. Raises ValueError for others, and for weights that are not above 0."""

    places: int
    counters: TokenCounters = field(default_factory=TokenCounters)
    running: int = 0
    _queues: dict[str, deque[tuple[T, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.places < 1:
            raise ValueError(f"fairness: places={self.places}; at least 1 is needed")

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def waiting_of(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    def enter(self, client: str, entry: T, estimate: float, weight: float = 1.0) -> bool:
        """Take a place (True), charged with `estimate`, or wait until some `leave` hands one out."""
        self.counters.arrive(client, weight)
        if self.running < self.places and not self._queues:
            self.running += 1
            self.counters.charge(client, estimate)
            return True
        self._queues.setdefault(client, deque()).append((entry, estimate))
        return False

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
        self.counters.leave(client)
        entered = []
        while self.running < self.places and self._queues:
            chosen = self.counters.smallest(list(self._queues))
            entry, estimate = self._queues[chosen].popleft()
            if not self._queues[chosen]:
                del self._queues[chosen]
            self.running += 1
            self.counters.charge(chosen, estimate)
            entered.append(entry)
        return entered
