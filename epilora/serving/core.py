"""The co-serving router without Ray and without a web framework: request in, reply out.

    authenticate -> route -> completions (completions.py), models (catalog.py) or administration (admin.py)

The digest a model name resolved to is what the engine is asked for and what the reply reports (`system_fingerprint`,
header `x-epilora-digest`); a reply made by anything else is an error, never an answer. Every wait has a bound. A reply
that stops being read aborts its engine requests.

Engines and the store are reached through ports (ports.py): Ray actors in production, plain objects in tests. One event
loop owns a core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from epilora.errors import Unauthorized

from .admin import Administration
from .catalog import Catalog
from .completions import Completions
from .fleet import Fleet
from .limits import Limits, LocalLimits
from .messages import Reply, Request, bounded, error_reply, page, whole_number
from .metrics import CONTENT_TYPE, ServingMetrics
from .openai_api import ApiError
from .openapi import document
from .operators import PAGE_FILES, PAGE_POLICY, describe, page_file
from .ports import EnginePort, StorePort
from .reports import Family, MergedMetrics, render, samples_of
from .settings import CoreConfig
from .tenants import TenantConfig, TenantRegistry

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Reply]]
ROLES = ("both", "tenants", "admin")
# The last two log themselves.
UNLOGGED = {"/health", "/ready", "/metrics", "/v1/state", "/v1/completions", "/v1/chat/completions"}


class ServingCore:
    """See the module's docstring. `handle` answers one request.

    role: "tenants" (no administration, no metrics: those are on the operators' port), "admin" (nothing else), "both".
    limits: shared by several routers, else this process's own. merged: what other routers report, for /metrics.
    """

    def __init__(
        self,
        engines: Sequence[EnginePort],
        store: StorePort,
        registry: TenantRegistry,
        *,
        config: CoreConfig | None = None,
        admin_registry: TenantRegistry | None = None,
        metrics: ServingMetrics | None = None,
        refresh_tenants: Callable[[], object] | None = None,
        role: str = "both",
        limits: Limits | None = None,
        merged: MergedMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or CoreConfig()
        self.metrics = metrics or ServingMetrics()
        self._store, self._registry, self._clock = store, registry, clock
        self._admins = admin_registry or TenantRegistry()
        self._refresh_tenants = refresh_tenants
        self.fleet = Fleet(engines, store, config=self.config, metrics=self.metrics, clock=clock)
        self.catalog = Catalog(store, self.fleet, self.config)
        self.completions = Completions(
            self.fleet,
            self.catalog,
            limits=limits or LocalLimits(clock),
            config=self.config,
            metrics=self.metrics,
            clock=clock,
        )
        self._administration = Administration(store, self.fleet, self.catalog, registry, self.config)
        self.merged = merged or MergedMetrics()
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/openapi.json"): self._openapi,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/versions"): self._versions,
        }
        if role not in ROLES:
            raise ValueError(f"ServingCore: role={role!r}; allowed are {', '.join(ROLES)}")
        if role != "admin":
            self._routes |= {
                ("POST", "/v1/completions"): self._completions,
                ("POST", "/v1/chat/completions"): self._chat,
            }
        if role != "tenants":
            self._routes |= {
                ("GET", "/"): self._page,
                **{("GET", f"/{name}"): self._page for name in PAGE_FILES},
                ("GET", "/metrics"): self._metrics,
                ("GET", "/v1/state"): self._state,
                ("GET", "/v1/audit"): self._audit,
                ("POST", "/v1/load_lora_adapter"): self._admin(self._administration.load),
                ("POST", "/v1/unload_lora_adapter"): self._admin(self._administration.unload),
                ("POST", "/v1/adapters/promote"): self._admin(self._administration.promote),
                ("POST", "/v1/adapters/rollback"): self._admin(self._administration.rollback),
                ("POST", "/v1/adapters/gc"): self._admin(self._administration.gc),
                ("POST", "/v1/engines/drain"): self._admin(self._administration.drain),
            }

    async def handle(self, request: Request) -> Reply:
        """Answer one request. Errors come back as replies in OpenAI's shape; only cancellation propagates."""
        started, request_id = self._clock(), request.request_id
        try:
            reply = await self._route(request)(request)
        except asyncio.CancelledError:
            raise
        except Exception as err:
            reply = error_reply(err)
            if reply.status >= 500:
                fields = {"request_id": request_id, "path": request.path, "status": reply.status}
                logger.warning("failed: %s: %s", type(err).__name__, err, extra={"fields": fields})
        reply.headers.setdefault("x-request-id", request_id)
        if request.path not in UNLOGGED or reply.status == 401:
            fields = {"request_id": request_id, "method": request.method, "path": request.path[:256]}
            ms = round((self._clock() - started) * 1e3, 2)
            logger.info("request", extra={"fields": {**fields, "status": reply.status, "ms": ms}})
        return reply

    def _route(self, request: Request) -> Handler:
        handler = self._routes.get((request.method, request.path))
        if handler is not None:
            return handler
        if request.method == "GET" and request.path.startswith("/v1/models/"):
            return self._model
        allowed = [method for method, path in self._routes if path == request.path]
        if allowed:
            raise ApiError(405, f"{request.method} is not allowed on {request.path}", headers={"allow": allowed[0]})
        raise ApiError(404, f"unknown path {request.path}", code="unknown_url")

    def _authenticate(self, request: Request) -> TenantConfig:
        if self._refresh_tenants is not None:
            self._refresh_tenants()
        authorization = request.headers.get("authorization")
        try:
            return self._registry.authenticate(authorization)
        except Unauthorized:
            return self._admins.authenticate(authorization)

    def _authenticate_admin(self, request: Request) -> TenantConfig:
        tenant = self._authenticate(request)
        if not tenant.admin:
            raise ApiError(403, "this needs an admin key", type="permission_error", code="admin_only")
        return tenant

    def _admin(self, action: Callable[[TenantConfig, bytes], Awaitable[Reply]]) -> Handler:
        async def handler(request: Request) -> Reply:
            return await action(self._authenticate_admin(request), request.body)

        return handler

    # --- state ----------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Reply:
        return Reply(200, {"status": "ok"})

    async def _ready(self, request: Request) -> Reply:
        """200 when the store answers and at least one engine does; else 503 with what is missing."""
        problems = []
        up = 0
        for engine in self.fleet.engines.values():
            try:
                await self.fleet.info(engine)
                up += 1
            except Exception as err:
                problems.append(f"engine {engine.port.name}: {err}")
        try:
            await bounded(self._store.names(""), "store", self.config.timeouts.control_s)
        except Exception as err:
            problems.append(f"store: {err}")
        ready = up > 0 and not any(problem.startswith("store") for problem in problems)
        return Reply(200 if ready else 503, {"ready": ready, "engines": up, "problems": problems})

    async def _openapi(self, request: Request) -> Reply:
        return Reply(200, document())

    async def _metrics(self, request: Request) -> Reply:
        return Reply(200, render(await self.counted()), content_type=CONTENT_TYPE)

    async def counted(self) -> list[Family]:
        """All metrics: this core's, the engines' and the store's as of now, and what other routers reported."""
        await self.fleet.count()
        return self.merged.families(self.samples())

    def samples(self) -> list[Family]:
        """What this core has counted."""
        self.metrics.running.set(self.completions.running)
        return samples_of(self.metrics.registry)

    async def _state(self, request: Request) -> Reply:
        """Everything the operators' page and `epilora top` show."""
        self._authenticate_admin(request)
        families = await self.counted()
        return Reply(200, await describe(self._store, self.fleet, self._registry, self.merged.alive(), families))

    async def _page(self, request: Request) -> Reply:
        """The operators' page; it holds no secrets, and asks for an admin key to show anything."""
        content, kind = page_file(request.path)
        return Reply(200, content, {"content-security-policy": PAGE_POLICY, "cache-control": "no-store"}, kind)

    # --- models and completions -----------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Reply:
        """`limit` and `offset` page through them."""
        tenant = self._authenticate(request)
        return Reply(200, await self.catalog.models(tenant, *page(request.query)))

    async def _model(self, request: Request) -> Reply:
        tenant = self._authenticate(request)
        return Reply(200, await self.catalog.model(request.path.removeprefix("/v1/models/"), tenant))

    async def _versions(self, request: Request) -> Reply:
        """All versions of `?name=`."""
        tenant = self._authenticate(request)
        return Reply(200, await self.catalog.versions(request.query.get("name", ""), tenant))

    async def _completions(self, request: Request) -> Reply:
        tenant = self._authenticate(request)
        return await self.completions.answer(tenant, request.body, chat=False, request_id=request.request_id)

    async def _chat(self, request: Request) -> Reply:
        tenant = self._authenticate(request)
        return await self.completions.answer(tenant, request.body, chat=True, request_id=request.request_id)

    async def _audit(self, request: Request) -> Reply:
        """Audit rows after `?after_id=`."""
        self._authenticate_admin(request)
        _, limit = page(request.query)
        return await self._administration.audit(whole_number(request.query, "after_id", 0, 1 << 62), limit)
