"""A router's end and an engine's of the stream of answers, over a plain object that carries calls as Ray does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actors import channel
from actors.channel import AnswersInBatches, Channel
from epilora.errors import AdapterNotFound
from epilora.types import Completion, GenerateRequest, Sampling, TokenChunk


class Engine(AnswersInBatches):
    """Answers when told to: `release` lets what waits go on."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls: list[int] = []

    async def submit(self, router: str, calls: Sequence[channel.Call]) -> None:
        self.calls.append(len(calls))
        await super().submit(router, calls)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        await self.go.wait()
        if requests[0].adapter == "gone":
            raise AdapterNotFound("gone is not loaded")
        if requests[0].adapter == "odd":
            raise Odd(lambda: None)
        return [Completion(r.request_id, (1,), (2,), r.request_id, (0.0,), "stop") for r in requests]

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        for index in range(3):
            yield TokenChunk(request.request_id, (index,), f"{request.request_id}{index}", (0.0,))
            await self.go.wait()


class Odd(Exception):
    """Cannot be pickled."""


class Lost(Exception):
    pass


class Carrier:
    """Calls as Ray makes them: they return at once, what they give is awaited."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.opened, self.cut = engine, 0, asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)

    def call(self, name: str, *args: Any) -> Any:
        if name == "answers":
            self.opened += 1
            return self._references(args[0])
        task = asyncio.get_running_loop().create_task(getattr(self._engine, name)(*args))
        self._tasks.add(task)
        return task

    async def _references(self, router: str) -> AsyncIterator[Any]:
        batches = self._engine.answers(router)
        while True:
            following = asyncio.ensure_future(anext(batches))
            cut = asyncio.ensure_future(self.cut.wait())
            await asyncio.wait({following, cut}, return_when=asyncio.FIRST_COMPLETED)
            if self.cut.is_set():
                following.cancel()
                raise Lost("the actor died")
            cut.cancel()
            try:
                batch = await following
            except StopAsyncIteration:
                return
            reference: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            reference.set_result(batch)
            yield reference


class _Method:
    def __init__(self, carrier: Carrier, name: str) -> None:
        self._carrier, self._name = carrier, name

    def options(self, **kwargs: Any) -> _Method:
        return self

    def remote(self, *args: Any) -> Any:
        return self._carrier.call(self._name, *args)


def ask(name: str, adapter: str | None = None) -> GenerateRequest:
    return GenerateRequest(name, "hi", Sampling(), adapter)


def opened(engine: Engine) -> tuple[Channel, Carrier]:
    carrier = Carrier(engine)
    return Channel(carrier, lambda err: LookupError(f"engine lost: {err}")), carrier


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_is_asked_together_goes_in_one_call_and_each_gets_its_own() -> None:
    async def scenario() -> None:
        engine = Engine()
        router, carrier = opened(engine)
        asked = [asyncio.create_task(router.generate([ask(f"r{index}")])) for index in range(5)]
        await asyncio.sleep(0.01)
        engine.go.set()
        answers = await asyncio.gather(*asked)
        assert [answer[0].text for answer in answers] == [f"r{index}" for index in range(5)]
        assert engine.calls == [5]
        assert (await router.generate([ask("a"), ask("b")]))[1].text == "b"
        assert engine.calls == [5, 1]
        assert carrier.opened == 1

    run(scenario)


def test_streams_and_errors_reach_who_asked() -> None:
    async def scenario() -> None:
        engine = Engine()
        router, _ = opened(engine)
        first = router.stream(ask("s"))
        assert (await anext(first)).text == "s0"  # before the engine has more
        gone = asyncio.create_task(router.generate([ask("r", "gone")]))
        odd = asyncio.create_task(router.generate([ask("r", "odd")]))
        await asyncio.sleep(0.01)
        engine.go.set()
        assert [chunk.text async for chunk in first] == ["s1", "s2"]
        with pytest.raises(AdapterNotFound, match="gone is not loaded"):
            await gone
        with pytest.raises(RuntimeError, match="Odd: <function"):  # what cannot travel comes as its text
            await odd

    run(scenario)


def test_a_lost_engine_tells_everyone_who_waits_and_the_channel_is_done_with() -> None:
    async def scenario() -> None:
        engine = Engine()
        router, carrier = opened(engine)
        waits = asyncio.create_task(router.generate([ask("r")]))
        stream = router.stream(ask("s"))
        assert (await anext(stream)).text == "s0"
        carrier.cut.set()
        for waiting in (waits, anext(stream)):
            with pytest.raises(LookupError, match="engine lost: the actor died"):
                await waiting
        assert router.lost

    run(scenario)


def test_an_idle_stream_ends_and_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "IDLE_S", 0.02)

    async def scenario() -> None:
        engine = Engine()
        router, carrier = opened(engine)
        slow = asyncio.create_task(router.generate([ask("slow")]))
        await asyncio.sleep(0.1)  # nothing is ready for long, but something is being made
        engine.go.set()
        assert (await slow)[0].text == "slow"
        await asyncio.sleep(0.1)
        assert engine.__dict__["_outboxes"] == {}
        assert (await router.generate([ask("again")]))[0].text == "again"
        assert carrier.opened == 2

    run(scenario)


def test_who_stops_reading_is_forgotten() -> None:
    async def scenario() -> None:
        engine = Engine()
        router, _ = opened(engine)
        stream = router.stream(ask("s"))
        await anext(stream)
        await stream.aclose()
        waits = asyncio.create_task(router.generate([ask("r")]))
        await asyncio.sleep(0.01)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert router._waiting == {}
        engine.go.set()
        assert (await router.generate([ask("next")]))[0].text == "next"  # answers nobody waits for are dropped

    run(scenario)


def test_what_is_given_up_before_it_was_sent_is_never_sent() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.go.set()
        router, _ = opened(engine)
        assert (await router.generate([ask("first")]))[0].text == "first"
        given_up, kept = (asyncio.create_task(router.generate([ask(name)])) for name in ("second", "third"))
        await asyncio.sleep(0)  # asked, but within the gap after the first
        assert len(router._unsent) == 2
        given_up.cancel()
        assert (await kept)[0].text == "third"
        assert engine.calls == [1, 1]

    run(scenario)


def test_a_stream_that_ends_while_a_call_is_on_its_way_is_opened_again_at_once() -> None:
    class Ends(Engine):
        ended = False

        async def answers(self, router: str) -> AsyncIterator[list[channel.Answer]]:  # type: ignore[override]
            if not self.ended:  # as when the idle time was over just before the call came
                self.ended = True
                return
            async for batch in super().answers(router):
                yield batch

    async def scenario() -> None:
        engine = Ends()
        engine.go.set()
        router, carrier = opened(engine)
        assert (await router.generate([ask("r")]))[0].text == "r"
        assert carrier.opened == 2

    run(scenario)
