"""CoServingRouter: the OpenAI-compatible front end on Ray Serve. Behaviour is in `epilora.serving.core`; this carries
calls.

    serve run actors.router:build_app engines=base tenants_file=tenants.json
    serve.run(build_app({"engines": ["base"], "tenants": [...]}), route_prefix="/")

Talks to named actors in namespace "epilora": engines (the Engine protocol) and the store. They may start later than the
router: it answers 503 on /ready until they do. Adapter tensors go from store to engine through Ray's object store and
never through this process, which imports neither torch nor vllm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.routing import EngineView, choose_engine
from epilora.errors import EngineDead
from epilora.serving.core import ServingCore
from epilora.serving.messages import EventStream, Reply, Request
from epilora.serving.ports import EngineGone, EngineLoad
from epilora.serving.settings import CoreConfig, Timeouts
from epilora.serving.tenants import TenantConfig, TenantFile, TenantRegistry, tenant_from_dict
from epilora.store import AdapterStore
from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt, TokenChunk

NAMESPACE = "epilora"
logger = logging.getLogger(__name__)


class ActorPort:
    """A named actor, found when first needed and again after it died. Ray's errors become the part's own."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self._namespace = name, namespace
        self._handle: Any = None

    def handle(self) -> Any:
        """Raises EngineGone if no actor of that name runs."""
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self.name, namespace=self._namespace)
            except ValueError as err:
                raise EngineGone(f"no actor {self.name!r} runs in namespace {self._namespace!r} (yet)") from err
        return self._handle

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        reference: Awaitable[Any] = getattr(self.handle(), method).remote(*args, **kwargs)
        try:
            return await reference
        except Exception as err:
            raise self.unwrap(err) from None

    def unwrap(self, err: Exception) -> Exception:
        """The error the actor raised; EngineGone if it is the actor itself that failed."""
        if isinstance(err, RayTaskError):
            cause = err.cause
            if isinstance(cause, EngineDead):
                return EngineGone(str(cause))
            return cause if isinstance(cause, Exception) else RuntimeError(str(cause))
        if isinstance(err, RayActorError):
            self._handle = None
            return EngineGone(f"actor {self.name!r} died or cannot be reached")
        return err


class RayEngine(ActorPort):
    """`epilora.serving.ports.EnginePort` over an engine actor."""

    async def info(self) -> EngineInfo:
        return await self.ask("info")

    async def stats(self) -> EngineStats:
        return await self.ask("stats")

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await self.ask("generate", list(requests))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            chunks = self.handle().stream.options(num_returns="streaming").remote(request)
            async for reference in chunks:
                yield await reference
        except Exception as err:
            raise self.unwrap(err) from None

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.ask("abort", list(request_ids))

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt:
        return await self.ask("load_adapter", version, tensors)

    async def unload_adapter(self, digest: str) -> None:
        await self.ask("unload_adapter", digest)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[int, ...]:
        return await self.ask("render_chat", list(messages), tools)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self.ask("detokenize", tuple(token_ids))


class RayStore(ActorPort):
    """`epilora.serving.ports.StorePort` over the store actor.

    Where the store's folder is on this machine, names are resolved by reading its database directly: 0.1 ms instead of an
    actor call, and as current as the last committed change. Everything else, and every write, goes through the actor.
    """

    _reader: AdapterStore | None = None
    _looked = False

    async def resolve(self, ref: str, tenant: str | None) -> AdapterVersion:
        if not self._looked:
            root, store_id = await self.ask("identity")
            self._reader, self._looked = AdapterStore.open_same(root, store_id), True
            logger.info("names are resolved %s", "from the store's folder" if self._reader else "by the store actor")
        if self._reader is not None:
            return self._reader.resolve(ref, tenant=tenant)
        return await self.ask("resolve", ref, tenant=tenant)

    async def names(self, tenant: str | None) -> list[str]:
        return await self.ask("names", tenant=tenant)

    async def current(self, tenant: str | None, offset: int, limit: int) -> list[AdapterVersion]:
        return await self.ask("current", tenant=tenant, offset=offset, limit=limit)

    async def versions(self, name: str, tenant: str | None) -> list[AdapterVersion]:
        return await self.ask("versions", name, tenant=tenant)

    def tensors(self, digest: str) -> Any:
        """A reference; Ray hands the engine the tensors."""
        return self.handle().tensors.remote(digest)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ask(method, *args, **kwargs)


def _choose(engines: Sequence[EngineLoad], digest: str | None) -> str | None:
    return choose_engine([EngineView(**vars(e)) for e in engines], digest)


class EventResponse(Response):
    """Sends an event stream and closes it however sending ends (Serve cancels it when the client goes away)."""

    def __init__(self, stream: EventStream, reply: Reply) -> None:
        super().__init__(status_code=reply.status, headers=reply.headers, media_type=reply.content_type)
        del self.headers["content-length"]
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._stream.aclose()


def to_response(reply: Reply) -> Response:
    """The Starlette response of a reply. Serve's proxy sets x-request-id itself."""
    reply.headers.pop("x-request-id", None)
    if isinstance(reply.body, EventStream):
        return EventResponse(reply.body, reply)
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, separators=(",", ":")).encode()
    return Response(body, reply.status, reply.headers, reply.content_type)


app = FastAPI(title="EpiLoRA", openapi_url=None)


@serve.deployment(
    name="CoServingRouter",
    max_ongoing_requests=8192,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=10,
    logging_config={"enable_access_log": False},
)
@serve.ingress(app)
class CoServingRouter:
    """One replica of the router. args: see `build_app`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        namespace = args.get("namespace", NAMESPACE)
        registry = TenantRegistry(tenant_from_dict(tenant) for tenant in args.get("tenants", ()))
        refresh = None
        if args.get("tenants_file"):
            file = TenantFile(Path(args["tenants_file"]), registry)
            if not file.refresh():
                raise ValueError(f"tenants_file: {file.error}")
            refresh = file.refresh
        admin = TenantConfig("admin", tuple(args.get("admin_key_hashes", ())), admin=True, other_precision=True)
        self._core = ServingCore(
            [RayEngine(name, namespace) for name in args["engines"]],
            RayStore(args.get("store", "store"), namespace),
            registry,
            _choose,
            admin_registry=TenantRegistry([admin]),
            config=CoreConfig(
                base_names=tuple(args.get("base_names", ())),
                max_running=int(args.get("max_running", 4096)),
                max_active=int(args.get("max_active", 256)),
                max_queue=int(args.get("max_queue", 1024)),
                import_roots=tuple(args.get("import_roots", ())),
                timeouts=Timeouts(**args.get("timeouts", {})),
            ),
            refresh_tenants=refresh,
        )

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"], include_in_schema=False)
    async def serve_request(self, request: HttpRequest) -> Response:
        reply = await self._core.handle(
            Request(
                method=request.method,
                path=request.url.path,
                headers=dict(request.headers),
                body=await request.body(),
                query=dict(request.query_params),
            )
        )
        return to_response(reply)


def _names(value: Any) -> list[str]:
    return [part for part in value.split(",") if part] if isinstance(value, str) else list(value)


_ARGS = {"engines", "store", "namespace", "base_model", "base_names", "tenants", "tenants_file", "admin_key_hashes"}
_ARGS |= {"replicas", "max_running", "max_active", "max_queue", "import_roots", "timeouts"}


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application.

    engines: names of engine actors (list, or text with commas). store ("store"), namespace ("epilora"): where to find
    them.
    base_model, base_names: further names the base answers to. tenants: list of dicts
    (`epilora.serving.tenants.TenantConfig`; give `key_hashes`, a plain `key` is hashed here). tenants_file: JSON of
    the same, re-read when it changes.
    admin_key_hashes: keys for load, unload, promote, rollback, gc, audit. replicas: 1. max_running: requests before
    429.
    import_roots: folders adapters may be loaded from. timeouts: `epilora.serving.settings.Timeouts` by field.
    Raises ValueError for an unknown argument, no engine, or tenants that contradict one another.
    """
    unknown = sorted(set(args) - _ARGS)
    if unknown:
        raise ValueError(f"build_app: unknown arguments {unknown}; allowed are {sorted(_ARGS)}")
    engines = _names(args.get("engines", ()))
    if not engines:
        raise ValueError("build_app: engines is empty; name at least one engine actor")
    tenants = [tenant_from_dict(tenant) for tenant in args.get("tenants", ())]
    TenantRegistry(tenants)
    base_names = [*_names(args.get("base_names", ())), *([args["base_model"]] if args.get("base_model") else [])]
    plain = {
        **{key: value for key, value in args.items() if key not in ("replicas", "base_model")},
        "engines": engines,
        "base_names": base_names,
        "tenants": [vars(tenant) for tenant in tenants],
        "import_roots": _names(args.get("import_roots", ())),
        "admin_key_hashes": _names(args.get("admin_key_hashes", ())),
    }
    router: Any = CoServingRouter
    return router.options(num_replicas=int(args.get("replicas", 1))).bind(plain)
