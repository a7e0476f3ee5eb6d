"""CoServingRouter: the OpenAI-compatible front end on Ray Serve. Behaviour is in `epilora.serving`; this carries calls.

    serve run actors.router:build_app engines=base tenants_file=tenants.json
    serve deploy configs/serve.yaml
    serve.run(build_app({"engines": ["base"], "tenants": [...]}), route_prefix="/")

Talks to named actors in namespace "epilora": engines (the Engine protocol) and the store. They may start later than the
router: it answers 503 on /ready until they do. This process imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actors.hub import RouterHub
from actors.hub_client import HubLimits
from actors.ports import NAMESPACE, POOL, ActorPort, RayEngine, build_core
from actors.responses import from_http, to_response
from epilora import log
from epilora.serving.ports import EngineGone
from epilora.serving.tenants import TenantRegistry, tenant_from_dict

REPORT_S = 1.0
logger = logging.getLogger(__name__)


@serve.deployment(
    name="CoServingRouter",
    max_ongoing_requests=8192,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=2,  # how long a dead replica goes unnoticed; Serve's own 10 s are five times as long
    graceful_shutdown_timeout_s=60,  # what is streaming may end; then Serve stops the replica
    logging_config={"enable_access_log": False},
)
class CoServingRouter:
    """One replica of the router. args: see `build_app`. hub: handle of the RouterHub, None if there is none."""

    def __init__(self, args: Mapping[str, Any], hub: Any = None) -> None:
        log.setup(json_lines=True)
        self._hub, self._name = hub, uuid.uuid4().hex
        several = hub is not None and int(args["replicas"]) > 1
        self._core = build_core(
            args,
            role="tenants" if hub is not None else "both",
            limits=HubLimits(hub, self._name) if several else None,
        )
        self._bases, self._namespace = tuple(args["engines"]), args.get("namespace", NAMESPACE)
        self._pool = ActorPort(POOL, self._namespace)
        self._following = asyncio.get_running_loop().create_task(self._follow())
        if hub is not None:
            self._reporting = asyncio.get_running_loop().create_task(self._report())
        gc.collect()
        gc.freeze()  # or a full collection walks over all that the imports made while every request waits

    async def _follow(self) -> None:
        """Every second: the engines are those that the pool runs for the configured bases. Without a pool they stay."""
        while True:
            try:
                starts = await asyncio.wait_for(self._pool.ask("starts", list(self._bases)), 10.0)
                self._core.fleet.follow(starts, lambda name: RayEngine(name, self._namespace))
            except EngineGone:
                pass  # engines without a pool: tests, and servers that start their own
            except Exception as err:
                logger.warning("the pool did not say which engines run: %s: %s", type(err).__name__, err)
            await asyncio.sleep(REPORT_S)

    async def _report(self) -> None:
        """Tell the hub what was counted, every second; learn which engines drain."""
        while True:
            try:
                told = await asyncio.wait_for(self._hub.report.remote(self._name, self._core.samples()), 10.0)
                self._core.fleet.draining = set(told["draining"])
            except Exception as err:
                logger.warning("no report to the hub: %s: %s", type(err).__name__, err)
            await asyncio.sleep(REPORT_S)

    async def __call__(self, request: HttpRequest) -> Response:
        reply = await self._core.handle(await from_http(request))
        reply.headers.pop("x-request-id", None)  # Serve's proxy sets it itself
        return to_response(reply)


def _names(value: Any) -> list[str]:
    return [part for part in value.split(",") if part] if isinstance(value, str) else list(value)


_ARGS = {"engines", "store", "namespace", "base_model", "base_names", "tenants", "tenants_file", "admin_key_hashes"}
_ARGS |= {"replicas", "max_running", "max_active", "max_queue", "import_roots", "timeouts", "admin_host", "admin_port"}


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application.

    engines: names of engine actors (list, or text with commas). store ("store"), namespace ("epilora"): where to find
    them.
    base_model, base_names: further names the base answers to. tenants: list of dicts
    (`epilora.serving.tenants.TenantConfig`; give `key_hashes`, a plain `key` is hashed here). tenants_file: JSON of
    the same, re-read when it changes.
    admin_port: the operators' port on admin_host ("127.0.0.1"): load, unload, promote, rollback, gc, drain, audit,
    /metrics and the page; the tenants' port has none of them then. 0 (the default): all on one port.
    admin_key_hashes: keys for the operators' calls. replicas: of the router, 1; more need an admin_port, whose replica
    keeps the limits that hold over all of them. max_running: requests before 429, max_active: at the engines at once,
    max_queue: waiting per tenant; all three over all replicas.
    import_roots: folders adapters may be loaded from. timeouts: `epilora.serving.settings.Timeouts` by field.
    Raises ValueError for an unknown argument, no engine, or tenants that contradict one another.
    """
    unknown = sorted(set(args) - _ARGS)
    if unknown:
        raise ValueError(f"build_app: unknown arguments {unknown}; allowed are {sorted(_ARGS)}")
    engines = _names(args.get("engines", ()))
    if not engines:
        raise ValueError("build_app: engines is empty; name at least one engine actor")
    replicas, admin_port = int(args.get("replicas", 1)), int(args.get("admin_port", 0))
    if replicas < 1:
        raise ValueError(f"build_app: replicas={replicas}; at least 1")
    if not 0 <= admin_port <= 65535:
        raise ValueError(f"build_app: admin_port={admin_port}; allowed are 1 to 65535, or 0 for none")
    if replicas > 1 and not admin_port:
        raise ValueError(
            f"build_app: replicas={replicas} needs an admin_port: its replica keeps the limits that hold over all routers"
        )
    tenants = [tenant_from_dict(tenant) for tenant in args.get("tenants", ())]
    TenantRegistry(tenants)
    base_names = [*_names(args.get("base_names", ())), *([args["base_model"]] if args.get("base_model") else [])]
    plain = {
        **{key: value for key, value in args.items() if key != "base_model"},
        "engines": engines,
        "base_names": base_names,
        "tenants": [vars(tenant) for tenant in tenants],
        "import_roots": _names(args.get("import_roots", ())),
        "admin_key_hashes": _names(args.get("admin_key_hashes", ())),
        "replicas": replicas,
        "admin_host": args.get("admin_host", "127.0.0.1"),
        "admin_port": admin_port,
    }
    router: Any = CoServingRouter
    hub: Any = RouterHub
    options = router.options(num_replicas=replicas)
    return options.bind(plain, hub.bind(plain)) if admin_port else options.bind(plain)
