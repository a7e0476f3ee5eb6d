"""RouterHub: the one replica that all router replicas share. It serves the operators' port and holds what is common.

    operators' port: administration, /metrics of all replicas, a web page, the state behind it
    for routers:     limits over all replicas (`admit`, `end`), and a report every second whose answer names the
                     engines that drain

Ray Serve has one HTTP port; the operators' is a server of this replica's own, on `admin_host`:`admin_port`. If the hub
restarts, routers go on serving; requests of tenants with limits are refused (503) until it is back.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from ray import serve

from actors.ports import build_core
from actors.responses import http_app
from epilora import log
from epilora.serving.ledger import Ledger
from epilora.serving.limits import RateLimited
from epilora.serving.reports import Family, MergedMetrics
from epilora.serving.tenants import TenantConfig

PORT_S = 30.0  # how long the port's former holder, a hub that is stopping, may keep it

logger = logging.getLogger(__name__)


async def bound(host: str, port: int, patience_s: float) -> socket.socket:
    """A socket bound to the port, once whoever has it lets it go. Raises OSError after `patience_s`, or if it cannot be had."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as err:
            if err.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


@serve.deployment(
    name="RouterHub",
    num_replicas=1,
    max_ongoing_requests=8192,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=2,
    logging_config={"enable_access_log": False},
)
class RouterHub:
    """args: see `actors.router.build_app`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        log.setup(json_lines=True)
        self._merged = MergedMetrics()
        self._ledger = Ledger()
        self._core = build_core(args, role="admin", merged=self._merged)
        self._server = uvicorn.Server(
            uvicorn.Config(
                http_app(self._core),
                log_config=None,  # uvicorn's own closes the handlers of the whole process, Serve's among them
                log_level="warning",
                access_log=False,
                lifespan="off",
            )
        )
        self._serving = asyncio.get_event_loop().create_task(self._serve(args["admin_host"], args["admin_port"]))

    async def _serve(self, host: str, port: int) -> None:
        listening = await bound(host, port, PORT_S)
        await self._server.serve(sockets=[listening])

    async def check_health(self) -> None:
        """Serve replaces a replica whose server has ended."""
        if self._serving.done():
            raise RuntimeError(f"the operators' server has ended: {self._serving.exception()}")

    async def report(self, replica: str, families: Sequence[Family]) -> dict[str, Any]:
        """A router replica's samples; what it has to know."""
        self._merged.report(replica, families)
        self._ledger.forget_others(self._merged.alive())
        return {"draining": sorted(self._core.fleet.draining)}

    async def admit(self, replica: str, tenant: TenantConfig, estimated_tokens: float) -> tuple[int, str, float]:
        """(lease number, "", 0), or (0, the limit that is reached, seconds until a retry may succeed)."""
        try:
            return self._ledger.admit(replica, tenant, estimated_tokens), "", 0.0
        except RateLimited as err:
            return 0, err.limit, err.retry_after_s

    async def end(self, number: int, used_tokens: float | None) -> None:
        """A request that `admit` let in has ended."""
        self._ledger.end(number, used_tokens)

    def __del__(self) -> None:
        self._server.should_exit = True
