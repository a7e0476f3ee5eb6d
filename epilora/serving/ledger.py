"""Limits that hold over several router replicas: one ledger in the hub, leases by number.

A replica asks for every request of a tenant that has limits, and gives back what the request used; tenants without
limits never ask. Leases of a replica that has gone are given back, so that its requests do not count for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .limits import Lease, Limiter
from .tenants import TenantConfig


@dataclass(frozen=True)
class _Held:
    replica: str
    lease: Lease


class Ledger:
    """See the module's docstring. One event loop owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limiter = Limiter(clock)
        self._held: dict[int, _Held] = {}
        self._next = 0

    def admit(self, replica: str, tenant: TenantConfig, estimated_tokens: float) -> int:
        """Reserve one request; the lease's number. Raises RateLimited."""
        lease = self._limiter.admit(tenant, estimated_tokens)
        self._next += 1
        self._held[self._next] = _Held(replica, lease)
        return self._next

    def end(self, number: int, used_tokens: float | None) -> None:
        """The request ended; None: it failed and gets its reservation back. An unknown number is fine."""
        held = self._held.pop(number, None)
        if held is not None:
            if used_tokens is not None:
                held.lease.settle(used_tokens)
            held.lease.release()

    def forget_others(self, alive: Iterable[str]) -> None:
        """Give back the leases of replicas that are not among these."""
        kept = set(alive)
        for number in [number for number, held in self._held.items() if held.replica not in kept]:
            self.end(number, None)

    def running(self, tenant: str) -> int:
        return self._limiter.running(tenant)
