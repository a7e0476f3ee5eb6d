"""The router through real Ray and Serve, driven by the official `openai` client against stand-in engines."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from ray import serve

from actors.adapter_store import start_store
from actors.router import build_app
from benchmarks.ports import free_port
from benchmarks.serving.peers import PeerError, run_trace
from epilora.serving.tenants import hash_key
from epilora.types import AdapterSpec, AdapterVersion
from tests.actors.fake_engine import BASE_DIGEST, FakeEngine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
ROOT = Path(__file__).resolve().parents[2]
SPEC = AdapterSpec(2, 4.0, ("q_proj",))
ADMIN_KEY = "tml-admin-secret"


def tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(2, 8)).astype(np.float32),
        "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(8, 2)).astype(np.float32),
    }


@dataclass
class Served:
    url: str
    engine: Any
    store: Any
    tenants_file: Path
    start_s: float

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def publish(self, name: str, seed: int, owner: str = "", base_digest: str = BASE_DIGEST) -> AdapterVersion:
        reference = self.store.publish.remote(
            name, SPEC, tensors(seed), base_model="tiny", base_digest=base_digest, owner=owner, actor="test"
        )
        return ray.get(reference, timeout=30)

    def asking(self) -> int:
        """Clients' requests that run in the engine now; probes are not theirs."""
        return sum(name.startswith("cmpl-") for name in self.seen()["running"])

    def seen(self) -> dict[str, Any]:
        return ray.get(self.engine.seen.remote(), timeout=30)


def write_tenants(path: Path, **extra_keys: str) -> None:
    tenants: list[dict[str, Any]] = [
        {"name": "acme"},
        {"name": "bolt"},
        {"name": "slow", "requests_per_min": 2},
        {"name": "narrow", "adapters": ["public-*"], "base": False},
    ]
    for tenant in tenants:
        keys = [f"tml-{tenant['name']}-key", *([extra_keys[tenant["name"]]] if tenant["name"] in extra_keys else [])]
        tenant["key_hashes"] = [hash_key(key) for key in keys]
    path.write_text(json.dumps({"tenants": tenants}))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("router")
    write_tenants(folder / "tenants.json")
    port = free_port()
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
    start = time.perf_counter()
    store = start_store(folder / "store")
    engine = FakeEngine.options(name="base", namespace="epilora", max_concurrency=1000).remote(token_s=0.01)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = build_app(
        {
            "engines": "base",
            "base_model": "org/tiny",
            "tenants_file": str(folder / "tenants.json"),
            "admin_key_hashes": [hash_key(ADMIN_KEY)],
            "timeouts": {"slot_s": 0.3, "revival_s": 1.0},
        }
    )
    serve.run(app, name="router", route_prefix="/")
    took = time.perf_counter() - start
    parts = Served(f"http://127.0.0.1:{port}", engine, store, folder / "tenants.json", took)
    del engine  # a test kills it, and its name is free only when no handle is left
    yield parts
    serve.shutdown()
    ray.shutdown()


def error_of(caught: pytest.ExceptionInfo[openai.APIStatusError]) -> dict[str, Any]:
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_ready_and_health(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    ready = httpx.get(f"{served.url}/ready")
    assert (ready.status_code, ready.json()["engines"]) == (200, 1)


def test_models_lists_base_and_visible_adapters(served: Served) -> None:
    mine = served.publish("tone", 1, owner="acme")
    served.publish("shared", 2)
    served.publish("hidden", 3, owner="bolt")
    models = {model.id: model for model in served.client("tml-acme-key").models.list().data}
    assert {"org/tiny", "tiny", "tone", "shared"} <= set(models)
    assert "hidden" not in models
    extra = models["tone"].model_extra
    assert extra is not None
    assert (extra["parent"], extra["digest"], extra["root"]) == ("org/tiny", mine.digest, "tone@1")
    assert served.client("tml-acme-key").models.retrieve("tone").id == "tone"


def test_completions_answer_under_the_version_asked_for(served: Served) -> None:
    first = served.publish("ver", 10, owner="acme")
    second = served.publish("ver", 11, owner="acme")
    client = served.client("tml-acme-key")
    wanted = {"ver": second, "ver@1": first, "tiny:ver@1": first, "org/tiny:ver": second, second.digest: second}
    for model, version in wanted.items():
        raw = client.completions.with_raw_response.create(model=model, prompt="hi", max_tokens=2)
        answer = raw.parse()
        assert answer.choices[0].text == f"{version.digest[:8]}:0 {version.digest[:8]}:1 "
        assert answer.system_fingerprint == version.digest == raw.headers["x-epilora-digest"]
        assert raw.headers["x-epilora-version"] == version.ref
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)
    base = client.completions.create(model="tiny", prompt="hi", max_tokens=1)
    assert (base.choices[0].text, base.system_fingerprint) == ("base:0 ", BASE_DIGEST)
    ray.get(served.store.promote.remote("ver", 1, owner="acme"))
    assert client.completions.create(model="ver", prompt="hi", max_tokens=1).system_fingerprint == first.digest


def test_n_prompts_logprobs_and_seed(served: Served) -> None:
    client = served.client("tml-acme-key")
    answer = client.completions.create(model="tiny", prompt=["a", "bc"], n=2, max_tokens=2, logprobs=1, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[3].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["<0>", "<1>"], [-0.5, -0.5])
    assert logprobs.top_logprobs == [{"<7>": -0.25}, {"<7>": -0.25}]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


def test_chat_and_its_logprobs(served: Served) -> None:
    client = served.client("tml-acme-key")
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].message.content == "base:0 base:1 "
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    block = answer.choices[0].logprobs
    assert block is not None
    assert block.content is not None
    assert [entry.logprob for entry in block.content[0].top_logprobs] == [-0.25, -9999.0]
    open_end = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 60}])
    assert open_end.usage is not None
    assert open_end.usage.completion_tokens == 4  # what the context of 64 leaves


def test_streams_end_with_usage_and_name_their_version(served: Served) -> None:
    version = served.publish("streamed", 20, owner="acme")
    client = served.client("tml-acme-key")
    chunks = list(
        client.completions.create(
            model="streamed", prompt="hi", max_tokens=3, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk.system_fingerprint == version.digest
        texts[chunk.choices[0].index] += chunk.choices[0].text
    word = version.digest[:8]
    assert texts == [f"{word}:0 {word}:1 {word}:2 "] * 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 6)
    chat = list(
        client.chat.completions.create(
            model="streamed", messages=[{"role": "user", "content": "u"}], max_tokens=2, stream=True
        )
    )
    assert chat[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == f"{word}:0 {word}:1 "
    assert [chunk.choices[0].finish_reason for chunk in chat] == [None, None, "length"]


def test_bad_keys_are_401(served: Served) -> None:
    for key in ("wrong", "tml-acme-kez", "x" * 2000):
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client(key).completions.create(model="tiny", prompt="hi")
        assert error_of(caught)["code"] == "invalid_api_key"
    bare = httpx.post(f"{served.url}/v1/completions", json={"model": "tiny", "prompt": "hi"})
    assert (bare.status_code, bare.json()["error"]["code"]) == (401, "invalid_api_key")


def test_unknown_models_are_404_with_the_names_that_exist(served: Served) -> None:
    served.publish("known", 30, owner="acme")
    served.publish("bolts-own", 31, owner="bolt")
    for model in ("ghost", "tiny:ghost", "bolts-own", "bolt/bolts-own", "tiny:"):
        with pytest.raises(openai.NotFoundError) as caught:
            served.client("tml-acme-key").completions.create(model=model, prompt="hi")
        body = error_of(caught)
        assert body["code"] == "model_not_found"
        assert "bolts-own" not in body["message"].replace(repr(model), "")
    assert "known" in served_message(served, "ghost")
    with pytest.raises(openai.NotFoundError, match="has no version 7"):
        served.client("tml-acme-key").completions.create(model="known@7", prompt="hi")


def served_message(served: Served, model: str) -> str:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client("tml-acme-key").completions.create(model=model, prompt="hi")
    return str(error_of(caught)["message"])


def test_two_tenants_may_use_one_name(served: Served) -> None:
    acme = served.publish("twin", 40, owner="acme")
    bolt = served.publish("twin", 41, owner="bolt")
    for key, version in (("tml-acme-key", acme), ("tml-bolt-key", bolt)):
        answer = served.client(key).completions.create(model="twin", prompt="hi", max_tokens=1)
        assert answer.system_fingerprint == version.digest
        other = bolt if version is acme else acme
        with pytest.raises(openai.NotFoundError):
            served.client(key).completions.create(model=other.digest, prompt="hi")


def test_a_tenants_pattern_list_bounds_what_it_reaches(served: Served) -> None:
    served.publish("public-one", 50)
    served.publish("private-one", 51)
    client = served.client("tml-narrow-key")
    assert client.completions.create(model="public-one", prompt="hi", max_tokens=1).choices[0].text
    for model in ("private-one", "tiny"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=model, prompt="hi")
        assert "Models you can use: public-one" in error_of(caught)["message"]
    assert [model.id for model in client.models.list().data] == ["public-one"]


def test_prompt_too_long_is_400(served: Served) -> None:
    client = served.client("tml-acme-key")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * 60, max_tokens=10, stream=stream)
        assert error_of(caught)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="the context holds 64"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 80}])


def test_malformed_requests_are_400_in_openais_shape(served: Served) -> None:
    headers = {"Authorization": "Bearer tml-acme-key"}
    cases: list[tuple[bytes, str | None]] = [
        (b"{", None),
        (b"[]", None),
        (b'{"model": "tiny"}', "prompt"),
        (b'{"model": "tiny", "prompt": "hi", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "tiny", "prompt": "hi", "wat": 1}', "wat"),
        (b'{"model": "tiny", "prompt": [99999], "max_tokens": 1}', None),
    ]
    for body, param in cases:
        answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{served.url}/v1/nothing", headers=headers).json()["error"]["code"] == "unknown_url"
    assert httpx.get(f"{served.url}/v1/completions", headers=headers).status_code == 405


def test_limits_answer_429_with_retry_after(served: Served) -> None:
    client = served.client("tml-slow-key")
    for _ in range(2):
        client.completions.create(model="tiny", prompt="hi", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="hi", max_tokens=1)
    assert error_of(caught)["param"] == "requests_per_min"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30


def test_an_adapter_of_other_base_codes_is_refused(served: Served) -> None:
    served.publish("foreign", 60, owner="acme", base_digest="c" * 64)
    with pytest.raises(openai.ConflictError) as caught:
        served.client("tml-acme-key").completions.create(model="foreign", prompt="hi")
    assert error_of(caught)["code"] == "base_mismatch"
    models = {model.id: model.model_extra or {} for model in served.client("tml-acme-key").models.list().data}
    assert models["foreign"]["other_precision"] is True
    assert models["tone"]["other_precision"] is False


def test_more_adapters_than_slots_swap_and_full_slots_are_503(served: Served) -> None:
    client = served.client("tml-acme-key")
    versions = [served.publish(f"swap{index}", 70 + index, owner="acme") for index in range(3)]
    for _ in range(2):
        for version in versions:
            answer = client.completions.create(model=version.name, prompt="hi", max_tokens=1)
            assert answer.system_fingerprint == version.digest
    with ThreadPoolExecutor(2) as pool:
        long = [
            pool.submit(client.completions.create, model=version.name, prompt="hold slots", max_tokens=2)
            for version in versions[:2]
        ]
        deadline = time.monotonic() + 30
        while served.asking() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="swap2", prompt="hi", max_tokens=1)
        assert caught.value.status_code == 503
        assert error_of(caught)["code"] == "no_free_slot"
        ray.get(served.engine.release.remote("hold slots"), timeout=30)
        for version, future in zip(versions[:2], long, strict=True):
            assert future.result(30).choices[0].text.startswith(version.digest[:8])


def test_many_clients_load_one_version_once(served: Served) -> None:
    version = served.publish("crowd", 80, owner="acme")
    before = served.seen()["loads"].count(version.digest)
    client = served.client("tml-acme-key")
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: client.completions.create(model="crowd", prompt="hi", max_tokens=1), range(16))
        )
    assert {answer.system_fingerprint for answer in answers} == {version.digest}
    assert served.seen()["loads"].count(version.digest) == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(served: Served, stream: bool) -> None:
    before = len(served.seen()["aborted"])
    body = {"model": "tiny", "prompt": "hold left", "max_tokens": 9, "stream": stream, "n": 2}
    headers = {"Authorization": "Bearer tml-acme-key"}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            request = client.build_request("POST", f"{served.url}/v1/completions", json=body, headers=headers)
            asking = asyncio.create_task(client.send(request, stream=stream))
            deadline = time.monotonic() + 30
            while served.asking() < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            if stream:
                answer = await asking
                assert answer.status_code == 200
                await anext(answer.aiter_lines())
            asking.cancel()

    asyncio.run(leave())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen = served.seen()
        if len(seen["aborted"]) >= before + 2 and not seen["running"]:
            break
        time.sleep(0.02)
    assert len(seen["aborted"]) == before + 2
    assert seen["running"] == []


def test_admin_loads_and_unloads_a_folder(served: Served, tmp_path: Path) -> None:
    version = served.publish("made", 90, owner="acme")
    folder = ray.get(served.store.export_peft.remote("acme/made", str(tmp_path / "peft")), timeout=30)
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"lora_name": "imported", "lora_path": folder}
    refused = httpx.post(
        f"{served.url}/v1/load_lora_adapter", json=body, headers={"Authorization": "Bearer tml-acme-key"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    loaded = httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, headers=admin)
    assert (loaded.status_code, loaded.headers["x-epilora-digest"]) == (200, version.digest)
    assert "imported@1: 2 of 2 modules covered" in loaded.text
    client = served.client("tml-bolt-key")
    assert client.completions.create(model="imported", prompt="hi", max_tokens=1).system_fingerprint == version.digest
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    bad = httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, headers=admin)
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "adapter_rejected")
    assert "use_dora=True cannot be served" in bad.json()["error"]["message"]
    unloaded = httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": "imported"}, headers=admin)
    assert unloaded.status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="imported", prompt="hi")
    rows = httpx.get(f"{served.url}/v1/audit", params={"limit": 1000}, headers=admin).json()["data"]
    assert [row["action"] for row in rows if row["name"] == "imported"] == ["publish", "load", "promote", "delete"]


def test_promote_and_rollback_over_http(served: Served) -> None:
    first = served.publish("moved", 95)
    second = served.publish("moved", 96)
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    client = served.client("tml-bolt-key")
    promoted = httpx.post(f"{served.url}/v1/adapters/promote", json={"name": "moved", "version": 1}, headers=admin)
    assert (promoted.status_code, promoted.json()["digest"]) == (200, first.digest)
    assert client.completions.create(model="moved", prompt="hi", max_tokens=1).system_fingerprint == first.digest
    rolled = httpx.post(f"{served.url}/v1/adapters/rollback", json={"name": "moved"}, headers=admin)
    assert rolled.json()["digest"] == second.digest
    assert client.completions.create(model="moved", prompt="hi", max_tokens=1).system_fingerprint == second.digest
    listed = httpx.get(f"{served.url}/v1/versions", params={"name": "moved"}, headers=admin).json()["data"]
    assert [entry["id"] for entry in listed] == ["moved@1", "moved@2"]


def test_keys_rotate_without_restart(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        served.client("tml-acme-new").models.list()
    write_tenants(served.tenants_file, acme="tml-acme-new")
    assert served.client("tml-acme-new").models.list().data
    assert served.client("tml-acme-key").models.list().data
    served.tenants_file.write_text("{ broken")  # the last good table stays in force
    assert served.client("tml-acme-key").models.list().data
    write_tenants(served.tenants_file)
    with pytest.raises(openai.AuthenticationError):
        served.client("tml-acme-new").models.list()


def test_metrics_count_requests_by_tenant_and_adapter(served: Served) -> None:
    served.publish("counted", 97, owner="acme")
    served.client("tml-acme-key").completions.create(model="counted", prompt="hi", max_tokens=2)
    text = httpx.get(f"{served.url}/metrics").text
    assert 'epilora_requests_total{adapter="counted",status="200",tenant="acme"} 1.0' in text
    assert 'epilora_tokens_total{adapter="counted",kind="completion",tenant="acme"} 2.0' in text
    assert 'epilora_engine{engine="base",what="up"} 1.0' in text


def test_versions_never_mix_while_names_move(served: Served) -> None:
    """Clients ask while the name is published, promoted and rolled back; each answer is whole and of one version."""
    known = {served.publish("hammer", 200, owner="acme").digest}
    stop, answered = threading.Event(), threading.Semaphore(0)

    def publish() -> None:
        for seed in range(201, 206):
            for _ in range(3):
                assert answered.acquire(timeout=20)
            known.add(served.publish("hammer", seed, owner="acme").digest)
            ray.get(served.store.promote.remote("hammer", 1, owner="acme"))
            ray.get(served.store.rollback.remote("hammer", owner="acme"))
        stop.set()

    def ask(index: int) -> list[tuple[str, str]]:
        client, got = served.client("tml-acme-key"), []
        while not stop.is_set() or not got:
            if index % 2:
                chunks = list(client.completions.create(model="hammer", prompt="hi", max_tokens=3, stream=True))
                assert len({chunk.system_fingerprint for chunk in chunks}) == 1
                got.append((str(chunks[0].system_fingerprint), "".join(chunk.choices[0].text for chunk in chunks)))
            else:
                answer = client.completions.create(model="hammer", prompt="hi", max_tokens=3)
                got.append((str(answer.system_fingerprint), answer.choices[0].text))
            answered.release()
        return got

    with ThreadPoolExecutor(4) as pool:
        writer = pool.submit(publish)
        answers = [pair for future in [pool.submit(ask, index) for index in range(3)] for pair in future.result(90)]
        writer.result(1)
    assert len(answers) >= 15
    assert len({digest for digest, _ in answers}) >= 3
    for digest, text in answers:
        assert digest in known
        assert text == "".join(f"{digest[:8]}:{index} " for index in range(3))


def test_a_dead_engine_is_an_error_and_its_successor_serves(served: Served) -> None:
    """Kills the engine in the middle of a stream, and without one."""
    headers = {"Authorization": "Bearer tml-acme-key"}
    body = {"model": "tiny", "prompt": "die later", "max_tokens": 9, "stream": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=30)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in answer.text
    gone = httpx.post(f"{served.url}/v1/completions", json={**body, "prompt": "hi"}, headers=headers, timeout=30)
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_unavailable")
    assert httpx.get(f"{served.url}/ready").status_code == 503
    served.engine = None  # Ray finds a name by handles it still holds, dead ones included
    gc.collect()
    successor, deadline = None, time.monotonic() + 30
    while successor is None and time.monotonic() < deadline:
        try:
            successor = FakeEngine.options(name="base", namespace="epilora", max_concurrency=1000).remote(token_s=0.01)
        except ValueError:
            time.sleep(0.2)
    assert successor is not None
    served.engine = successor  # it lives as long as a handle of its owner
    while httpx.get(f"{served.url}/ready").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    version = served.publish("after", 300, owner="acme")
    again = served.client("tml-acme-key").completions.create(model="after", prompt="hi", max_tokens=1)
    assert again.system_fingerprint == version.digest
    assert ray.get(successor.seen.remote(), timeout=10)["loads"] == [version.digest]


def test_the_serving_benchmarks_driver_runs_a_trace_through_the_router(served: Served) -> None:
    served.publish("traced", 40, owner="acme")
    rows = [(0.05 * index, 4, 3, 1 + index % 2) for index in range(6)]
    common = {"vocabulary": 32, "api_key": "tml-acme-key"}
    outcomes, seconds = asyncio.run(run_trace(f"{served.url}/v1", rows, ["tiny", "traced"], **common))
    assert [outcome.tokens for outcome in outcomes] == [3] * 6
    ends_ms = [
        outcome.ttft_ms + 2 * outcome.tpot_ms for outcome in outcomes
    ]  # chunks may meet on the way, the end stays
    assert min(ends_ms) >= 29.9  # the engine takes 10 ms a token
    assert seconds > rows[-1][0]
    with pytest.raises(PeerError, match=r"status 404: .*nothing"):
        asyncio.run(run_trace(f"{served.url}/v1", rows[:2], ["nothing"], **common))
