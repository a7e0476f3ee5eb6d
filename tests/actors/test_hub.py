"""Two router replicas and their hub on real Ray Serve: the operators' port, limits and metrics over both."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError

from actors.adapter_store import start_store
from actors.hub import bound
from actors.hub_client import HubLimits
from actors.router import build_app
from benchmarks.ports import free_port
from epilora.serving.openai_api import ApiError
from epilora.serving.tenants import hash_key, tenant_from_dict
from epilora.types import AdapterSpec
from tests.actors.fake_engine import BASE_DIGEST, FakeEngine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
ADMIN = {"Authorization": "Bearer tml-admin-secret"}


class Served:
    def __init__(self, folder: Path) -> None:
        self.url, self.admin = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self.store = start_store(folder / "store")
        self.engines = [
            FakeEngine.options(name=name, namespace="epilora", max_concurrency=1000).remote(name, token_s=0.01)
            for name in ("one", "two")
        ]
        serve.start(http_options={"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])})
        tenants = [
            {"name": "acme", "key": "acme-key", "p99_ttft_ms": 500},
            {"name": "counted", "key": "counted-key", "requests_per_min": 6},
            {"name": "narrow", "key": "narrow-key", "concurrency": 2},
        ]
        arguments = {
            "engines": "one,two",
            "tenants": tenants,
            "admin_key_hashes": [hash_key("tml-admin-secret")],
            "replicas": 2,
            "admin_port": int(self.admin.rpartition(":")[2]),
        }
        serve.run(build_app(arguments), name="router", route_prefix="/")
        self.wait(lambda: len(self.state()["replicas"]) == 2)

    def wait(self, condition: Any, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "what was waited for did not come"
            time.sleep(0.1)

    def state(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.admin}/v1/state", headers=ADMIN, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, tenant: str, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {tenant}-key"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ray.init(
        address="local",
        namespace="epilora",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
        _system_config={"prestart_worker_first_driver": False},
    )
    yield Served(tmp_path_factory.mktemp("hub"))
    serve.shutdown()
    ray.shutdown()


def test_operators_calls_are_on_their_port_only(served: Served) -> None:
    for method, path in (
        ("GET", "/metrics"), ("GET", "/v1/audit"), ("GET", "/v1/state"), ("GET", "/"), ("POST", "/v1/adapters/promote"),
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"), ("POST", "/v1/engines/drain"),
    ):  # fmt: skip
        answer = httpx.request(method, f"{served.url}{path}", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert httpx.post(f"{served.admin}{path}", headers=ADMIN, json={}).status_code == 404
    assert httpx.get(f"{served.admin}/v1/state").status_code == 401
    acme = httpx.get(f"{served.admin}/v1/state", headers={"Authorization": "Bearer acme-key"})
    assert (acme.status_code, acme.json()["error"]["code"]) == (403, "admin_only")
    page = httpx.get(f"{served.admin}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]


def test_metrics_of_both_replicas_add_up(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.ask("acme", max_tokens=2), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    wanted = 'epilora_requests_total{adapter="base",status="200",tenant="acme"} 40.0'
    served.wait(lambda: wanted in httpx.get(f"{served.admin}/metrics").text)
    text = httpx.get(f"{served.admin}/metrics").text
    assert 'epilora_tokens_total{adapter="base",kind="completion",tenant="acme"} 80.0' in text
    assert 'epilora_ttft_seconds_count{adapter="base",tenant="acme"} 40.0' in text
    assert 'epilora_engine{engine="two",what="up"} 1.0' in text
    assert 'epilora_store{what="up"} 1.0' in text
    (tenant,) = [entry for entry in served.state()["tenants"] if entry["name"] == "acme"]
    assert (tenant["requests"], tenant["errors"], tenant["completion_tokens"]) == (40, 0, 80)
    assert 0 < tenant["ttft_ms_p50"] <= tenant["ttft_ms_p99"]
    assert tenant["p99_ttft_ms"] == 500


def test_limits_hold_over_both_replicas(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.ask("counted"), range(24)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 6 + [429] * 18
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["param"] == "requests_per_min"
    assert 1 <= int(refused.headers["retry-after"]) <= 10


def test_concurrency_holds_over_both_and_is_given_back(served: Served) -> None:
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(served.ask, "narrow", prompt="hold narrow", max_tokens=2) for _ in range(6)]
        served.wait(lambda: sum(future.done() for future in asked) >= 4)
        for engine in served.engines:
            ray.get(engine.release.remote("hold narrow"), timeout=30)
    assert sorted(future.result().status_code for future in asked) == [200, 200, 429, 429, 429, 429]
    served.wait(lambda: served.ask("narrow").status_code == 200)


def test_a_drain_reaches_both_replicas(served: Served) -> None:
    answer = httpx.post(f"{served.admin}/v1/engines/drain", json={"engine": "one"}, headers=ADMIN)
    assert answer.json()["draining"] is True

    def engines_of_24() -> set[str]:
        with ThreadPoolExecutor(8) as pool:
            return {answer.headers["x-epilora-engine"] for answer in pool.map(lambda _: served.ask("acme"), range(24))}

    served.wait(lambda: engines_of_24() == {"two"})  # the replicas learn it from their next reports
    assert engines_of_24() == {"two"}  # both have
    httpx.post(f"{served.admin}/v1/engines/drain", json={"engine": "one", "drain": False}, headers=ADMIN)


def test_adapters_and_jobs_are_in_the_state(served: Served) -> None:
    rng = np.random.default_rng(0)
    for step in range(3):
        tensors = {
            "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(2, 8)).astype(np.float32),
            "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(8, 2)).astype(np.float32),
        }
        metadata = {"step": step, "reward": 0.25 * step, "mismatch": 1e-7}
        version = ray.get(
            served.store.publish.remote(
                "policy-run", AdapterSpec(2, 4.0, ("q_proj",)), tensors, base_model="tiny", base_digest=BASE_DIGEST,
                owner="job:run", metadata=metadata,
            )
        )  # fmt: skip
    shared = ray.get(
        served.store.publish.remote(
            "tone", AdapterSpec(2, 4.0, ("q_proj",)), tensors, base_model="tiny", base_digest=BASE_DIGEST
        )
    )
    assert shared.digest == version.digest
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="acme-key", max_retries=0)
    assert client.completions.create(model="tone", prompt="hi", max_tokens=1).system_fingerprint == version.digest
    state = served.state()
    (job,) = state["jobs"]
    assert (job["name"], job["versions"]) == ("policy-run", 3)
    assert [point["reward"] for point in job["points"]] == [0.0, 0.25, 0.5]
    rows = {(entry["owner"], entry["name"]): entry for entry in state["adapters"]}
    assert rows["", "tone"]["digest"] == version.digest
    assert len(rows["", "tone"]["engines"]) == 1
    assert [entry["name"] for entry in state["engines"] if version.digest in entry["resident"]]


def test_several_replicas_need_the_hub() -> None:
    with pytest.raises(ValueError, match="replicas=2 needs an admin_port"):
        build_app({"engines": "one", "replicas": 2})
    with pytest.raises(ValueError, match="admin_port=70000"):
        build_app({"engines": "one", "admin_port": 70000})


def test_a_killed_hub_comes_back_and_tenants_do_not_notice(served: Served) -> None:
    def counted() -> float:
        text = httpx.get(f"{served.admin}/metrics").text
        return float(re.search(r'requests_total\{adapter="base",status="200",tenant="acme"\} (\S+)', text).group(1))  # type: ignore[union-attr]

    served.ask("acme")
    served.wait(lambda: counted() >= 1)
    before = counted()
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if "RouterHub" in entry["name"]]
    ray.kill(ray.get_actor(names[0], namespace="serve"))
    limited = served.ask("narrow")  # its limits cannot be checked for a while: it waits or is told to come again
    assert limited.status_code in (200, 503)
    if limited.status_code == 503:
        assert (limited.json()["error"]["code"], limited.headers["retry-after"]) == ("limits_unavailable", "1")
    answers = [served.ask("acme").status_code for _ in range(20)]
    assert answers == [200] * 20
    served.wait(lambda: len(served.state()["replicas"]) == 2)  # on the same port, of a new process
    served.wait(lambda: served.ask("narrow").status_code == 200)
    served.wait(lambda: counted() >= before + 20)  # what routers had counted is theirs, not the hub's


def test_a_hub_waits_for_its_port_and_gives_up_with_the_reason() -> None:
    async def scenario() -> None:
        holder = await bound("127.0.0.1", 0, 1.0)
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await bound("127.0.0.1", port, 0.3)
        waiting = asyncio.create_task(bound("127.0.0.1", port, 10.0))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        holder.close()
        taken = await asyncio.wait_for(waiting, 5.0)
        assert taken.getsockname()[1] == port
        taken.close()

    asyncio.run(scenario())


def test_without_the_hub_nothing_limited_is_let_through() -> None:
    class Dead:
        @property
        def admit(self) -> Any:
            raise RayActorError

    tenant = tenant_from_dict({"name": "narrow", "concurrency": 2})
    with pytest.raises(ApiError, match="cannot be checked right now") as caught:
        asyncio.run(HubLimits(Dead(), "replica").admit(tenant, 10.0))
    assert caught.value.status == 503
    assert asyncio.run(HubLimits(Dead(), "replica").admit(tenant_from_dict({"name": "free"}), 10.0))
