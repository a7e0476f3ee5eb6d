"""Keeping tenants' promised time to first token by letting rollouts have fewer seats in the batch.

A tenant's request may carry what is left of its promise (`ttft_budget_ms`). Two rules:

- a request that has spent half of its budget without a first token stops new rollouts at once;
- first tokens that took more than HIGH of their budget cut the rollouts' seats by CUT, at most once per CUT_EVERY_S;
  time without one gives GROW_PER_S of all seats back per second. (Additive increase, multiplicative decrease.)

Rollouts already in the batch are never cut off. One seat always stays, so that a promise nothing can keep does not stop
training for ever. While a promise was seen in the last MEMORY_S, rollouts enter a few at a time: a step that takes in
hundreds of prompts at once makes a tenant wait for all of them. Without promises nothing here changes anything.

Plain class with an injected clock; one thread owns it, `in_danger` may be read by others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HIGH = 0.7
CUT = 0.7
CUT_EVERY_S = 0.25
GROW_PER_S = 0.05
MEMORY_S = 10.0
HALF = 0.5
BURST_SHARE = 0.125


class PromiseKeeper:
    """seats: how many rollouts may be in the batch when no promise is in danger. cuts: times seats were taken away."""

    def __init__(self, seats: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._all, self._clock = seats, clock
        self._seats = float(seats)
        self._waiting: dict[str, tuple[float, float]] = {}  # request -> (when it came, its budget), in seconds
        self._grown_at_s = clock()
        self._seen_s = self._cut_s = self._tight_s = float("-inf")
        self.cuts = 0

    def arrived(self, request: str, budget_ms: float, at_s: float) -> None:
        """A tenant's request came in with what is left of its promise; 0 or less: it carries none (or lost it)."""
        if budget_ms > 0:
            self._seen_s = self._clock()
            self._waiting[request] = (at_s, budget_ms / 1e3)

    def first_token(self, request: str, at_s: float) -> None:
        """Its first token exists."""
        entry = self._waiting.pop(request, None)
        if entry is None:
            return
        came_s, budget_s = entry
        if at_s - came_s <= HIGH * budget_s:
            return
        self._tight_s = now = self._clock()
        if now - self._cut_s >= CUT_EVERY_S:
            self._grow(now)
            self._cut_s = now
            self._seats = max(1.0, CUT * self._seats)
            self.cuts += 1

    def ended(self, request: str) -> None:
        """It ended, first token or not."""
        self._waiting.pop(request, None)

    def _grow(self, now: float) -> None:
        self._seats = min(float(self._all), self._seats + GROW_PER_S * self._all * (now - self._grown_at_s))
        self._grown_at_s = now

    def _late(self, now: float) -> bool:
        return any(now - came > HALF * budget for came, budget in list(self._waiting.values()))

    @property
    def in_danger(self) -> bool:
        """Is a request late now, or was a first token tight within the last second?"""
        now = self._clock()
        return self._late(now) or now - self._tight_s < 1.0

    @property
    def seats(self) -> int:
        """Rollouts that may be in the batch now."""
        self._grow(self._clock())
        return int(self._seats)

    def room(self, seated: int) -> int:
        """How many more rollouts may enter at this step. seated: those in the batch."""
        now = self._clock()
        free = max(0, self.seats - seated)
        if now - self._seen_s > MEMORY_S:
            return free
        if self._late(now):
            return 0
        return min(free, max(1, int(BURST_SHARE * self._all)))
