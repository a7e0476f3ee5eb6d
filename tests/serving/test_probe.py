"""Was it applied? A version that answers exactly as the base does is refused, and what a load showed is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epilora.serving.probe import Confirmation, Probe, confirm, difference, probe_from_dict
from epilora.serving.tenants import TenantConfig
from epilora.types import GenerateRequest, TokenChunk
from tests.actors.fake_engine import BASE_DIGEST, PlainFakeEngine
from tests.serving.serving_parts import Parts, error, events, run


def audit(parts: Parts, action: str) -> list[Any]:
    return [row for row in parts.store.store.audit(limit=1000) if row.action == action]


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_that_changes_nothing_is_refused_and_frees_its_slot(stream: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PlainFakeEngine()
        engine.applies = False
        parts = Parts(tmp_path, engines=[engine])
        version = parts.publish("tone", 1)
        for _ in range(3):
            reply = await parts.complete(model="tone", stream=stream)
            assert (reply.status, error(reply)["code"]) == (409, "adapter_not_applied")
            assert "tone@1 is not served: the 4 probed tokens" in error(reply)["message"]
        assert engine.loads == [version.digest]  # it is not tried again and again
        assert not engine.loaded
        assert audit(parts, "load") == []
        assert 'outcome="adapter_not_applied"} 1.0' in parts.core.metrics.render().decode()
        assert (await parts.complete()).status == 200

    run(scenario())


def test_a_load_is_recorded_with_its_probe(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        version = parts.publish("tone", 1)
        before = await parts.ask("/v1/models/tone")
        assert before.body["probe"] is None  # type: ignore[call-overload,index]
        await asyncio.gather(*(parts.complete(model="tone") for _ in range(8)))
        (row,) = audit(parts, "load")
        assert (row.digest, row.actor, row.detail["readback_digest"]) == (version.digest, "router", "r")
        shift = int(version.digest[:6], 16) / (1 << 24)
        assert row.detail["probe_difference"] == pytest.approx(shift)
        recorded = parts.store.store.probe(version.digest, BASE_DIGEST)
        assert recorded is not None
        assert recorded["difference_from_base"] == pytest.approx(shift)
        assert probe_from_dict(recorded).logprobs == (-0.5 - shift,) * 4
        shown = await parts.ask("/v1/models/tone")
        assert shown.body["probe"] == recorded  # type: ignore[call-overload,index]

    run(scenario())


def test_on_another_base_the_drift_is_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        tenants = [TenantConfig("acme", other_precision=True)]
        parts = Parts(tmp_path, tenants=tenants)
        version = parts.publish("tone", 1, base_digest="c" * 64)
        home = {"tokens": [0, 1], "logprobs": [-0.5, -0.75], "top": [[], []]}
        parts.store.store.record_probe(version.digest, "c" * 64, home)
        assert (await parts.complete(model="tone")).status == 200
        recorded = parts.store.store.probe(version.digest, BASE_DIGEST)
        assert recorded is not None
        shift = int(version.digest[:6], 16) / (1 << 24)
        assert recorded["drift"] == pytest.approx(max(shift, abs(0.25 - shift)))

    run(scenario())


class WrongChunks(PlainFakeEngine):
    """Streams what another adapter says."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().stream(request):
            yield TokenChunk(**{**vars(chunk), "adapter": "f" * 64})


def test_a_chunk_under_another_adapter_is_withheld(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[WrongChunks()])
        reply = await parts.complete(stream=True)
        assert (reply.status, error(reply)["code"]) == (500, "wrong_adapter")
        assert parts.core.completions.running == 0

    run(scenario())


class LateWrong(PlainFakeEngine):
    """Begins rightly, goes on under another adapter."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().stream(request):
            yield chunk if chunk.completion_tokens < 2 else TokenChunk(**{**vars(chunk), "adapter": "f" * 64})


def test_a_stream_that_changes_its_adapter_ends_with_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[LateWrong()])
        seen = await events(await parts.complete(stream=True, max_tokens=5))
        assert [event["choices"][0]["text"] for event in seen[:-1]] == ["base:0 "]
        assert seen[-1]["error"]["code"] == "wrong_adapter"

    run(scenario())


def test_an_import_that_fails_its_probe_leaves_the_name_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PlainFakeEngine()
        parts = Parts(tmp_path / "store", engines=[engine])
        good = parts.publish("tone", 1)
        parts.publish("other", 2)
        folder = parts.store.store.export_peft("other", tmp_path / "peft")

        engine.applies = False
        body = {"lora_name": "tone", "lora_path": str(folder)}
        refused = await parts.ask("/v1/load_lora_adapter", body, key="admin-key")
        assert (refused.status, error(refused)["code"]) == (409, "adapter_not_applied")
        assert parts.store.store.resolve("tone").digest == good.digest
        fresh = await parts.ask("/v1/load_lora_adapter", {**body, "lora_name": "fresh"}, key="admin-key")
        assert fresh.status == 409
        assert "fresh" not in parts.store.store.names()
        engine.applies = True
        parts.core.fleet.engines["base"].refused.clear()
        parts.core.fleet.engines["base"].base_probe = None
        assert (await parts.ask("/v1/load_lora_adapter", body, key="admin-key")).status == 200
        assert parts.store.store.resolve("tone").version == 2

    run(scenario())


def test_difference_stops_where_the_continuations_part() -> None:
    one = Probe((5, 6), (-0.1, -0.2), (((5, -0.1), (9, -3.0)), ()))
    assert difference(one, one) == 0.0
    assert difference(one, Probe((5, 6), (-0.1, -0.45), (((5, -0.1), (9, -3.5)), ()))) == pytest.approx(0.5)
    assert difference(one, Probe((9, 6), (-0.4, -9.0), (((9, -0.4), (5, -0.3)), ()))) == pytest.approx(2.6)
    assert difference(one, Probe((7, 6), (-0.1, -9.0), ((), ()))) == 0.0


def test_what_the_trainer_predicts_is_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        version = parts.publish("tone", 1)
        shift = int(version.digest[:6], 16) / (1 << 24)
        parts.engines[0].predicts = -1.1 * shift  # the engine changes by -shift: a tenth less than the trainer says
        assert (await parts.complete(model="tone")).status == 200
        await parts.core.fleet.settle()
        recorded = parts.store.store.probe(version.digest, BASE_DIGEST)
        assert recorded is not None
        prediction = recorded["prediction"]
        assert prediction["holds"] is True
        assert prediction["predicted"] == pytest.approx(1.1 * shift)
        assert prediction["error"] == pytest.approx(0.1 * shift)
        assert recorded["difference_from_base"] == pytest.approx(shift)
        assert 'epilora_adapter_predictions_total{outcome="held"} 1.0' in parts.core.metrics.render().decode()
        assert (await parts.complete(model="tone")).status == 200

    run(scenario())


def test_a_version_that_changes_something_else_than_predicted_is_taken_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        version = parts.publish("tone", 1)
        shift = int(version.digest[:6], 16) / (1 << 24)
        parts.engines[0].predicts = -2 * shift  # as if the engine had left out a scaling of 2
        await parts.complete(model="tone")  # 200 if the trainer takes its time, as one that trains does
        await parts.core.fleet.settle()
        reply = await parts.complete(model="tone")
        assert (reply.status, error(reply)["code"]) == (409, "adapter_not_applied")
        assert "the trainer predicts changes of up to" in error(reply)["message"]
        assert not parts.engines[0].loaded
        (row,) = audit(parts, "refuse")
        assert (row.digest, row.detail["holds"]) == (version.digest, False)
        assert 'epilora_adapter_predictions_total{outcome="missed"} 1.0' in parts.core.metrics.render().decode()

    run(scenario())


def test_a_trainer_that_cannot_say_changes_nothing(tmp_path: Path) -> None:
    class Busy(PlainFakeEngine):
        async def predict(self, version: Any, tensors: Any, sequences: Any) -> Any:
            raise ValueError("session 'predict': tensors missing ['m.lora_A']")

    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Busy()])
        parts.publish("tone", 1)
        for _ in range(2):
            assert (await parts.complete(model="tone")).status == 200
            await parts.core.fleet.settle()
        assert 'epilora_adapter_predictions_total{outcome="unknown"} 1.0' in parts.core.metrics.render().decode()

    run(scenario())


def test_confirmation_by_hand() -> None:
    found = confirm(([-1.0, -2.0], [-1.5, -2.25]), ([-1.01, -2.0], [-1.61, -2.25]))
    assert found.predicted == pytest.approx(0.6)
    assert found.error == pytest.approx(0.1)
    assert found.base_error == pytest.approx(0.01)
    assert found.allowed == pytest.approx(0.25 * 0.6 + 4 * 0.01)
    assert found.holds
    assert not Confirmation(0.6, 0.16, 0.0).holds
    assert Confirmation(0.0, 0.04, 0.01).holds
    with pytest.raises(ValueError, match="zip"):
        confirm(([-1.0], [-1.5]), ([-1.0, -2.0], [-1.0, -2.0]))
