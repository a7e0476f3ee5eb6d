"""Engines and the store as the serving core sees them, over Ray actors found by name; and the core built from arguments.

The actors may start later than whoever asks. Adapter tensors go from store to engine through Ray's object store and never
through this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.channel import Channel
from epilora.errors import EngineDead
from epilora.serving.core import ServingCore
from epilora.serving.limits import Limits
from epilora.serving.ports import EngineGone, TokenPair
from epilora.serving.reports import MergedMetrics
from epilora.serving.settings import CoreConfig, Timeouts
from epilora.serving.tenants import TenantConfig, TenantFile, TenantRegistry, tenant_from_dict
from epilora.store import AdapterStore
from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt, TokenChunk

NAMESPACE = "epilora"
POOL = "pool"  # actors/engine_pool.py
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
        if self._handle is None:
            await asyncio.to_thread(self.handle)  # asks Ray's control service, which may be slow to answer
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
        if isinstance(err, EngineDead):
            return EngineGone(str(err))
        if isinstance(err, RayActorError):
            self._handle = None
            return EngineGone(f"actor {self.name!r} died or cannot be reached")
        return err


class RayEngine(ActorPort):
    """`epilora.serving.ports.EnginePort` over an engine actor.

    A request for an engine that was scaled to zero asks the pool, if there is one, to bring it back; the request itself is told
    to come again. Looking at an engine (`stats`) wakes nobody.
    """

    _waking: Any = None
    _open: Channel | None = None

    async def _channel(self) -> Channel:
        """The stream of answers from this engine, opened when first needed and again after the engine died."""
        await self._wake_if_gone()
        if self._open is None or self._open.lost:
            self._open = Channel(self.handle(), self.unwrap)
        return self._open

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in ("info", "load_adapter", "render_chat"):
            await self._wake_if_gone()
        return await super().ask(method, *args, **kwargs)

    async def _wake_if_gone(self) -> None:
        if self._handle is not None:
            return
        try:
            await asyncio.to_thread(self.handle)
        except EngineGone:
            try:
                pool = await asyncio.to_thread(ray.get_actor, POOL, namespace=self._namespace)
            except ValueError:
                return
            if self._waking is None or ray.wait([self._waking], timeout=0)[0]:
                self._waking = pool.wake.remote(self.name)

    async def info(self) -> EngineInfo:
        return await self.ask("info")

    async def stats(self) -> EngineStats:
        return await self.ask("stats")

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        channel = await self._channel()
        try:
            return await channel.generate(requests)
        except EngineDead as err:
            raise self.unwrap(err) from None

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        channel = await self._channel()
        try:
            async with aclosing(channel.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineDead as err:
            raise self.unwrap(err) from None

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.ask("abort", list(request_ids))

    async def score(self, sequences: Sequence[TokenPair], adapter: str | None) -> list[list[float]]:
        return await self.ask("score", list(sequences), adapter)

    async def predict(
        self, version: AdapterVersion, tensors: Callable[[], Any], sequences: Sequence[TokenPair]
    ) -> tuple[list[list[float]], list[list[float]]] | None:
        """By the trainer that the pool started beside the base of this engine's name."""
        try:
            request = await ActorPort(POOL, self._namespace).ask("known", self.name)
        except (EngineGone, ValueError):
            return None  # no pool, or an engine without a trainer of its own
        trainer = ActorPort(request.trainer_name, self._namespace)
        return await trainer.ask("predict", version.spec, tensors(), list(sequences))

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt:
        return await self.ask("load_adapter", version, tensors)

    async def unload_adapter(self, digest: str) -> None:
        await self.ask("unload_adapter", digest)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[int, ...]:
        return await self.ask("render_chat", list(messages), tools)

    async def tool_call_start(self) -> str:
        return await self.ask("tool_call_start")

    async def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        return await self.ask("parse_tools", text, list(tools))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self.ask("detokenize", tuple(token_ids))


class RayStore(ActorPort):
    """`epilora.serving.ports.StorePort` over the store actor.

    Where the store's folder is on this machine, names are resolved and pages listed by reading its database directly, which
    costs less than an actor call and is as current as the last committed change. Everything else, and every write, goes
    through the actor.
    """

    _reader: AdapterStore | None = None
    _looked = False

    async def _local(self) -> AdapterStore | None:
        """The store's own database, if it is on this machine."""
        if not self._looked:
            root, store_id = await self.ask("identity")
            self._reader, self._looked = AdapterStore.open_same(root, store_id), True
            logger.info("names are resolved %s", "from the store's folder" if self._reader else "by the store actor")
        return self._reader

    async def resolve(self, ref: str, tenant: str | None) -> AdapterVersion:
        reader = await self._local()
        if reader is not None:
            return reader.resolve(ref, tenant=tenant)
        return await self.ask("resolve", ref, tenant=tenant)

    async def names(self, tenant: str | None) -> list[str]:
        return await self.ask("names", tenant=tenant)

    async def current(self, tenant: str | None, offset: int, limit: int) -> list[AdapterVersion]:
        reader = await self._local()
        if reader is not None:
            return reader.current(tenant=tenant, offset=offset, limit=limit)
        return await self.ask("current", tenant=tenant, offset=offset, limit=limit)

    async def versions(self, name: str, tenant: str | None) -> list[AdapterVersion]:
        return await self.ask("versions", name, tenant=tenant)

    def tensors(self, digest: str) -> Any:
        """A reference; Ray hands the engine the tensors."""
        return self.handle().tensors.remote(digest)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ask(method, *args, **kwargs)


def build_core(
    args: Mapping[str, Any], *, role: str, limits: Limits | None = None, merged: MergedMetrics | None = None
) -> ServingCore:
    """The serving core of one process. args: what `actors.router.build_app` checked; role, limits, merged: see the core.

    Raises ValueError for tenants that contradict one another or a tenants file that cannot be read.
    """
    namespace = args.get("namespace", NAMESPACE)
    registry = TenantRegistry(tenant_from_dict(tenant) for tenant in args.get("tenants", ()))
    refresh = None
    if args.get("tenants_file"):
        file = TenantFile(Path(args["tenants_file"]), registry)
        if not file.refresh():
            raise ValueError(f"tenants_file: {file.error}")
        refresh = file.refresh
    admin = TenantConfig("admin", tuple(args.get("admin_key_hashes", ())), admin=True, other_precision=True)
    replicas = int(args.get("replicas", 1))
    return ServingCore(
        [RayEngine(name, namespace) for name in args["engines"]],
        RayStore(args.get("store", "store"), namespace),
        registry,
        admin_registry=TenantRegistry([admin]),
        config=CoreConfig(
            base_names=tuple(args.get("base_names", ())),
            max_running=-(-int(args.get("max_running", 4096)) // replicas),
            max_active=-(-int(args.get("max_active", 256)) // replicas),
            max_queue=-(-int(args.get("max_queue", 1024)) // replicas),
            import_roots=tuple(args.get("import_roots", ())),
            timeouts=Timeouts(**args.get("timeouts", {})),
        ),
        refresh_tenants=refresh,
        role=role,
        limits=limits,
        merged=merged,
    )
