"""Requests per minute, tokens per minute and concurrency of each tenant.

Token buckets that hold one minute's worth. A request reserves an estimate of its tokens and settles with what it used;
a bucket may go below zero by the difference and is refilled at its rate, so the long-run rate holds whatever the
estimates. Plain class with an injected clock; not thread-safe (one event loop owns it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .tenants import TenantConfig


class RateLimited(Exception):
    """A limit is reached. limit: its name; retry_after_s: when a retry may succeed."""

    def __init__(self, tenant: str, limit: str, allowed: float, retry_after_s: float) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        super().__init__(
            f"tenant {tenant} has reached its limit {limit}={allowed:g}; retry after {retry_after_s:.1f} s"
        )


@dataclass
class Bucket:
    """`level` units available at time `at_s`; refilled at `per_min` / 60 up to `per_min`."""

    per_min: float
    level: float
    at_s: float

    def refill(self, now_s: float) -> None:
        self.level = min(self.per_min, self.level + (now_s - self.at_s) * self.per_min / 60.0)
        self.at_s = now_s

    def wait_s(self, need: float) -> float:
        """Seconds until `need` units (at most a full bucket) are there; 0 if they are."""
        return max(0.0, (min(need, self.per_min) - self.level) * 60.0 / self.per_min)


@dataclass
class _State:
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0


class Lease:
    """One admitted request. `settle` once with the tokens it used; `release` always (both idempotent)."""

    def __init__(self, state: _State, reserved: float) -> None:
        self._state, self._reserved, self._open = state, reserved, True

    def settle(self, used_tokens: float) -> None:
        if self._state.tokens is not None and self._reserved >= 0:
            self._state.tokens.level += self._reserved - used_tokens
            self._reserved = -1.0

    def release(self) -> None:
        """End the request. One that never settled (it failed) gets its reservation back."""
        if self._open:
            self._open = False
            self._state.running -= 1
            self.settle(0.0)


class AnyLease(Protocol):
    """What an admitted request holds (see `Lease`)."""

    def settle(self, used_tokens: float) -> None: ...

    def release(self) -> None: ...


class Limits(Protocol):
    """Admits or refuses requests: in this process, or over several router replicas."""

    async def admit(self, tenant: TenantConfig, estimated_tokens: float) -> AnyLease:
        """Reserve one request and its tokens. Raises RateLimited."""
        ...


class LocalLimits:
    """`Limits` of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limiter = Limiter(clock)

    async def admit(self, tenant: TenantConfig, estimated_tokens: float) -> AnyLease:
        return self._limiter.admit(tenant, estimated_tokens)


class Limiter:
    """Admits or refuses requests by their tenant's limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, _State] = {}

    def admit(self, tenant: TenantConfig, estimated_tokens: float) -> Lease:
        """Reserve one request and its tokens. Raises RateLimited; nothing is reserved then."""
        now = self._clock()
        state = self._state(tenant, now)
        if tenant.concurrency and state.running >= tenant.concurrency:
            raise RateLimited(tenant.name, "concurrency", tenant.concurrency, 1.0)
        if state.requests is not None:
            state.requests.refill(now)
            if wait := state.requests.wait_s(1.0):
                raise RateLimited(tenant.name, "requests_per_min", tenant.requests_per_min, wait)
        if state.tokens is not None:
            state.tokens.refill(now)
            if wait := state.tokens.wait_s(estimated_tokens):
                raise RateLimited(tenant.name, "tokens_per_min", tenant.tokens_per_min, wait)
            state.tokens.level -= estimated_tokens
        if state.requests is not None:
            state.requests.level -= 1.0
        state.running += 1
        return Lease(state, estimated_tokens)

    def running(self, tenant: str) -> int:
        state = self._states.get(tenant)
        return state.running if state else 0

    def _state(self, tenant: TenantConfig, now: float) -> _State:
        """The tenant's state; a bucket whose limit was reconfigured starts again full."""
        state = self._states.setdefault(tenant.name, _State(None, None))
        state.requests = _bucket(state.requests, tenant.requests_per_min, now)
        state.tokens = _bucket(state.tokens, tenant.tokens_per_min, now)
        return state


def _bucket(bucket: Bucket | None, per_min: float, now: float) -> Bucket | None:
    if per_min <= 0:
        return None
    if bucket is None or bucket.per_min != per_min:
        return Bucket(per_min, per_min, now)
    return bucket
