"""The router's rules in one process: what may go wrong around engines and store, and what the client must see then."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epilora.errors import AdapterNotFound
from epilora.serving.messages import EventStream
from epilora.serving.metrics import ServingMetrics
from epilora.serving.ports import EngineGone
from epilora.serving.settings import Timeouts
from epilora.serving.tenants import TenantConfig
from epilora.types import Completion, GenerateRequest, LoadReceipt, TokenChunk
from tests.actors.fake_engine import PlainFakeEngine
from tests.serving.serving_parts import Parts, error, events, run


class Liar(PlainFakeEngine):
    """Answers with the base whatever it was asked for."""

    async def _one(self, request: GenerateRequest) -> Completion:
        return Completion(request.request_id, (1,), (1,), "base", (0.0,), "length", adapter=None)


class Corrupt(PlainFakeEngine):
    """Its slots do not hold what was sent."""

    async def load_adapter(self, version: Any, tensors: Any) -> LoadReceipt:
        return LoadReceipt(version.digest, 0, "read", "expected", 2, 2, 1.0)


class Hanging(PlainFakeEngine):
    """Never answers `what`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    async def generate(self, requests: Any) -> list[Completion]:
        if self._what == "generate":
            await asyncio.Event().wait()
        return await super().generate(requests)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self._what == "first":
            await asyncio.Event().wait()
        async for chunk in super().stream(request):
            yield chunk
            if self._what == "second":
                await asyncio.Event().wait()

    async def load_adapter(self, version: Any, tensors: Any) -> LoadReceipt:
        if self._what == "load":
            await asyncio.Event().wait()
        return await super().load_adapter(version, tensors)

    async def info(self) -> Any:
        if self._what == "info":
            await asyncio.Event().wait()
        return await super().info()


class Dying(PlainFakeEngine):
    """Dies `deaths` times: before the first token, or after it."""

    def __init__(self, name: str, deaths: int = 1, after: int = 0) -> None:
        super().__init__(name)
        self._deaths, self._after = deaths, after

    def _die(self) -> None:
        if self._deaths:
            self._deaths -= 1
            raise EngineGone(f"{self.name} died")

    async def generate(self, requests: Any) -> list[Completion]:
        self._die()
        return await super().generate(requests)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if not self._after:
            self._die()
        seen = 0
        async for chunk in super().stream(request):
            yield chunk
            seen += 1
            if seen == self._after:
                self._die()


class Forgetful(PlainFakeEngine):
    """Lets every adapter go before it is used, `times` times."""

    times = 2

    def _check(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.adapter and self.times:
            self.times -= 1
            self.loaded.pop(request.adapter, None)
        return super()._check(request)


def test_an_answer_under_another_adapter_is_withheld(tmp_path: Path) -> None:
    parts = Parts(tmp_path, engines=[Liar()])
    parts.publish("tone", 1)
    reply = run(parts.complete(model="tone"))
    assert (reply.status, error(reply)["code"]) == (500, "wrong_adapter")
    assert run(parts.complete()).status == 200


def test_a_tenant_is_served_accepted_copies_in_its_own_format(tmp_path: Path) -> None:
    parts = Parts(tmp_path, tenants=[TenantConfig("acme", adapter_dtype="nvfp4"), TenantConfig("bolt")])
    original, copy = parts.publish("tone", 1), parts.publish("tone.nvfp4", 2)
    record = functools.partial(
        parts.store.store.record_conversion, original.digest, original.base_digest, "nvfp4", copy.digest, report={}
    )
    served = {}
    for accepted in (None, False, True):
        if accepted is not None:
            record(accepted=accepted)
        for tenant in ("acme", "bolt"):
            reply = run(parts.complete(key=f"{tenant}-key", model="tone"))
            assert reply.status == 200, error(reply)
            served[tenant, accepted] = reply.headers["x-epilora-digest"]
    assert served.pop(("acme", True)) == copy.digest
    assert set(served.values()) == {original.digest}
    with pytest.raises(ValueError, match=r"tenant x: adapter_dtype='fp4'; allowed: bf16, fp8, nvfp4"):
        TenantConfig("x", adapter_dtype="fp4")


def test_a_slot_that_reads_back_wrong_is_not_used(tmp_path: Path) -> None:
    parts = Parts(tmp_path, engines=[Corrupt()])
    parts.publish("tone", 1)
    reply = run(parts.complete(model="tone"))
    assert (reply.status, error(reply)["code"]) == (500, "load_corrupt")


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("generate", {}),
        ("first", {"stream": True}),
        ("load", {"model": "tone"}),
        ("load", {"model": "tone", "stream": True}),
        ("info", {}),
    ],
)
def test_nothing_hangs(what: str, fields: dict[str, Any], tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Hanging(what)], timeouts=Timeouts(*[0.1] * 6, revival_s=0.1))
        parts.publish("tone", 1)
        reply = await parts.complete(**fields)
        assert (reply.status, error(reply)["code"]) == (504, "timeout")
        assert parts.core.completions.running == 0
        if what in ("generate", "first"):
            await asyncio.sleep(0.01)
            assert len(parts.engines[0].aborted) == 1

    run(scenario())


def test_a_stream_that_stalls_ends_with_an_error_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Hanging("second")], timeouts=Timeouts(next_token_s=0.1))
        seen = await events(await parts.complete(stream=True))
        assert seen[0]["choices"][0]["text"] == "base:0 "
        assert seen[-1]["error"]["code"] == "timeout"
        broken = 'epilora_broken_streams_total{adapter="base",tenant="acme"} 1.0'
        assert broken in parts.core.metrics.render().decode()
        await asyncio.sleep(0.01)
        assert len(parts.engines[0].aborted) == 1
        assert parts.core.completions.running == 0

    run(scenario())


def test_a_store_that_hangs_is_504_and_not_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, timeouts=Timeouts(control_s=0.05))
        parts.store.hang = True
        assert (await parts.complete(model="tone")).status == 504
        ready = await parts.ask("/ready")
        assert ready.status == 503
        assert "store" in ready.body["problems"][0]  # type: ignore[call-overload,index]
        assert (await parts.complete()).status == 200  # the base needs no store

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engines_request_goes_to_another_once(stream: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Dying("a"), PlainFakeEngine("b")])
        version = parts.publish("tone", 1)
        reply = await parts.complete(model="tone", stream=stream)
        assert reply.status == 200
        if stream:
            assert (await events(reply))[0]["choices"][0]["text"].startswith(version.digest[:8])
        assert (parts.engines[0].loads, parts.engines[1].loads) == ([version.digest], [version.digest])
        both = Parts(tmp_path, engines=[Dying("a", 9), Dying("b", 9)])
        reply = await both.complete(model="tone", stream=stream)
        assert (reply.status, error(reply)["code"]) == (503, "engine_unavailable")

    run(scenario())


def test_a_stream_cut_after_its_first_token_is_not_begun_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Dying("a", 1, after=1), PlainFakeEngine("b")])
        seen = await events(await parts.complete(stream=True))
        assert [event["choices"][0]["text"] for event in seen[:-1]] == ["base:0 "]
        assert seen[-1]["error"]["code"] == "engine_unavailable"
        assert parts.core.completions.running == 0

    run(scenario())


class Away(PlainFakeEngine):
    """Is not there until `back` is set; then it holds nothing, as an engine started again."""

    def __init__(self) -> None:
        super().__init__("a")
        self.back, self.asked = asyncio.Event(), 0

    async def info(self) -> Any:
        self.asked += 1
        if not self.back.is_set():
            raise EngineGone("a is not there")
        return await super().info()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["tiny", "tone"])
def test_a_request_waits_for_an_engine_that_comes_back(model: str, stream: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Away()], timeouts=Timeouts(revival_s=5.0))
        engine = parts.engines[0]
        digest = parts.publish("tone", 1).digest
        asking = asyncio.create_task(parts.complete(model=model, stream=stream))
        await asyncio.sleep(0.05)
        assert not asking.done()
        engine.back.set()  # type: ignore[attr-defined]
        reply = await asking
        assert reply.status == 200
        text = (await events(reply))[0] if stream else reply.body
        assert text["choices"][0]["text"].startswith("base:" if model == "tiny" else digest[:8])  # type: ignore[index,call-overload]

    run(scenario())


class DiesAndReturns(Away):
    """Answers once, dies at the second request, and is back when somebody has asked for it three times."""

    requests = 0

    async def generate(self, requests: Any) -> list[Completion]:
        if not requests[0].request_id.startswith("probe-"):
            self.requests += 1
            if self.requests == 2:
                self.back.clear()
                self.asked = 0
                self.loaded.clear()
                raise EngineGone("a died")
        return await super().generate(requests)

    async def info(self) -> Any:
        if self.asked == 3:
            self.back.set()
        return await super().info()


def test_the_request_an_engine_died_of_is_answered_by_its_successor(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[DiesAndReturns()], timeouts=Timeouts(revival_s=5.0))
        engine = parts.engines[0]
        engine.back.set()  # type: ignore[attr-defined]
        version = parts.publish("tone", 1)
        for _ in range(3):
            reply = await parts.complete(model="tone")
            assert reply.status == 200
            assert reply.body["choices"][0]["text"].startswith(version.digest[:8])  # type: ignore[index,call-overload]
        assert engine.loads == [version.digest] * 2
        assert engine.asked >= 4

    run(scenario())


class DiesProbing(PlainFakeEngine):
    """Dies in the middle of a load, once, and is back at once; another request sees it die at the same time."""

    deaths = 1

    async def generate(self, requests: Any) -> list[Completion]:
        if requests[0].request_id.startswith("probe-") and requests[0].adapter and self.deaths:
            self.deaths = 0
            forget = self.core.fleet.forget  # type: ignore[attr-defined]
            forget(self.core.fleet.engines[self.name], None, EngineGone("seen by another request"))  # type: ignore[attr-defined]
        return await super().generate(requests)


def test_an_engine_forgotten_while_it_is_probed_is_no_internal_error(tmp_path: Path) -> None:
    engine = DiesProbing()
    parts = Parts(tmp_path, engines=[engine])
    engine.core = parts.core  # type: ignore[attr-defined]
    parts.publish("tone", 1)
    assert run(parts.complete(model="tone")).status == 200


def test_when_all_engines_failed_lately_one_is_tried_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Dying("a", 1), Dying("b", 1)])
        reply = await parts.complete()
        assert (reply.status, error(reply)["code"]) == (503, "engine_unavailable")  # both died: one retry is enough
        assert (await parts.complete()).status == 200

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_put_out_of_its_slot_is_loaded_again(stream: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Forgetful()])
        version = parts.publish("tone", 1)
        reply = await parts.complete(model="tone", stream=stream)
        assert reply.status == 200
        if stream:
            await events(reply)
        assert parts.engines[0].loads == [version.digest] * 3
        stubborn = Forgetful()
        stubborn.times = 100
        parts = Parts(tmp_path, engines=[stubborn])
        reply = await parts.complete(model="tone", stream=stream)
        assert (reply.status, error(reply)["code"]) == (503, "no_free_slot")

    run(scenario())


class Gated(PlainFakeEngine):
    """Loads nothing before `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def load_adapter(self, version: Any, tensors: Any) -> LoadReceipt:
        await self.open.wait()
        return await super().load_adapter(version, tensors)


def test_one_load_serves_all_who_wait_even_if_the_first_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Gated()
        parts = Parts(tmp_path, engines=[engine])
        version = parts.publish("tone", 1)
        tasks = [asyncio.create_task(parts.complete(model="tone")) for _ in range(8)]
        while parts.core.completions.running < 8 or not parts.core.fleet.engines["base"].loading:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        engine.open.set()
        replies = await asyncio.gather(*tasks[1:])
        assert {reply.headers["x-epilora-digest"] for reply in replies} == {version.digest}
        assert engine.loads == [version.digest]
        assert tasks[0].cancelled()
        assert parts.core.completions.running == 0

    run(scenario())


def test_cancelling_a_request_aborts_it_and_frees_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[PlainFakeEngine(token_s=0.05)])
        task = asyncio.create_task(parts.complete(max_tokens=50, n=2))
        await asyncio.sleep(0.1)
        assert parts.core.completions.running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert parts.core.completions.running == 0
        assert len(parts.engines[0].aborted) == 2

    run(scenario())


def test_a_stream_that_is_never_read_frees_its_place_when_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[PlainFakeEngine(token_s=0.05)])
        reply = await parts.complete(stream=True, max_tokens=50, n=3)
        assert isinstance(reply.body, EventStream)
        assert parts.core.completions.running == 1
        await reply.body.aclose()
        await asyncio.sleep(0.01)
        assert parts.core.completions.running == 0
        assert len(parts.engines[0].aborted) == 3
        assert parts.core.fleet.engines["base"].running == 0

    run(scenario())


def test_a_full_server_says_429(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[PlainFakeEngine(token_s=0.05)], max_running=1)
        first = asyncio.create_task(parts.complete(max_tokens=3))
        await asyncio.sleep(0.05)
        reply = await parts.complete()
        assert (reply.status, error(reply)["code"], reply.headers["retry-after"]) == (429, "full", "1")
        assert (await first).status == 200

    run(scenario())


def test_tenants_take_turns_when_the_engines_are_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[PlainFakeEngine(token_s=0.002)], max_active=2, timeouts=Timeouts())
        order: list[str] = []

        async def ask(tenant: str) -> None:
            reply = await parts.complete(key=f"{tenant}-key", max_tokens=4, stream=len(order) % 2 == 0)
            if isinstance(reply.body, EventStream):
                await events(reply)
            assert reply.status == 200
            order.append(tenant)

        noisy = [asyncio.create_task(ask("acme")) for _ in range(40)]
        await asyncio.sleep(0.005)
        quiet = [asyncio.create_task(ask("bolt")) for _ in range(8)]
        await asyncio.gather(*noisy, *quiet)
        last = max(index for index, tenant in enumerate(order) if tenant == "bolt")
        assert last <= 24, order  # 8 of its own, as many of the neighbour's, and what was under way already
        assert (
            parts.core.completions.gate.running,
            parts.core.completions.gate.waiting,
            parts.core.completions.running,
        ) == (0, 0, 0)

    run(scenario())


def test_a_turn_that_does_not_come_is_429(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(
            tmp_path, engines=[PlainFakeEngine(token_s=0.1)], max_active=1, max_queue=1, timeouts=Timeouts(queue_s=0.1)
        )
        first = asyncio.create_task(parts.complete(max_tokens=4))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(parts.complete())
        await asyncio.sleep(0.02)
        full = await parts.complete()
        assert (full.status, error(full)["code"]) == (429, "queue_full")
        assert "1 requests waiting" in error(full)["message"]
        late = await second
        assert (late.status, "no turn came in time" in error(late)["message"]) == (429, True)
        assert (await first).status == 200
        assert parts.core.completions.gate.running == 0

    run(scenario())


def test_token_limits_are_settled_with_what_was_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [0.0]
        tenant = TenantConfig("acme", tokens_per_min=60)
        parts = Parts(tmp_path, tenants=[tenant], clock=lambda: now[0])
        assert (await parts.complete(max_tokens=28)).status == 200  # 2 prompt tokens and 28 new ones
        reply = await parts.complete(max_tokens=31)
        assert (reply.status, error(reply)["param"], reply.headers["retry-after"]) == (429, "tokens_per_min", "2")
        await events(await parts.complete(max_tokens=28, stream=True))
        now[0] = 10.0
        assert (await parts.complete(max_tokens=28)).status == 429
        now[0] = 60.0
        assert (await parts.complete(max_tokens=28)).status == 200
        too_long = await parts.complete(prompt="x" * 64, max_tokens=1)
        assert too_long.status == 400  # and its reservation came back:
        assert (await parts.complete(max_tokens=28)).status == 200

    run(scenario())


def test_concurrency_limits_count_streams_until_they_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, tenants=[TenantConfig("acme", concurrency=1), TenantConfig("bolt")])
        stream = await parts.complete(stream=True)
        reply = await parts.complete()
        assert (reply.status, error(reply)["param"]) == (429, "concurrency")
        assert (await parts.complete(key="bolt-key")).status == 200
        await events(stream)
        assert (await parts.complete()).status == 200

    run(scenario())


def test_other_precision_needs_permission(tmp_path: Path) -> None:
    async def scenario() -> None:
        tenants = [TenantConfig("acme"), TenantConfig("bolt", other_precision=True)]
        parts = Parts(tmp_path, tenants=tenants)
        version = parts.publish("tone", 1, base_digest="c" * 64)
        reply = await parts.complete(model="tone")
        assert (reply.status, error(reply)["code"]) == (409, "base_mismatch")
        reply = await parts.complete(key="bolt-key", model="tone")
        assert reply.headers["x-epilora-digest"] == version.digest

    run(scenario())


def test_models_come_in_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        for index in range(5):
            parts.publish(f"n{index}", index)
        reply = await parts.ask("/v1/models", query={"limit": "2", "offset": "2"})
        assert [entry["id"] for entry in reply.body["data"]] == ["n2", "n3"]  # type: ignore[call-overload,index]
        assert reply.body["has_more"] is True  # type: ignore[call-overload,index]
        assert (await parts.ask("/v1/models", query={"limit": "x"})).status == 400
        assert (await parts.ask("/v1/models", key="")).status == 401

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/v1/adapters/promote", {"name": "a", "version": 1}),
        ("/v1/adapters/rollback", {"name": "a"}),
        ("/v1/adapters/gc", {}),
        ("/v1/audit", None),
    ],
)
def test_administration_needs_an_admin_key(path: str, body: Any, tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    reply = run(parts.ask(path, body))
    assert (reply.status, error(reply)["code"]) == (403, "admin_only")
    assert run(parts.ask(path, body, key="nope")).status == 401


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/adapters/promote", {"name": "a"}, 400),
        ("/v1/adapters/promote", {"name": "a", "version": True}, 400),
        ("/v1/adapters/promote", {"name": "ghost", "version": 1}, 404),
        ("/v1/adapters/rollback", {"name": 3}, 400),
        ("/v1/adapters/rollback", {"name": "once"}, 400),
        ("/v1/adapters/gc", {"keep_latest": 0}, 400),
        ("/v1/unload_lora_adapter", {"lora_name": "ghost"}, 404),
        ("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "/x"}, 400),
        ("/v1/load_lora_adapter", {"lora_path": "/x"}, 400),
    ],
)
def test_administration_checks_its_input(path: str, body: Any, status: int, tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.publish("once", 1)
    assert run(parts.ask(path, body, key="admin-key")).status == status


def test_unexpected_errors_are_500_without_inner_details(tmp_path: Path) -> None:
    class Broken(PlainFakeEngine):
        async def generate(self, requests: Any) -> list[Completion]:
            raise KeyError("/secret/path")

    reply = run(Parts(tmp_path, engines=[Broken()]).complete())
    assert (reply.status, error(reply)["code"]) == (500, "internal_error")
    assert "secret" not in error(reply)["message"]


def test_metric_labels_are_bounded() -> None:
    metrics = ServingMetrics(max_values=3)
    for index in range(10):
        metrics.finished("acme", f"adapter{index}", 200)
    text = metrics.render().decode()
    assert 'epilora_requests_total{adapter="other",status="200",tenant="acme"} 7.0' in text
    assert text.count("epilora_requests_total{") == 4


def test_metrics_hold_latencies_and_loads(tmp_path: Path) -> None:
    async def scenario() -> str:
        parts = Parts(tmp_path)
        parts.publish("tone", 1)
        await events(await parts.complete(model="tone", stream=True, max_tokens=4))
        await parts.complete(model="ghost")
        return (await parts.ask("/metrics")).body.decode()  # type: ignore[union-attr]

    text = run(scenario())
    assert 'epilora_ttft_seconds_count{adapter="tone",tenant="acme"} 1.0' in text
    assert 'epilora_time_per_token_seconds_count{adapter="tone",tenant="acme"} 1.0' in text
    assert 'epilora_tokens_total{adapter="tone",kind="completion",tenant="acme"} 4.0' in text
    assert 'epilora_adapter_loads_total{outcome="ok"} 1.0' in text
    assert 'epilora_requests_total{adapter="unknown",status="404",tenant="acme"} 1.0' in text


def test_not_found_never_falls_back_to_the_base(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, base_names=("org/tiny",))
        for model in ("tiny@1", "org/tiny@1", "tiny:", "org/tiny:x", "Tiny", "tiny ", "base"):
            reply = await parts.complete(model=model)
            assert reply.status == 404, model
            assert error(reply)["code"] == "model_not_found"
        assert not parts.engines[0].running

    run(scenario())


def test_the_fakes_raise_what_the_protocol_says() -> None:
    with pytest.raises(AdapterNotFound):
        asyncio.run(PlainFakeEngine().unload_adapter("x"))
    assert os.getpid() == asyncio.run(PlainFakeEngine().pid())
