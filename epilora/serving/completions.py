"""A completion from the tenant's request to the reply.

check the body -> resolve the model name -> limits -> a fair turn -> choose an engine and load the version there
-> generate or stream -> settle the limits
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from epilora.errors import AdapterNotFound, NoFreeSlot, PromptTooLong
from epilora.fairness.counters import service
from epilora.types import AdapterVersion, Completion, EngineInfo, GenerateRequest, TokenChunk

from . import openai_api as wire
from .catalog import Catalog
from .fleet import Fleet, FleetEngine
from .gate import FairGate
from .limits import Limits
from .messages import Reply, api_error, bounded, random_id, wrong_adapter
from .metrics import ServingMetrics
from .openai_api import ApiError, Call, Identity, TokenLogprob
from .ports import EngineGone
from .prefixes import block_keys
from .requests import Job, Ticket
from .settings import CoreConfig
from .streaming import Streamed
from .tenants import TenantConfig

MAX_RELOADS = 5
logger = logging.getLogger(__name__)


class Completions:
    """See the module's docstring. running: requests between admission and end."""

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        *,
        limits: Limits,
        config: CoreConfig,
        metrics: ServingMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._catalog, self._config, self._metrics, self._clock = fleet, catalog, config, metrics, clock
        self._limits = limits
        self.gate = FairGate(config.max_active, config.max_queue, config.max_active // 4)
        self._token_texts: dict[tuple[str, int], str] = {}
        self.running = 0

    async def answer(self, tenant: TenantConfig, body: bytes, *, chat: bool, request_id: str = "") -> Reply:
        """Answer /v1/chat/completions or /v1/completions, whole or as a stream. request_id: the HTTP request's."""
        started = self._clock()
        status, adapter, code = 500, "unknown", None
        try:
            data = wire.parse_json(body)
            call = wire.parse_chat(data) if chat else wire.parse_completion(data)
            if self.running >= self._config.max_running:
                raise ApiError(
                    429, "the server is full", type="rate_limit_error", code="full", headers={"retry-after": "1"}
                )
            info = await self._fleet.once_up(self._fleet.any_info)
            version = await self._catalog.resolve(call.model, tenant, info)
            adapter = version.name if version else "base"
            ticket = Ticket(await self._limits.admit(tenant, call.estimated_tokens), request_id)
            self.running += 1
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
            refusal = api_error(err)
            status, code = refusal.status, refusal.code
            raise
        finally:
            self._metrics.finished(tenant.name, adapter, status)
            if status != 200:  # answered ones are logged when they end
                fields = {"request_id": request_id, "tenant": tenant.name, "adapter": adapter, "status": status}
                ms = round((self._clock() - started) * 1e3, 2)
                logger.info("completion", extra={"fields": {**fields, "code": code, "ms": ms}})

    async def _take_turn(self, ticket: Ticket, tenant: TenantConfig, call: Call) -> None:
        """Wait until it is this tenant's turn. Raises ApiError 429 if too many wait already, or for too long."""
        start = self._clock()
        try:
            async with asyncio.timeout(self._config.timeouts.queue_s):
                ticket.turn = await self.gate.enter(tenant.name, call.estimated_tokens, tenant.weight)
        except (asyncio.QueueFull, TimeoutError) as err:
            raise ApiError(
                429,
                f"tenant {tenant.name}: {str(err) or 'no turn came in time'}",
                type="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "5"},
            ) from err
        ticket.queued_s = self._clock() - start
        self._metrics.queued(tenant.name, ticket.queued_s)

    def _release(self, ticket: Ticket, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Give back what the request held; once, however it ended."""
        if not ticket.open:
            return
        ticket.open = False
        self.running -= 1
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
        ticket: Ticket,
        started: float,
    ) -> Job:
        """Choose an engine, load the version there, and spell out one engine request per choice."""
        prompts: Sequence[str | tuple[int, ...]] = call.prompts
        text = "\n".join(str(message["content"]) for message in call.messages) if call.chat else call.prompts[0]
        engine = await self._fleet.engine_with(version, block_keys(text, version.digest if version else None))
        if call.chat:
            messages = [dict(message) for message in call.messages]
            tokens = await bounded(
                engine.port.render_chat(messages, _plain(call.tools)), "chat template", self._config.timeouts.control_s
            )
            prompts = (tuple(tokens),)
        sampling = call.sampling
        if sampling.max_tokens == 0:
            room = info.max_model_len - len(prompts[0])
            if room < 1:
                raise PromptTooLong(f"the prompt has {len(prompts[0])} tokens; the context holds {info.max_model_len}")
            sampling = replace(sampling, max_tokens=room)
        request_id = f"{'chatcmpl' if call.chat else 'cmpl'}-{random_id()}"
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
                        client=tenant.name,
                        weight=tenant.weight,
                        ttft_budget_ms=self._budget_ms(tenant, started),
                    )
                )
        fingerprint = version.digest if version else info.base_digest
        identity = Identity(request_id, int(time.time()), call.model, fingerprint)
        return Job(tenant, call, identity, version, ticket, engine, requests, started)

    def _budget_ms(self, tenant: TenantConfig, started: float) -> float:
        """What is left of the tenant's promised time to first token, at least 1 ms; 0 if it has no promise."""
        if not tenant.p99_ttft_ms:
            return 0.0
        return max(1.0, tenant.p99_ttft_ms - (self._clock() - started) * 1e3)

    def _headers(self, job: Job) -> dict[str, str]:
        version = job.version
        return {
            "x-epilora-version": version.ref if version else "base",
            "x-epilora-digest": job.identity.fingerprint,
            "x-epilora-engine": job.engine.port.name,
        }

    async def _whole(self, job: Job) -> Reply:
        completions = await self._generate(job)
        for completion in completions:
            wanted = job.version.digest if job.version else None
            if completion.adapter != wanted:
                raise wrong_adapter(completion.adapter, wanted)
        job.completion_tokens = sum(len(completion.token_ids) for completion in completions)
        per_prompt = completions[:: job.call.n]
        job.prompt_tokens = sum(len(completion.prompt_token_ids) for completion in per_prompt)
        first = completions[0]
        if first.ttft_ms:
            job.first_s = self.since(job) - max(0.0, first.tpot_ms * (len(first.token_ids) - 1)) / 1e3
        choices = [await self._choice(job, index, completion) for index, completion in enumerate(completions)]
        kind = "chat.completion" if job.call.chat else "text_completion"
        body = {
            **job.identity.head(kind),
            "choices": choices,
            "usage": wire.usage(job.prompt_tokens, job.completion_tokens),
        }
        self.end(job, first.tpot_ms / 1e3 if first.tpot_ms else None)
        return Reply(200, body, self._headers(job))

    async def _generate(self, job: Job) -> list[Completion]:
        """Ask the engine for all choices; again if it had let the version go or died before answering."""
        attempt = 0
        while True:
            engine, done = job.engine, False
            engine.running += 1
            try:
                completions: list[Completion] = await bounded(
                    engine.port.generate(job.requests), "the engine", self._config.timeouts.request_s
                )
                done = True
                return completions
            except (AdapterNotFound, EngineGone) as err:
                done = True
                attempt += 1
                await self.again(job, engine, err, attempt)
            except Exception as err:
                done = not isinstance(err, ApiError)  # a timeout leaves the request running in the engine
                raise
            finally:
                engine.running -= 1
                if not done:
                    self._fleet.abort(engine, job.identity.id, [request.request_id for request in job.requests])

    async def again(self, job: Job, engine: FleetEngine, err: Exception, attempt: int) -> None:
        """Prepare a new attempt after the engine let the version go, or died; raise if there have been enough."""
        self._fleet.forget(engine, job.version, err)
        if isinstance(err, EngineGone):
            if attempt > 1:
                raise err
        elif attempt >= MAX_RELOADS:
            assert job.version is not None
            raise NoFreeSlot(f"{job.version.ref} was put out of its slot {attempt} times before it ran") from err
        job.engine = await self._fleet.engine_with(job.version)

    async def _choice(self, job: Job, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = await self.logprobs(job, completion)
        if not job.call.chat:
            return wire.completion_choice(index, completion.text, completion.finish_reason, logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        finish = completion.finish_reason
        if job.call.tools:
            text, calls = await self.tool_calls(job, completion.text)
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
                finish = "tool_calls"
        return wire.chat_choice(index, message, finish, logprobs)

    async def tool_calls(self, job: Job, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(text without the calls, calls) as the engine's parser reads it."""
        parsed = job.engine.port.parse_tools(text, _plain(job.call.tools))
        return await bounded(parsed, "the tool parser", self._config.timeouts.control_s)

    async def _streamed(self, job: Job) -> Reply:
        if job.call.tools:
            start = job.engine.port.tool_call_start()
            job.tool_start = await bounded(start, "the tool parser", self._config.timeouts.control_s)
        stream = await Streamed(job, self, self._fleet, self._config.timeouts).start()
        return Reply(200, stream, self._headers(job), "text/event-stream; charset=utf-8")

    def since(self, job: Job) -> float:
        """Seconds since the request came in."""
        return self._clock() - job.started_s

    def broken(self, job: Job) -> None:
        job.broken = True
        self._metrics.broken(job.tenant.name, job.adapter_name)

    def end(self, job: Job, tpot_s: float | None) -> None:
        """Count what the request took and give back what it held."""
        tenant, adapter = job.tenant.name, job.adapter_name
        self._metrics.latency(tenant, adapter, job.first_s, tpot_s)
        self._metrics.tokens(tenant, adapter, job.prompt_tokens, job.completion_tokens)
        job.ticket.lease.settle(job.prompt_tokens + job.completion_tokens)
        self._release(job.ticket, job.prompt_tokens, job.completion_tokens)
        if logger.isEnabledFor(logging.INFO):
            logger.info("completion", extra={"fields": self._line(job)})

    def _line(self, job: Job) -> dict[str, Any]:
        """What the log says of an answered request. id: what the client sees in the answer, and engines' logs carry."""
        return {
            "request_id": job.ticket.request_id,
            "id": job.identity.id,
            "tenant": job.tenant.name,
            "adapter": job.adapter_name,
            "version": job.version.version if job.version else None,
            "digest": job.identity.fingerprint[:12],
            "engine": job.engine.port.name,
            "status": 200,
            "stream": job.call.stream,
            "broken": job.broken,
            "queue_ms": round(job.ticket.queued_s * 1e3, 2),
            "ttft_ms": None if job.first_s is None else round(job.first_s * 1e3, 2),
            "ms": round(self.since(job) * 1e3, 2),
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
        }

    async def logprobs(self, job: Job, piece: Completion | TokenChunk) -> list[TokenLogprob] | None:
        """Tokens as text with their log-probabilities; None if the request asked for none."""
        wanted = job.call.logprobs
        if wanted is None:
            return None
        top = piece.top_logprobs
        needed = {*piece.token_ids, *(token for row in top for token, _ in row)}
        engine = job.engine.port
        missing = [token for token in needed if (engine.name, token) not in self._token_texts]
        if missing:
            texts = await bounded(
                asyncio.gather(*(engine.detokenize((token,)) for token in missing)),
                "detokenizer",
                self._config.timeouts.control_s,
            )
            self._token_texts.update({(engine.name, token): text for token, text in zip(missing, texts, strict=True)})
        text_of = self._token_texts
        out = []
        for position, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
            row = sorted(top[position], key=lambda pair: -pair[1])[:wanted] if position < len(top) else []
            named = tuple((text_of[engine.name, other], value) for other, value in row)
            out.append(TokenLogprob(text_of[engine.name, token], logprob, named))
        return out


def _plain(tools: Any) -> Any:
    return None if tools is None else [dict(tool) for tool in tools]
