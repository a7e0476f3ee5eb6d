"""Limits over several router replicas, asked of the hub for every request of a tenant that has some."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from epilora.serving.limits import AnyLease, RateLimited
from epilora.serving.openai_api import ApiError
from epilora.serving.tenants import TenantConfig

HUB_S = 5.0
logger = logging.getLogger(__name__)


class NoLimits:
    """The lease of a tenant without limits."""

    def settle(self, used_tokens: float) -> None:
        pass

    def release(self) -> None:
        pass


class HubLease:
    """A lease the hub keeps under a number. The hub is told once, when the request has ended."""

    def __init__(self, hub: Any, number: int) -> None:
        self._hub, self._number, self._open = hub, number, True
        self._used: float | None = None

    def settle(self, used_tokens: float) -> None:
        self._used = used_tokens

    def release(self) -> None:
        if self._open:
            self._open = False
            self._hub.end.remote(self._number, self._used)


class HubLimits:
    """`epilora.serving.limits.Limits` over the hub. Without the hub no limited request is let in."""

    def __init__(self, hub: Any, replica: str) -> None:
        self._hub, self._replica = hub, replica

    async def admit(self, tenant: TenantConfig, estimated_tokens: float) -> AnyLease:
        """Raises RateLimited; ApiError 503 if the hub does not answer."""
        if not tenant.limited:
            return NoLimits()
        try:
            number, limit, retry_s = await asyncio.wait_for(
                self._hub.admit.remote(self._replica, tenant, estimated_tokens), HUB_S
            )
        except Exception as err:
            logger.warning("the hub does not answer: %s: %s", type(err).__name__, err)
            raise ApiError(
                503,
                f"tenant {tenant.name}: its limits cannot be checked right now; try again",
                type="server_error",
                code="limits_unavailable",
                headers={"retry-after": "1"},
            ) from err
        if not number:
            raise RateLimited(tenant.name, limit, getattr(tenant, limit), retry_s)
        return HubLease(self._hub, number)
