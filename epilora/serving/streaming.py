"""A streamed completion: chunks of all choices from the engine, merged into server-sent events as OpenAI words them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from epilora.errors import AdapterNotFound
from epilora.types import TokenChunk

from . import openai_api as wire
from .fleet import Fleet, FleetEngine
from .messages import EventStream, api_error, bounded, wrong_adapter
from .openai_api import ApiError, TokenLogprob
from .ports import EngineGone
from .requests import Job
from .settings import Timeouts
from .tool_calls import ToolCallStream

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What a stream needs of `Completions`."""

    def since(self, job: Job) -> float:
        """Seconds since the request came in."""
        ...

    async def again(self, job: Job, engine: FleetEngine, err: Exception, attempt: int) -> None: ...

    async def logprobs(self, job: Job, chunk: TokenChunk) -> list[TokenLogprob] | None: ...

    async def tool_calls(self, job: Job, text: str) -> tuple[str, list[dict[str, Any]]]: ...

    def broken(self, job: Job) -> None: ...

    def end(self, job: Job, tpot_s: float | None) -> None: ...


class Streamed:
    """One request's stream. `start` once, then read its EventStream and close it."""

    def __init__(self, job: Job, owner: Owner, fleet: Fleet, timeouts: Timeouts) -> None:
        self._job, self._owner, self._fleet, self._timeouts = job, owner, fleet, timeouts
        self._queue: asyncio.Queue[tuple[int, TokenChunk | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        choices = len(job.requests)
        self._offsets, self._prompt_tokens = [0] * choices, [0] * choices

    async def start(self) -> EventStream:
        """Wait for the first token, so that errors before it are plain HTTP errors, then hand out the rest."""
        self._tasks = [asyncio.create_task(self._pump(index)) for index in range(len(self._job.requests))]
        try:
            first = await bounded(self._queue.get(), "the first token", self._timeouts.first_token_s)
            if isinstance(first[1], Exception):
                raise first[1]
        except BaseException:
            self._stop()
            raise
        return EventStream(self._events(first), self._end)

    def _end(self) -> None:
        """However the stream ended: stop the engine requests that still run, settle, count."""
        job, choices = self._job, len(self._tasks)
        if not job.ticket.open:
            return
        self._stop()
        tpot = None
        if job.first_s is not None and job.last_s is not None and job.completion_tokens > choices:
            tpot = (job.last_s - job.first_s) * choices / (job.completion_tokens - choices)
        self._owner.end(job, tpot)

    def _stop(self) -> None:
        """Stop reading; what has not finished in the engine is aborted there."""
        for task in self._tasks:
            task.cancel()
        job = self._job
        for engine in {id(engine): engine for engine in job.unfinished.values()}.values():
            here = sorted(request for request, where in job.unfinished.items() if where is engine)
            self._fleet.abort(engine, job.identity.id, here)
        job.unfinished.clear()

    async def _pump(self, index: int) -> None:
        """Move one choice's chunks into the queue, then None or the error. A stream that began is not begun again."""
        job, queue = self._job, self._queue
        request, sent, attempt = job.requests[index], False, 0
        while True:
            engine, last = job.engine, None
            engine.running += 1
            job.unfinished[request.request_id] = engine
            try:
                async with aclosing(engine.port.stream(request)) as stream:
                    async for chunk in stream:
                        if chunk.adapter != request.adapter:
                            raise wrong_adapter(chunk.adapter, request.adapter)
                        sent, last = True, chunk.finish_reason
                        queue.put_nowait((index, chunk))
                if last is None:
                    raise EngineGone("the engine's stream ended without a reason")
                job.unfinished.pop(request.request_id, None)
                queue.put_nowait((index, None))
                return
            except (AdapterNotFound, EngineGone) as err:
                job.unfinished.pop(request.request_id, None)
                attempt += 1
                try:
                    if sent:
                        self._fleet.forget(engine, job.version, err)
                        raise
                    await self._owner.again(job, engine, err, attempt)
                except Exception as final:
                    queue.put_nowait((index, final))
                    return
            except Exception as err:
                queue.put_nowait((index, err))
                return
            finally:
                engine.running -= 1

    async def _events(self, first: tuple[int, Any]) -> AsyncGenerator[bytes, None]:
        job = self._job
        choices = open_choices = len(job.requests)
        head = job.identity.head("chat.completion.chunk" if job.call.chat else "text_completion")
        if job.call.include_usage:
            head["usage"] = None
        if job.call.chat:
            for index in range(choices):
                delta = {"role": "assistant", "content": ""}
                yield wire.sse({**head, "choices": [wire.chat_choice(index, delta, None, None, streamed=True)]})
        index, item = first
        while True:
            if isinstance(item, Exception):
                logger.warning("stream %s broke: %s: %s", job.identity.id, type(item).__name__, item)
                self._owner.broken(job)
                yield wire.sse(api_error(item).body())
                return
            if item is None:
                open_choices -= 1
                if open_choices == 0:
                    break
            else:
                self._count(index, item)
                try:
                    piece = await self._piece(index, item)
                except Exception as err:  # the engine died between the token and what it was asked about it
                    item = err
                    continue
                yield wire.sse({**head, "choices": [piece]})
            try:
                async with asyncio.timeout(self._timeouts.next_token_s):
                    index, item = await self._queue.get()
            except TimeoutError:
                item = ApiError(504, "no token arrived in time", type="server_error", code="timeout")
        if job.call.include_usage:
            yield wire.sse({**head, "choices": [], "usage": wire.usage(job.prompt_tokens, job.completion_tokens)})
        yield wire.SSE_DONE

    def _count(self, index: int, chunk: TokenChunk) -> None:
        job = self._job
        job.last_s = self._owner.since(job)
        job.first_s = job.last_s if job.first_s is None else job.first_s
        job.completion_tokens += len(chunk.token_ids)
        self._prompt_tokens[index] = max(self._prompt_tokens[index], chunk.prompt_tokens)
        job.prompt_tokens = sum(self._prompt_tokens[:: job.call.n])

    async def _piece(self, index: int, chunk: TokenChunk) -> dict[str, Any]:
        """The choice of one event."""
        job = self._job
        logprobs = await self._owner.logprobs(job, chunk)
        if not job.call.chat:
            piece = wire.completion_choice(index, chunk.text, chunk.finish_reason, logprobs, self._offsets[index])
            self._offsets[index] += sum(len(token.text) for token in logprobs) if logprobs else len(chunk.text)
            return piece
        text, finish = chunk.text, chunk.finish_reason
        calls: list[dict[str, Any]] = []
        if job.call.tools:
            splitter = job.tool_streams.setdefault(index, ToolCallStream(job.tool_start))
            text = splitter.push(chunk.text)
            if finish is not None and (held := splitter.finish()):
                rest, calls = await self._owner.tool_calls(job, held)
                text += rest
                finish = "tool_calls" if calls else finish
        delta: dict[str, Any] = {"content": text} if text or finish is None else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return wire.chat_choice(index, delta, finish, logprobs, streamed=True)
