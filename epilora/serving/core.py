"""The co-serving router without Ray and without a web framework: request in, reply out.

    authenticate -> check the body -> resolve the model name to a version -> limits -> a fair turn -> choose an engine
    -> make sure that version is loaded there (once, however many ask) -> generate or stream -> settle limits

The digest the name resolved to is what the engine is asked for and what the reply reports (`system_fingerprint`, header
`x-epilora-digest`); a reply made by anything else is an error, never an answer. Every wait has a bound. A reply that
stops being read aborts its engine requests.

Engines and the store are reached through ports (see `EnginePort`, `StorePort`): Ray actors in production, plain
objects in tests. One event loop owns a core.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from epilora.errors import (
    AdapterNotFound,
    AdapterRejected,
    BaseMismatch,
    NoFreeSlot,
    PromptTooLong,
    Unauthorized,
)
from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt, TokenChunk

from . import openai_api as wire
from .fairness import FairGate, Turn, service
from .limits import Lease, Limiter, RateLimited
from .metrics import CONTENT_TYPE, ServingMetrics
from .names import not_found, parse_model
from .openai_api import ApiError, Call, Identity, TokenLogprob
from .tenants import TenantConfig, TenantRegistry
from .tool_calls import ToolCallStream, parse_tool_calls

logger = logging.getLogger(__name__)

MAX_RELOADS = 5


class EngineGone(Exception):
    """The engine died or cannot be reached; a port raises it for whatever its transport raises then."""


class EnginePort(Protocol):
    """An engine as the router sees it. Raises the Engine protocol's errors, EngineGone, ValueError for bad input."""

    name: str

    async def info(self) -> EngineInfo: ...

    async def stats(self) -> EngineStats: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]: ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt: ...

    async def unload_adapter(self, digest: str) -> None: ...

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[int, ...]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


class StorePort(Protocol):
    """The store as the router sees it. `tensors` gives whatever the engine port's `load_adapter` takes."""

    async def resolve(self, ref: str, tenant: str | None) -> AdapterVersion: ...

    async def names(self, tenant: str | None) -> list[str]: ...

    async def current(self, tenant: str | None, offset: int, limit: int) -> list[AdapterVersion]: ...

    async def versions(self, name: str, tenant: str | None) -> list[AdapterVersion]: ...

    def tensors(self, digest: str) -> Any: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


ChooseEngine = Callable[[Sequence["EngineLoad"], str | None], str | None]


@dataclass(frozen=True)
class EngineLoad:
    """An engine's state for the routing policy. resident: digests it holds; running: requests in flight there."""

    name: str
    resident: frozenset[str]
    running: int
    alive: bool


@dataclass(frozen=True)
class Timeouts:
    """Bounds on every wait, in seconds. slot_s: for an adapter slot to become free; queue_s: for a turn."""

    first_token_s: float = 120.0
    next_token_s: float = 60.0
    request_s: float = 600.0
    load_s: float = 60.0
    control_s: float = 15.0
    slot_s: float = 2.0
    queue_s: float = 60.0


@dataclass(frozen=True)
class CoreConfig:
    """base_names: further names of the base beside the engine's own. max_running: requests in the router before 429.

    max_active: requests the engines work on at once; beyond it tenants take turns by virtual token counters.
    max_queue: waiting requests per tenant before 429.

    import_roots: folders /v1/load_lora_adapter may read from; empty: any (the caller holds an admin key).
    """

    base_names: tuple[str, ...] = ()
    max_running: int = 4096
    max_active: int = 256
    max_queue: int = 1024
    import_roots: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True)
class Request:
    """An HTTP request. headers: lower-case names. query: decoded parameters."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    query: Mapping[str, str] = field(default_factory=dict)


class EventStream:
    """Bytes to send one after another. `aclose` always runs `on_close`, even if nothing was read."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        self._events, self._on_close = events, on_close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            self._on_close()


@dataclass
class Reply:
    """status, headers and a body: bytes, a JSON-able value, or a stream of server-sent events that must be closed."""

    status: int
    body: bytes | dict[str, Any] | EventStream
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass
class _Engine:
    """What the core tracks of one engine. loading: one task per digest, shared by all who wait for it."""

    port: EnginePort
    info: EngineInfo | None = None
    resident: dict[str, LoadReceipt] = field(default_factory=dict)
    loading: dict[str, asyncio.Task[LoadReceipt]] = field(default_factory=dict)
    running: int = 0
    dead_until_s: float = 0.0


@dataclass
class _Ticket:
    """What an admitted request holds until it ends: its limits and, once it is its turn, a place at the engines."""

    lease: Lease
    turn: Turn | None = None
    open: bool = True


@dataclass
class _Job:
    """One admitted request on its way."""

    tenant: TenantConfig
    call: Call
    identity: Identity
    version: AdapterVersion | None
    ticket: _Ticket
    engine: _Engine
    requests: list[GenerateRequest]
    started_s: float
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unfinished: set[str] = field(default_factory=set)
    tool_streams: dict[int, ToolCallStream] = field(default_factory=dict)

    @property
    def adapter_name(self) -> str:
        return self.version.name if self.version else "base"


class ServingCore:
    """See the module's docstring. `handle` answers one request."""

    def __init__(
        self,
        engines: Sequence[EnginePort],
        store: StorePort,
        registry: TenantRegistry,
        choose_engine: ChooseEngine,
        *,
        config: CoreConfig | None = None,
        admin_registry: TenantRegistry | None = None,
        metrics: ServingMetrics | None = None,
        refresh_tenants: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = {port.name: _Engine(port) for port in engines}
        self._store, self._registry, self._choose = store, registry, choose_engine
        self._admins = admin_registry or TenantRegistry()
        self.config = config or CoreConfig()
        self.metrics = metrics or ServingMetrics()
        self._refresh_tenants, self._clock = refresh_tenants, clock
        self._limiter = Limiter(clock)
        self._gate = FairGate(self.config.max_active, self.config.max_queue)
        self._token_texts: dict[tuple[str, int], str] = {}
        self._running = 0
        self._background: set[asyncio.Task[Any]] = set()
        self._routes: dict[tuple[str, str], Callable[[Request], Any]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/versions"): self._versions,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._completions,
            ("POST", "/v1/load_lora_adapter"): self._load_lora,
            ("POST", "/v1/unload_lora_adapter"): self._unload_lora,
            ("POST", "/v1/adapters/promote"): self._promote,
            ("POST", "/v1/adapters/rollback"): self._rollback,
            ("POST", "/v1/adapters/gc"): self._gc,
            ("GET", "/v1/audit"): self._audit,
        }

    # --- entry ------------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Reply:
        """Answer one request. Errors come back as replies in OpenAI's shape; only cancellation propagates."""
        request_id = request.headers.get("x-request-id", "")[:128] or uuid.uuid4().hex
        try:
            reply = await self._dispatch(request)
        except asyncio.CancelledError:
            raise
        except Exception as err:
            reply = error_reply(err)
            if reply.status >= 500:
                logger.warning("request %s %s failed: %s: %s", request_id, request.path, type(err).__name__, err)
        reply.headers.setdefault("x-request-id", request_id)
        return reply

    async def _dispatch(self, request: Request) -> Reply:
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.method == "GET" and request.path.startswith("/v1/models/"):
            handler = self._model
        if handler is None:
            allowed = [method for method, path in self._routes if path == request.path]
            if allowed:
                raise ApiError(405, f"{request.method} is not allowed on {request.path}", headers={"allow": allowed[0]})
            raise ApiError(404, f"unknown path {request.path}", code="unknown_url")
        return await handler(request)

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

    # --- state ------------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Reply:
        return Reply(200, {"status": "ok"})

    async def _ready(self, request: Request) -> Reply:
        """200 when the store answers and at least one engine does; else 503 with what is missing."""
        problems = []
        up = 0
        for engine in self._engines.values():
            try:
                await self._info(engine)
                up += 1
            except Exception as err:
                problems.append(f"engine {engine.port.name}: {err}")
        try:
            await self._bounded(self._store.names(""), "store")
        except Exception as err:
            problems.append(f"store: {err}")
        ready = up > 0 and not any(problem.startswith("store") for problem in problems)
        return Reply(200 if ready else 503, {"ready": ready, "engines": up, "problems": problems})

    async def _metrics(self, request: Request) -> Reply:
        self.metrics.running.set(self._running)
        for name, engine in self._engines.items():
            try:
                stats = await asyncio.wait_for(engine.port.stats(), 2.0)
            except Exception as err:
                logger.info("no statistics from engine %s: %s", name, err)
                self.metrics.engine(name, {"up": 0.0})
                continue
            values: dict[str, float] = {
                "up": 1.0,
                "slots_used": len(stats.loaded),
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_usage": stats.kv_usage,
                "steps": stats.steps,
                "mixed_steps": stats.mixed_steps,
                "tenant_rows": stats.tenant_rows,
                "rollout_rows": stats.rollout_rows,
            }
            values |= {f"path_{path}": float(count) for path, count in stats.paths.items()}
            self.metrics.engine(name, values)
        return Reply(200, self.metrics.render(), content_type=CONTENT_TYPE)

    async def _info(self, engine: _Engine) -> EngineInfo:
        if engine.info is None:
            engine.info = await self._bounded(engine.port.info(), f"engine {engine.port.name}")
        return engine.info

    async def _any_info(self) -> EngineInfo:
        """Of the first engine that answers. Raises the last one's error if none does."""
        error: Exception = EngineGone("no engine is configured")
        for engine in self._engines.values():
            try:
                return await self._info(engine)
            except (EngineGone, ApiError) as err:
                error = err
        raise error

    async def _bounded(self, awaitable: Any, what: str, seconds: float | None = None) -> Any:
        seconds = self.config.timeouts.control_s if seconds is None else seconds
        try:
            return await asyncio.wait_for(awaitable, seconds)
        except TimeoutError:
            raise ApiError(
                504, f"{what} did not answer within {seconds:g} s", type="server_error", code="timeout"
            ) from None

    def _base_names(self, info: EngineInfo) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.config.base_names, info.model_name)))

    # --- models -----------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Reply:
        """The base and what the tenant's and the shared names point at; `limit` and `offset` page through them."""
        tenant = self._authenticate(request)
        info = await self._any_info()
        offset, limit = _page(request.query)
        data = []
        if offset == 0 and tenant.base:
            data = [
                wire.model_entry(
                    name, 0, root=info.model_path, digest=info.base_digest, max_model_len=info.max_model_len
                )
                for name in self._base_names(info)
            ]
        page = await self._bounded(self._store.current(self._sees(tenant), offset, limit + 1), "store")
        for version in page[:limit]:
            if tenant.may_use(version.name):
                data.append(self._entry(version, info))
        return Reply(200, {"object": "list", "data": data, "has_more": len(page) > limit})

    def _entry(self, version: AdapterVersion, info: EngineInfo) -> dict[str, Any]:
        other = bool(version.base_digest) and version.base_digest != info.base_digest
        return wire.model_entry(
            version.name,
            int(version.created_s),
            parent=self._base_names(info)[0],
            root=version.ref,
            version=version.version,
            digest=version.digest,
            owner=version.owner,
            other_precision=other,
        )

    async def _model(self, request: Request) -> Reply:
        tenant = self._authenticate(request)
        info = await self._any_info()
        name = request.path.removeprefix("/v1/models/")
        version = await self._resolve(name, tenant, info)
        if version is not None:
            return Reply(200, {**self._entry(version, info), "id": name})
        return Reply(200, wire.model_entry(name, 0, root=info.model_path, digest=info.base_digest))

    async def _versions(self, request: Request) -> Reply:
        """All versions of `?name=`."""
        tenant = self._authenticate(request)
        name = request.query.get("name", "")
        if not tenant.may_use(name):
            raise await self._not_found(name, tenant, await self._any_info())
        versions = await self._bounded(self._store.versions(name, self._sees(tenant)), "store")
        info = await self._any_info()
        return Reply(200, {"object": "list", "data": [{**self._entry(v, info), "id": v.ref} for v in versions]})

    def _sees(self, tenant: TenantConfig) -> str | None:
        return None if tenant.admin else tenant.name

    async def _resolve(self, model: str, tenant: TenantConfig, info: EngineInfo) -> AdapterVersion | None:
        """The version a model name means for this tenant, None for the base. Raises AdapterNotFound, BaseMismatch."""
        base_names = self._base_names(info)
        ref = parse_model(model, base_names)
        if ref.adapter is None:
            if not tenant.base:
                raise await self._not_found(model, tenant, info)
            return None
        try:
            version = await self._bounded(self._store.resolve(ref.adapter, self._sees(tenant)), "store")
        except AdapterNotFound as err:
            if "@" in ref.adapter and "has no version" in str(err) and tenant.may_use(ref.name):
                raise
            raise await self._not_found(model, tenant, info) from err
        if not tenant.may_use(version.name):
            raise await self._not_found(model, tenant, info)
        if version.base_digest and version.base_digest != info.base_digest and not tenant.other_precision:
            raise BaseMismatch(
                f"{version.ref} was trained on base codes {version.base_digest[:12]}, this engine holds"
                f" {info.base_digest[:12]}; ask the operator to allow other_precision, or train it on this base"
            )
        return version

    async def _not_found(self, model: str, tenant: TenantConfig, info: EngineInfo) -> AdapterNotFound:
        names = await self._bounded(self._store.names(self._sees(tenant)), "store")
        return not_found(model, tenant, self._base_names(info), names)

    # --- completions ------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Reply:
        started = self._clock()
        tenant = self._authenticate(request)
        chat = request.path == "/v1/chat/completions"
        status, adapter = 500, "unknown"
        try:
            data = wire.parse_json(request.body)
            call = wire.parse_chat(data) if chat else wire.parse_completion(data)
            if self._running >= self.config.max_running:
                raise ApiError(
                    429, "the server is full", type="rate_limit_error", code="full", headers={"retry-after": "1"}
                )
            info = await self._any_info()
            version = await self._resolve(call.model, tenant, info)
            adapter = version.name if version else "base"
            ticket = _Ticket(self._limiter.admit(tenant, call.estimated_tokens))
            self._running += 1
            try:
                await self._take_turn(ticket, tenant, call)
                job = await self._prepare(tenant, call, version, info=info, ticket=ticket, started=started)
                reply = await (self._streamed(job) if call.stream else self._whole(job))
            except BaseException:
                self._release(ticket)
                raise
            status = reply.status
            return reply
        except asyncio.CancelledError:
            status = 499
            raise
        except Exception as err:
            status = error_reply(err).status
            raise
        finally:
            self.metrics.finished(tenant.name, adapter, status)

    async def _take_turn(self, ticket: _Ticket, tenant: TenantConfig, call: Call) -> None:
        """Wait until it is this tenant's turn. Raises ApiError 429 if too many wait already, or for too long."""
        start = self._clock()
        try:
            ticket.turn = await asyncio.wait_for(
                self._gate.enter(tenant.name, call.estimated_tokens, tenant.weight), self.config.timeouts.queue_s
            )
        except (asyncio.QueueFull, TimeoutError) as err:
            raise ApiError(
                429,
                f"tenant {tenant.name}: {str(err) or 'no turn came in time'}",
                type="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "5"},
            ) from err
        self.metrics.queued(tenant.name, self._clock() - start)

    def _release(self, ticket: _Ticket, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Give back what the request held; once, however it ended."""
        if not ticket.open:
            return
        ticket.open = False
        self._running -= 1
        ticket.lease.release()
        if ticket.turn is not None:
            ticket.turn.finish(service(prompt_tokens, completion_tokens))

    async def _prepare(
        self,
        tenant: TenantConfig,
        call: Call,
        version: AdapterVersion | None,
        *,
        info: EngineInfo,
        ticket: _Ticket,
        started: float,
    ) -> _Job:
        """Choose an engine, load the version there, and spell out one engine request per choice."""
        engine = await self._engine_with(version)
        prompts: Sequence[str | tuple[int, ...]] = call.prompts
        if call.chat:
            messages = [dict(message) for message in call.messages]
            tokens = await self._bounded(engine.port.render_chat(messages, _plain(call.tools)), "chat template")
            prompts = (tuple(tokens),)
        sampling = call.sampling
        if sampling.max_tokens == 0:
            room = info.max_model_len - len(prompts[0])
            if room < 1:
                raise PromptTooLong(f"the prompt has {len(prompts[0])} tokens; the context holds {info.max_model_len}")
            sampling = replace(sampling, max_tokens=room)
        request_id = f"{'chatcmpl' if call.chat else 'cmpl'}-{uuid.uuid4().hex}"
        requests: list[GenerateRequest] = []
        for prompt in prompts:
            for choice in range(call.n):
                seed = None if sampling.seed is None else sampling.seed + choice
                index = len(requests)
                requests.append(
                    GenerateRequest(
                        request_id=f"{request_id}-{index}",
                        prompt=prompt,
                        sampling=replace(sampling, seed=seed),
                        adapter=version.digest if version else None,
                        kind="tenant",
                    )
                )
        fingerprint = version.digest if version else info.base_digest
        identity = Identity(request_id, int(time.time()), call.model, fingerprint)
        return _Job(tenant, call, identity, version, ticket, engine, requests, started)

    def _headers(self, job: _Job) -> dict[str, str]:
        version = job.version
        return {
            "x-epilora-version": version.ref if version else "base",
            "x-epilora-digest": job.identity.fingerprint,
            "x-epilora-engine": job.engine.port.name,
        }

    async def _whole(self, job: _Job) -> Reply:
        completions = await self._generate(job)
        for completion in completions:
            wanted = job.version.digest if job.version else None
            if completion.adapter != wanted:
                raise ApiError(
                    500,
                    f"the engine answered under {completion.adapter}, asked was {wanted}; the answer is withheld",
                    type="server_error",
                    code="wrong_adapter",
                )
        now = self._clock()
        job.completion_tokens = sum(len(completion.token_ids) for completion in completions)
        per_prompt = completions[:: job.call.n]
        job.prompt_tokens = sum(len(completion.prompt_token_ids) for completion in per_prompt)
        first = completions[0]
        if first.ttft_ms:
            job.first_s = now - job.started_s - max(0.0, first.tpot_ms * (len(first.token_ids) - 1)) / 1e3
        self.metrics.latency(
            job.tenant.name, job.adapter_name, job.first_s, first.tpot_ms / 1e3 if first.tpot_ms else None
        )
        choices = [await self._choice(job, index, completion) for index, completion in enumerate(completions)]
        self._settle(job)
        kind = "chat.completion" if job.call.chat else "text_completion"
        body = {
            **job.identity.head(kind),
            "choices": choices,
            "usage": wire.usage(job.prompt_tokens, job.completion_tokens),
        }
        self._release(job.ticket, job.prompt_tokens, job.completion_tokens)
        return Reply(200, body, self._headers(job))

    async def _generate(self, job: _Job) -> list[Completion]:
        """Ask the engine for all choices; again if it had let the version go or died before answering."""
        attempt = 0
        while True:
            engine, done = job.engine, False
            engine.running += 1
            try:
                completions: list[Completion] = await self._bounded(
                    engine.port.generate(job.requests), "the engine", self.config.timeouts.request_s
                )
                done = True
                return completions
            except (AdapterNotFound, EngineGone) as err:
                done = True
                attempt += 1
                await self._again(job, engine, err, attempt)
            except Exception as err:
                done = not isinstance(err, ApiError)  # a timeout leaves the request running in the engine
                raise
            finally:
                engine.running -= 1
                if not done:
                    self._abort(engine, job, [request.request_id for request in job.requests])

    async def _again(self, job: _Job, engine: _Engine, err: Exception, attempt: int) -> None:
        """Prepare a new attempt after the engine let the version go, or died; raise if there have been enough."""
        self._forget(engine, job.version, err)
        if isinstance(err, EngineGone):
            if attempt > 1:
                raise err
        elif attempt >= MAX_RELOADS:
            assert job.version is not None
            raise NoFreeSlot(f"{job.version.ref} was put out of its slot {attempt} times before it ran") from err
        job.engine = await self._engine_with(job.version)

    async def _choice(self, job: _Job, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = await self._logprobs(job, completion.token_ids, completion.logprobs, completion.top_logprobs)
        if not job.call.chat:
            return wire.completion_choice(index, completion.text, completion.finish_reason, logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        finish = completion.finish_reason
        if job.call.tools:
            text, calls = parse_tool_calls(completion.text)
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
                finish = "tool_calls"
        return wire.chat_choice(index, message, finish, logprobs)

    # --- streaming --------------------------------------------------------------------------------------------------

    async def _streamed(self, job: _Job) -> Reply:
        """Wait for the first token, so that errors before it are plain HTTP errors, then stream the rest."""
        queue: asyncio.Queue[tuple[int, TokenChunk | Exception | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(job, index, queue)) for index in range(len(job.requests))]
        try:
            first = await self._bounded(queue.get(), "the first token", self.config.timeouts.first_token_s)
            if isinstance(first[1], Exception):
                raise first[1]
        except BaseException:
            self._stop(job, tasks)
            raise
        events = self._events(job, queue, len(tasks), first)
        stream = EventStream(events, lambda: self._end_stream(job, tasks))
        return Reply(200, stream, self._headers(job), "text/event-stream; charset=utf-8")

    def _end_stream(self, job: _Job, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Once per stream, however it ended: stop the engine requests that still run, settle, count."""
        if not job.ticket.open:
            return
        self._stop(job, tasks)
        choices = len(tasks)
        tpot = None
        if job.first_s is not None and job.last_s is not None and job.completion_tokens > choices:
            tpot = (job.last_s - job.first_s) * choices / (job.completion_tokens - choices)
        self.metrics.latency(job.tenant.name, job.adapter_name, job.first_s, tpot)
        self._settle(job)
        self._release(job.ticket, job.prompt_tokens, job.completion_tokens)

    async def _pump(self, job: _Job, index: int, queue: asyncio.Queue[Any]) -> None:
        """Move one choice's chunks into the queue, then None or the error. A stream that began is not begun again."""
        request, sent, attempt = job.requests[index], False, 0
        while True:
            engine, last = job.engine, None
            engine.running += 1
            job.unfinished.add(request.request_id)
            try:
                async with aclosing(engine.port.stream(request)) as stream:
                    async for chunk in stream:
                        sent, last = True, chunk.finish_reason
                        queue.put_nowait((index, chunk))
                if last is None:
                    raise EngineGone("the engine's stream ended without a reason")
                job.unfinished.discard(request.request_id)
                queue.put_nowait((index, None))
                return
            except (AdapterNotFound, EngineGone) as err:
                job.unfinished.discard(request.request_id)
                attempt += 1
                try:
                    if sent:
                        self._forget(engine, job.version, err)
                        raise
                    await self._again(job, engine, err, attempt)
                except Exception as final:
                    queue.put_nowait((index, final))
                    return
            except Exception as err:
                queue.put_nowait((index, err))
                return
            finally:
                engine.running -= 1

    def _stop(self, job: _Job, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Stop reading; what has not finished in the engine is aborted there."""
        for task in tasks:
            task.cancel()
        if job.unfinished:
            self._abort(job.engine, job, sorted(job.unfinished))
            job.unfinished.clear()

    async def _events(
        self, job: _Job, queue: asyncio.Queue[Any], choices: int, first: tuple[int, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events of one request, as OpenAI words them."""
        head = job.identity.head("chat.completion.chunk" if job.call.chat else "text_completion")
        if job.call.include_usage:
            head["usage"] = None
        offsets, prompt_tokens, open_choices = [0] * choices, [0] * choices, choices
        if job.call.chat:
            for index in range(choices):
                delta = {"role": "assistant", "content": ""}
                yield wire.sse({**head, "choices": [wire.chat_choice(index, delta, None, None, streamed=True)]})
        index, item = first
        while True:
            if isinstance(item, Exception):
                logger.warning("stream %s broke: %s: %s", job.identity.id, type(item).__name__, item)
                self.metrics.broken(job.tenant.name, job.adapter_name)
                yield wire.sse(_api_error(item).body())
                return
            if item is None:
                open_choices -= 1
                if open_choices == 0:
                    break
            else:
                job.last_s = self._clock() - job.started_s
                job.first_s = job.last_s if job.first_s is None else job.first_s
                job.completion_tokens += len(item.token_ids)
                prompt_tokens[index] = max(prompt_tokens[index], item.prompt_tokens)
                job.prompt_tokens = sum(prompt_tokens[:: job.call.n])
                yield wire.sse({**head, "choices": [await self._piece(job, index, item, offsets)]})
            try:
                index, item = await asyncio.wait_for(queue.get(), self.config.timeouts.next_token_s)
            except TimeoutError:
                item = ApiError(504, "no token arrived in time", type="server_error", code="timeout")
        if job.call.include_usage:
            yield wire.sse({**head, "choices": [], "usage": wire.usage(job.prompt_tokens, job.completion_tokens)})
        yield wire.SSE_DONE

    async def _piece(self, job: _Job, index: int, chunk: TokenChunk, offsets: list[int]) -> dict[str, Any]:
        logprobs = await self._logprobs(job, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
        if job.call.chat:
            text, finish = chunk.text, chunk.finish_reason
            calls: list[dict[str, Any]] = []
            if job.call.tools:
                splitter = job.tool_streams.setdefault(index, ToolCallStream())
                text = splitter.push(chunk.text)
                if finish is not None:
                    rest, calls = splitter.finish()
                    text += rest
                    finish = "tool_calls" if calls else finish
            delta: dict[str, Any] = {"content": text} if text or finish is None else {}
            if calls:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            return wire.chat_choice(index, delta, finish, logprobs, streamed=True)
        piece = wire.completion_choice(index, chunk.text, chunk.finish_reason, logprobs, offsets[index])
        offsets[index] += sum(len(token.text) for token in logprobs) if logprobs else len(chunk.text)
        return piece

    def _settle(self, job: _Job) -> None:
        job.ticket.lease.settle(job.prompt_tokens + job.completion_tokens)
        self.metrics.tokens(job.tenant.name, job.adapter_name, job.prompt_tokens, job.completion_tokens)

    def _abort(self, engine: _Engine, job: _Job, request_ids: Sequence[str]) -> None:
        """Tell the engine in the background that nobody reads these any more."""

        async def abort() -> None:
            try:
                await asyncio.wait_for(engine.port.abort(request_ids), 10.0)
            except Exception as err:
                logger.warning("could not abort %s in engine %s: %s", job.identity.id, engine.port.name, err)

        task = asyncio.get_running_loop().create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _logprobs(
        self,
        job: _Job,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]],
    ) -> list[TokenLogprob] | None:
        """Tokens as text with their log-probabilities; None if the request asked for none."""
        wanted = job.call.logprobs
        if wanted is None:
            return None
        needed = {*token_ids, *(token for row in top for token, _ in row)}
        engine = job.engine.port
        missing = [token for token in needed if (engine.name, token) not in self._token_texts]
        if missing:
            texts = await self._bounded(
                asyncio.gather(*(engine.detokenize((token,)) for token in missing)), "detokenizer"
            )
            self._token_texts.update({(engine.name, token): text for token, text in zip(missing, texts, strict=True)})
        text_of = self._token_texts
        out = []
        for position, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            row = sorted(top[position], key=lambda pair: -pair[1])[:wanted] if position < len(top) else []
            named = tuple((text_of[engine.name, other], value) for other, value in row)
            out.append(TokenLogprob(text_of[engine.name, token], logprob, named))
        return out

    # --- engines and adapters -------------------------------------------------------------------------------------

    def _loads(self) -> list[EngineLoad]:
        now = self._clock()
        return [
            EngineLoad(name, frozenset(engine.resident), engine.running, now >= engine.dead_until_s)
            for name, engine in self._engines.items()
        ]

    async def _engine_with(self, version: AdapterVersion | None) -> _Engine:
        """An engine that holds the version, loading it if need be.

        Raises EngineGone, NoFreeSlot, AdapterRejected ...
        """
        chosen = self._choose(self._loads(), version.digest if version else None)
        if chosen is None:
            raise EngineGone("no engine is alive; try again in a few seconds")
        engine = self._engines[chosen]
        if version is None:
            return engine
        deadline = self._clock() + self.config.timeouts.slot_s
        while True:
            try:
                await self._load(engine, version)
                return engine
            except EngineGone as err:
                self._forget(engine, version, err)
                raise
            except NoFreeSlot:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _load(self, engine: _Engine, version: AdapterVersion) -> LoadReceipt:
        """Load once however many ask; the load goes on if one who asked gives up."""
        receipt = engine.resident.get(version.digest)
        if receipt is not None:
            return receipt
        task = engine.loading.get(version.digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load_now(engine, version))
            engine.loading[version.digest] = task
            task.add_done_callback(lambda done: _finish(engine.loading, version.digest, done))
        return await asyncio.shield(task)

    async def _load_now(self, engine: _Engine, version: AdapterVersion) -> LoadReceipt:
        start = self._clock()
        try:
            receipt: LoadReceipt = await self._bounded(
                engine.port.load_adapter(version, self._store.tensors(version.digest)),
                f"loading {version.ref}",
                self.config.timeouts.load_s,
            )
        except Exception as err:
            self.metrics.loaded(type(err).__name__, self._clock() - start)
            raise
        if receipt.digest != version.digest or receipt.readback_digest != receipt.expected_digest:
            self.metrics.loaded("wrong_readback", self._clock() - start)
            raise ApiError(
                500,
                f"{version.ref} did not arrive intact in slot {receipt.slot}: read back {receipt.readback_digest[:12]},"
                f" expected {receipt.expected_digest[:12]}",
                type="server_error",
                code="load_corrupt",
            )
        self.metrics.loaded("ok", self._clock() - start)
        engine.resident[version.digest] = receipt
        return receipt

    def _forget(self, engine: _Engine, version: AdapterVersion | None, err: Exception) -> None:
        """The engine let a version go (it will be loaded again), or is gone itself."""
        if isinstance(err, EngineGone):
            logger.warning("engine %s is gone: %s", engine.port.name, err)
            engine.resident.clear()
            engine.info = None
            if len(self._engines) > 1:
                engine.dead_until_s = self._clock() + 5.0
        elif version is not None:
            engine.resident.pop(version.digest, None)

    # --- administration -------------------------------------------------------------------------------------------

    async def _load_lora(self, request: Request) -> Reply:
        """vLLM's call: {"lora_name", "lora_path"}; also "owner". Imports a PEFT folder after preflight and loads it."""
        admin = self._authenticate_admin(request)
        data = wire.parse_json(request.body)
        name, path, owner = _text(data, "lora_name"), _text(data, "lora_path"), _text(data, "owner", "")
        info = await self._any_info()
        if name in self._base_names(info):
            raise ApiError(400, f"{name!r} is the base's name; an adapter needs another", param="lora_name")
        tenant = self._registry.get(owner)
        quota = (tenant.max_adapters, tenant.max_adapter_bytes) if tenant else (0, 0)
        version = await self._bounded(
            self._store.call(
                "import_peft",
                path,
                name,
                owner=owner,
                quota=quota,
                actor=admin.name,
                base_checkpoint=info.model_path,
                linear_modules=info.linear_modules,
                max_rank=info.max_lora_rank,
                base_model=info.model_name,
                base_digest=info.base_digest,
                import_roots=self.config.import_roots,
            ),
            "import",
            self.config.timeouts.load_s,
        )
        engine = await self._engine_with(version)
        receipt = engine.resident[version.digest]
        await self._bounded(
            self._store.call(
                "note",
                "load",
                actor=admin.name,
                ref=version,
                detail={"engine": engine.port.name, "slot": receipt.slot, "modules": receipt.modules},
            ),
            "store",
        )
        text = (
            f"Success: LoRA adapter '{name}' added successfully as {version.ref}:"
            f" {receipt.modules} of {receipt.base_modules} modules covered."
        )
        headers = {"x-epilora-version": version.ref, "x-epilora-digest": version.digest}
        return Reply(200, text.encode(), headers, "text/plain; charset=utf-8")

    async def _unload_lora(self, request: Request) -> Reply:
        """vLLM's call: {"lora_name"}. Forgets the name and frees its slots once no request uses them."""
        admin = self._authenticate_admin(request)
        data = wire.parse_json(request.body)
        name, owner = _text(data, "lora_name"), _text(data, "owner", "")
        digests = await self._bounded(self._store.call("delete", name, owner=owner or None, actor=admin.name), "store")
        for engine in self._engines.values():
            for digest in digests:
                if engine.resident.pop(digest, None) is not None:
                    try:
                        await self._bounded(engine.port.unload_adapter(digest), f"engine {engine.port.name}")
                    except (AdapterNotFound, EngineGone) as err:
                        logger.info("unload of %s from %s: %s", digest[:12], engine.port.name, err)
        text = f"Success: LoRA adapter '{name}' removed successfully."
        return Reply(200, text.encode(), content_type="text/plain; charset=utf-8")

    async def _promote(self, request: Request) -> Reply:
        """{"name", "version", "owner"}: point the name at that version."""
        admin = self._authenticate_admin(request)
        data = wire.parse_json(request.body)
        number = data.get("version")
        if type(number) is not int or number < 1:
            raise ApiError(400, "version must be a whole number from 1", param="version")
        version = await self._bounded(
            self._store.call(
                "promote", _text(data, "name"), number, owner=_text(data, "owner", "") or None, actor=admin.name
            ),
            "store",
        )
        return Reply(200, self._entry(version, await self._any_info()))

    async def _rollback(self, request: Request) -> Reply:
        """{"name", "owner"}: point the name at what it pointed at before."""
        admin = self._authenticate_admin(request)
        data = wire.parse_json(request.body)
        version = await self._bounded(
            self._store.call("rollback", _text(data, "name"), owner=_text(data, "owner", "") or None, actor=admin.name),
            "store",
        )
        return Reply(200, self._entry(version, await self._any_info()))

    async def _gc(self, request: Request) -> Reply:
        """{"keep_latest"}: drop old versions."""
        admin = self._authenticate_admin(request)
        data = wire.parse_json(request.body or b"{}")
        keep = data.get("keep_latest", 3)
        if type(keep) is not int or keep < 1:
            raise ApiError(400, "keep_latest must be a whole number from 1", param="keep_latest")
        removed = await self._bounded(self._store.call("gc", keep, actor=admin.name), "store", 60.0)
        return Reply(200, {"removed": removed})

    async def _audit(self, request: Request) -> Reply:
        """Audit rows after `?after_id=`."""
        self._authenticate_admin(request)
        _, limit = _page(request.query)
        after = _whole_number(request.query, "after_id", 0, 1 << 62)
        rows = await self._bounded(self._store.call("audit", after_id=after, limit=limit), "store")
        return Reply(200, {"object": "list", "data": [vars(row) for row in rows]})


def _finish(loading: dict[str, asyncio.Task[LoadReceipt]], digest: str, task: asyncio.Task[LoadReceipt]) -> None:
    loading.pop(digest, None)
    if not task.cancelled():
        task.exception()  # retrieved here in case everyone who waited has gone


def _plain(tools: Any) -> Any:
    return None if tools is None else [dict(tool) for tool in tools]


def _page(query: Mapping[str, str]) -> tuple[int, int]:
    return _whole_number(query, "offset", 0, 1 << 31), _whole_number(query, "limit", 1000, 1000) or 1


def _whole_number(query: Mapping[str, str], name: str, default: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > high:
        raise ApiError(400, f"{name}={text!r} must be a whole number from 0 to {high}", param=name)
    return int(text)


def _text(data: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = data.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, str) or (not value and default is None) or len(value) > 4096:
        raise ApiError(400, f"{name} must be a text", param=name)
    return value


def error_reply(err: Exception) -> Reply:
    """The HTTP reply an exception means, in OpenAI's error shape."""
    api = _api_error(err)
    return Reply(api.status, api.body(), dict(api.headers))


def _api_error(err: Exception) -> ApiError:
    text = str(err)
    if isinstance(err, ApiError):
        return err
    if isinstance(err, Unauthorized):
        return ApiError(
            401, text, type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
    if isinstance(err, RateLimited):
        retry = {"retry-after": str(max(1, int(err.retry_after_s + 0.999)))}
        return ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", param=err.limit, headers=retry)
    if isinstance(err, AdapterNotFound):
        return ApiError(404, text, code="model_not_found", param="model")
    if isinstance(err, PromptTooLong):
        return ApiError(400, text, code="context_length_exceeded", param="prompt")
    if isinstance(err, AdapterRejected):
        return ApiError(400, text, code="adapter_rejected")
    if isinstance(err, BaseMismatch):
        return ApiError(409, text, code="base_mismatch", param="model")
    if isinstance(err, NoFreeSlot):
        return ApiError(503, text, type="server_error", code="no_free_slot", headers={"retry-after": "1"})
    if isinstance(err, EngineGone):
        return ApiError(503, text, type="server_error", code="engine_unavailable", headers={"retry-after": "5"})
    if isinstance(err, ValueError):
        return ApiError(400, text)
    return ApiError(500, f"internal error: {type(err).__name__}", type="server_error", code="internal_error")
