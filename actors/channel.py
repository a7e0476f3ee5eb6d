"""A router's requests to an engine and the answers, over one stream that stays open, in batches.

A Ray call costs both processes more than a short request's own work. What a router asks in one turn of its event loop goes
in one call (`submit`), which returns nothing; answers and streamed tokens come back through one streaming call (`answers`),
as many at a time as are ready. Under load both wait until GAP_S after the one before, and carry more; otherwise nothing waits.

    router: Channel.generate, Channel.stream  --submit-->  engine actor: AnswersInBatches  --answers-->  router
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from epilora.types import Completion, GenerateRequest, TokenChunk

GAP_S = 0.002
IDLE_S = 60.0  # a stream without requests ends, so that one whose router died does not stay for ever
Call = tuple[int, str, Any]  # number, "generate" or "stream", what to ask
Answer = tuple[int, Any, bool]  # number, a value or an exception, is it the last of this call

logger = logging.getLogger(__name__)


class _Outbox:
    """What is ready for one router, and what is still being made."""

    def __init__(self) -> None:
        self.making: set[asyncio.Task[None]] = set()
        self._ready: list[Answer] = []
        self._filled = asyncio.Event()

    def put(self, answer: Answer) -> None:
        self._ready.append(answer)
        self._filled.set()

    async def take(self, seconds: float) -> list[Answer]:
        """Everything that is ready, at least one answer; [] if none came in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._filled.wait()
        except TimeoutError:
            return []
        self._filled.clear()
        ready, self._ready = self._ready, []
        return ready


class AnswersInBatches:
    """Mixin of an async engine actor that has `generate` and `stream`."""

    def _outbox(self, router: str) -> _Outbox:
        boxes: dict[str, _Outbox] = self.__dict__.setdefault("_outboxes", {})
        if router not in boxes:
            boxes[router] = _Outbox()
        return boxes[router]

    async def submit(self, router: str, calls: Sequence[Call]) -> None:
        """Begin these; their answers go to whoever reads `answers(router)`."""
        box = self._outbox(router)
        for number, kind, asked in calls:
            task = asyncio.create_task(self._make(box, number, kind, asked))
            box.making.add(task)
            task.add_done_callback(box.making.discard)

    async def _make(self, box: _Outbox, number: int, kind: str, asked: Any) -> None:
        engine: Any = self
        try:
            if kind == "stream":
                async for chunk in engine.stream(asked):
                    box.put((number, chunk, False))
                box.put((number, None, True))
            else:
                box.put((number, await engine.generate(asked), True))
        except Exception as err:
            box.put((number, _portable(err), True))

    async def answers(self, router: str) -> AsyncGenerator[list[Answer], None]:
        """Batches of answers as they come. Ends when nothing was asked for IDLE_S; the router opens it again."""
        box, clock = self._outbox(router), asyncio.get_running_loop().time
        while True:
            ready = await box.take(IDLE_S)
            if ready:
                sent_s = clock()
                yield ready
                await asyncio.sleep(max(0.0, sent_s + GAP_S - clock()))
            elif not box.making:
                self.__dict__["_outboxes"].pop(router, None)
                return


def _portable(err: Exception) -> Exception:
    """The error, or its text if it cannot travel."""
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:
        return RuntimeError(f"{type(err).__name__}: {err}")
    return err


class Channel:
    """A router's end. One event loop owns it. unwrap: what an error of the transport means to the caller.

    Once `lost`, it is of no more use; everything that waited has been told.
    """

    def __init__(self, handle: Any, unwrap: Callable[[Exception], Exception]) -> None:
        self._handle, self._unwrap, self._name = handle, unwrap, uuid.uuid4().hex
        self._waiting: dict[int, asyncio.Queue[Answer]] = {}
        self._unsent: list[Call] = []
        self._reader: asyncio.Task[None] | None = None
        self._number = 0
        self._sending, self._sent_s = False, float("-inf")
        self.lost = False

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All of `requests`. Raises what the engine raised, or what `unwrap` makes of a lost engine."""
        number, answers = self._ask("generate", list(requests))
        try:
            _, value, _ = await answers.get()
        finally:
            self._forget(number)
        if isinstance(value, Exception):
            raise value
        return value

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one request. Raises as `generate`. Whoever stops reading aborts the request himself."""
        number, answers = self._ask("stream", request)
        try:
            while True:
                _, value, last = await answers.get()
                if isinstance(value, Exception):
                    raise value
                if last:
                    return
                yield value
        finally:
            self._forget(number)

    def _ask(self, kind: str, asked: Any) -> tuple[int, asyncio.Queue[Answer]]:
        self._number += 1
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._waiting[self._number] = answers
        self._unsent.append((self._number, kind, asked))
        loop = asyncio.get_running_loop()
        if not self._sending:
            self._sending = True
            loop.call_at(self._sent_s + GAP_S, self._send)  # in the past: as soon as this turn is over
        if self._reader is None:
            self._reader = loop.create_task(self._read())
        return self._number, answers

    def _forget(self, number: int) -> None:
        """Nobody waits for this call any more. One that has not been sent never is: an `abort` would come before it."""
        self._waiting.pop(number, None)
        self._unsent = [call for call in self._unsent if call[0] != number]

    def _send(self) -> None:
        calls, self._unsent = self._unsent, []
        self._sending, self._sent_s = False, asyncio.get_running_loop().time()
        if calls and not self.lost:
            self._handle.submit.options(num_returns=0).remote(self._name, calls)

    async def _read(self) -> None:
        try:
            while self._waiting:
                async for reference in self._handle.answers.options(num_returns="streaming").remote(self._name):
                    for answer in await reference:
                        queue = self._waiting.get(answer[0])
                        if queue is not None:  # else nobody waits for it any more
                            queue.put_nowait(answer)
            self._reader = None
        except Exception as err:
            self.lost = True
            reason = self._unwrap(err)
            logger.info("the stream of answers broke: %s: %s", type(reason).__name__, reason)
            for number, queue in self._waiting.items():
                queue.put_nowait((number, reason, True))
