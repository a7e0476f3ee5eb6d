"""The router's gate: a bounded number of requests at the engines, tenants taking turns (epilora/fairness/turns.py).

Carries the queue's decisions to the coroutines that wait. One event loop owns a gate.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from epilora.fairness.counters import TokenCounters
from epilora.fairness.turns import TurnQueue


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


class FairGate:
    """At most `places` requests at a time, by virtual token counters, and `spare` more of clients below their share.

    queue_limit: waiting requests per client.
    """

    def __init__(self, places: int, queue_limit: int = 1024, spare: int = 0) -> None:
        self._turns: TurnQueue[asyncio.Future[None]] = TurnQueue(places, spare)
        self._queue_limit = queue_limit

    @property
    def counters(self) -> TokenCounters:
        return self._turns.counters

    @property
    def running(self) -> int:
        return self._turns.running

    @property
    def waiting(self) -> int:
        return self._turns.waiting

    def waiting_of(self, client: str) -> int:
        return self._turns.waiting_of(client)

    async def enter(self, client: str, estimate: float, weight: float = 1.0) -> Turn:
        """Wait for a place. Raises asyncio.QueueFull if the client has `queue_limit` requests waiting already."""
        if self.waiting_of(client) >= self._queue_limit:
            raise asyncio.QueueFull(f"{client} has {self._queue_limit} requests waiting already")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = Turn(self, client, estimate)
        if self._turns.enter(client, place, estimate, weight):
            return turn
        try:
            # Shielded: a place that was handed out is told from a wait that was cancelled.
            await asyncio.shield(place)
        except asyncio.CancelledError:
            if place.done():
                turn.finish(0.0)  # the place came while we were being cancelled
            else:
                self._turns.give_up(client, place)
            raise
        return turn

    def _finish(self, turn: Turn, cost: float) -> None:
        for place in self._turns.leave(turn.client, cost - turn.estimate):
            place.set_result(None)
