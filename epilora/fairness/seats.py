"""Rollouts queueing for seats in an engine's batch: jobs take turns by virtual token counters, within promises.

One thread owns a queue. `entries` are whatever the engine keeps of a request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from .counters import TokenCounters
from .promise import PromiseKeeper

T = TypeVar("T")


@dataclass
class _Charge:
    client: str
    cost: float


class SeatQueue(Generic[T]):
    """keeper: how many may enter. Without other jobs and promises it is first in, first out."""

    def __init__(self, keeper: PromiseKeeper) -> None:
        self.keeper = keeper
        self._queues: dict[str, deque[tuple[str, T, float]]] = {}
        self._counters = TokenCounters()
        self._charged: dict[str, _Charge] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def push(self, key: str, entry: T, *, client: str, weight: float, cost: float) -> None:
        """Queue one rollout. key: unique; client: the job; cost: estimate in virtual tokens.

        Raises ValueError for a weight that is not above 0.
        """
        self._counters.arrive(client, weight)
        self._queues.setdefault(client, deque()).append((key, entry, cost))
        self._charged[key] = _Charge(client, 0.0)

    def take(self, seated: int) -> list[T]:
        """Entries that enter the batch now, in order. seated: rollouts that are in it."""
        taken = []
        room = self.keeper.room(seated) if self._queues else 0
        while room and self._queues:
            client = self._counters.smallest(list(self._queues))
            key, entry, cost = self._queues[client].popleft()
            if not self._queues[client]:
                del self._queues[client]
            self._counters.charge(client, cost)
            self._charged[key].cost = cost
            taken.append(entry)
            room -= 1
        return taken

    def finished(self, key: str, cost: float) -> None:
        """A rollout ended; cost: what it really was. Unknown keys (tenants' requests) are fine."""
        charge = self._charged.pop(key, None)
        if charge is not None:
            self._counters.charge(charge.client, cost - charge.cost)
            self._counters.leave(charge.client)

    def remove(self, key: str) -> None:
        """Take one out that has not entered. `finished` follows."""
        client = self._charged[key].client
        queue = self._queues[client]
        kept = deque(item for item in queue if item[0] != key)
        if kept:
            self._queues[client] = kept
        else:
            del self._queues[client]

    def clear(self) -> None:
        """Forget everything (the engine died)."""
        self._queues.clear()
        self._charged.clear()
