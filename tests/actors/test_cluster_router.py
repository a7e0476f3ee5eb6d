"""The router follows the pool: engines that join, leave, start again or were scaled to zero."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray import serve

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from actors.router import build_app
from actors.scaling import ScalingLimits
from benchmarks.ports import free_port
from epilora.serving.tenants import hash_key
from epilora.types import AdapterSpec
from tests.actors.fake_engine import BASE_DIGEST, PlainFakeEngine
from tests.serving.serving_parts import Parts

ROOT = Path(__file__).resolve().parents[2]
KEY = "acme-key"
SPEC = AdapterSpec(2, 4.0, ("q_proj",))


def fleet(tmp_path: Path) -> Any:
    return Parts(tmp_path, engines=[PlainFakeEngine("a"), PlainFakeEngine("b")]).core.fleet


def alive(fleet: Any) -> set[str]:
    return {engine.name for engine in fleet.working(time.monotonic())}


def test_engines_join_and_leave_with_their_last_request(tmp_path: Path) -> None:
    followed = fleet(tmp_path)
    followed.follow({"a": "1", "c": "1"}, PlainFakeEngine)
    assert set(followed.engines) == {"a", "c"}  # b was idle
    followed.engines["c"].running = 1
    followed.follow({"a": "1"}, PlainFakeEngine)
    assert alive(followed) == {"a"}
    assert set(followed.engines) == {"a", "c"}
    followed.engines["c"].running = 0
    followed.follow({"a": "1"}, PlainFakeEngine)
    assert set(followed.engines) == {"a"}


def test_an_engine_started_again_holds_nothing_and_the_same_start_keeps_all(tmp_path: Path) -> None:
    followed = fleet(tmp_path)
    followed.follow({"a": "1", "b": "1"}, PlainFakeEngine)
    followed.engines["a"].resident["d" * 64] = None
    followed.follow({"a": "1", "b": "1"}, PlainFakeEngine)
    assert "d" * 64 in followed.engines["a"].resident
    followed.follow({"a": "2", "b": "1"}, PlainFakeEngine)
    assert not followed.engines["a"].resident


def test_a_base_at_zero_stays_so_that_a_request_can_bring_it_back(tmp_path: Path) -> None:
    followed = fleet(tmp_path)
    followed.follow({"a": "", "b": "1"}, PlainFakeEngine)
    assert set(followed.engines) == {"a", "b"}
    with pytest.raises(ValueError, match="no engine is named"):
        followed.follow({}, PlainFakeEngine)


@dataclass
class Served:
    """A pool with one base, and a router in front of it."""

    url: str
    pool: Any

    def ask(self, model: str = "tiny", timeout_s: float = 30.0) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"}, timeout=timeout_s,
            json={"model": model, "prompt": "hi", "max_tokens": 3},
        )  # fmt: skip

    def engines(self) -> list[str]:
        return ray.get(self.pool.engines.remote("base"), timeout=60)


def wait_for(holds: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen := holds():
            return seen
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:g} s for {what}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = free_port()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False,
        object_store_memory=80 << 20,
    )  # fmt: skip
    pool = get_or_create_pool(str(tmp_path_factory.mktemp("store")))
    request = BaseRequest(
        name="base",
        trainer_name="base-trainer",
        engine_factory="tests.actors.serving_fake:ServingEngine",
        engine_kwargs={},
        trainer_factory="tests.actors.fakes:Trainer",
        trainer_kwargs={"dtype": "float32"},
        bundle={"CPU": 1.0},
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        scaling=ScalingLimits(max_engines=2, up_s=1.0, down_s=1e9, to_zero_s=4.0),
    )
    ray.get(pool.ensure.remote(request, "job", 60.0), timeout=90)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    tenants = [{"name": "acme", "key_hashes": [hash_key(KEY, salt="ab" * 8)]}]
    serve.run(build_app({"engines": ["base"], "base_names": ["tiny"], "tenants": tenants}), route_prefix="/")
    yield Served(f"http://127.0.0.1:{port}", pool)
    serve.shutdown()
    ray.get(pool.shutdown.remote(), timeout=60)
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_requests_reach_an_engine_that_joined_and_bring_a_base_at_zero_back(served: Served) -> None:
    first = served.ask()
    assert (first.status_code, first.headers["x-epilora-engine"]) == (200, "base")

    engine = ray.get_actor("base", namespace=NAMESPACE)
    ray.get(engine.score.remote([], "kv_usage=0.95"))
    wait_for(lambda: served.engines() == ["base", "base.1"], "a second engine")
    ray.get(engine.score.remote([], None))

    async def many() -> set[str]:
        async with httpx.AsyncClient(timeout=30) as client:
            asks = [
                client.post(
                    f"{served.url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"},
                    json={"model": "tiny", "prompt": f"question {i}", "max_tokens": 20},
                )
                for i in range(8)
            ]  # fmt: skip
            replies = await asyncio.gather(*asks)
        assert [reply.status_code for reply in replies] == [200] * 8
        return {reply.headers["x-epilora-engine"] for reply in replies}

    wait_for(lambda: asyncio.run(many()) == {"base", "base.1"}, "both engines to answer")

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {key.format("A"): np.ones((2, 4), np.float32), key.format("B"): np.ones((4, 2), np.float32)}
    store = ray.get_actor("store", namespace=NAMESPACE)
    version = ray.get(
        store.publish.remote("mine", SPEC, tensors, base_model="tiny", base_digest=BASE_DIGEST, owner="acme")
    )
    before = served.ask("mine")
    assert before.status_code == 200, before.text
    assert before.json()["choices"][0]["text"].startswith(version.digest[:8])

    ray.get(served.pool.release.remote("job"))
    wait_for(lambda: served.engines() == [], "zero engines")
    back = served.ask("mine")  # waits until the base is up
    assert back.status_code == 200, back.text
    assert back.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
