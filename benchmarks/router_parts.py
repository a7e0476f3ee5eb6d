"""What the router's benchmarks run against and with: a stub engine, a Serve app that only forwards to it, a load generator."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request

from actors.channel import AnswersInBatches
from epilora.types import (
    AdapterVersion,
    Completion,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    Sampling,
    TokenChunk,
)

NAMESPACE = "epilora"
STUB = "stub"


@ray.remote(num_cpus=0, max_concurrency=2000)
class StubEngine(AnswersInBatches):
    """Answers with as many tokens as asked for, token_s seconds each; computes nothing."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._loaded: dict[str, None] = {}
        self.tokens: dict[str, int] = {}

    async def info(self) -> EngineInfo:
        return EngineInfo(STUB, "none", "stub", "b" * 64, "w8a16", "float32", "none", 4096, 64, 64, "none", True, ())

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0, 0.0, tuple(self._loaded))

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt:
        self._loaded[version.digest] = None
        return LoadReceipt(version.digest, 0, "r", "r", 1, 1, 0.0)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        if self._token_s:
            await asyncio.sleep(self._token_s * max(r.sampling.max_tokens for r in requests))
        return [self._completion(request) for request in requests]

    def _completion(self, request: GenerateRequest) -> Completion:
        count = request.sampling.max_tokens
        self.tokens[request.client] = self.tokens.get(request.client, 0) + count
        shift = 0.25 if request.adapter else 0.0
        logprobs = (-0.5 - shift,) * count
        return Completion(
            request.request_id, (1, 2), tuple(range(count)), "x" * count, logprobs, "length", request.adapter, 1.0, 1.0
        )

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        count = request.sampling.max_tokens
        for index in range(count):
            await asyncio.sleep(self._token_s)
            finish = "length" if index + 1 == count else None
            yield TokenChunk(request.request_id, (index,), "x", (-0.5,), finish, 2, index + 1, adapter=request.adapter)
        self.tokens[request.client] = self.tokens.get(request.client, 0) + count

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass

    async def unload_adapter(self, digest: str) -> None:
        self._loaded.pop(digest, None)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    async def served(self) -> dict[str, int]:
        """Tokens by tenant."""
        return dict(self.tokens)


@serve.deployment(
    name="Forwarder",
    max_ongoing_requests=8192,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
class Forwarder:
    """The bare comparison: reads the JSON body, asks the stub, answers its text. No auth, limits, names or checks."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._ids = itertools.count()

    async def __call__(self, request: Request) -> dict[str, Any]:
        if self._engine is None:
            self._engine = ray.get_actor(STUB, namespace=NAMESPACE)
        body = await request.json()
        sampling = Sampling(max_tokens=body["max_tokens"])
        (answer,) = await self._engine.generate.remote(
            [GenerateRequest(f"bare-{next(self._ids)}", body["prompt"], sampling)]
        )
        return {"id": answer.request_id, "choices": [{"index": 0, "text": answer.text, "finish_reason": "length"}]}


@dataclass(frozen=True)
class Call:
    """What to ask: a URL, a body, a key."""

    url: str
    body: Mapping[str, Any]
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "application/json", **({"authorization": f"Bearer {self.key}"} if self.key else {})}


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def ask(http: aiohttp.ClientSession, call: Call) -> float:
    """Milliseconds to the whole answer; to the first event of a stream. Raises RuntimeError if it is not a 200."""
    start = time.perf_counter()
    async with http.post(call.url, data=json.dumps(call.body), headers=call.headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{call.url}: {answer.status} {(await answer.text())[:200]}")
        if call.body.get("stream"):
            await answer.content.readline()
            took = (time.perf_counter() - start) * 1e3
            await answer.read()
            return took
        await answer.read()
    return (time.perf_counter() - start) * 1e3


async def closed_loop(http: aiohttp.ClientSession, call: Call, clients: int, seconds: float) -> list[float]:
    """Latencies (ms) of `clients` that each ask again as soon as they are answered."""
    end, samples = time.perf_counter() + seconds, list[float]()

    async def client() -> None:
        while time.perf_counter() < end:
            samples.append(await ask(http, call))

    await asyncio.gather(*(client() for _ in range(clients)))
    return samples


async def open_loop(http: aiohttp.ClientSession, call: Call, per_s: float, seconds: float) -> list[float]:
    """Latencies (ms) of requests sent at a steady rate whatever the answers do."""
    tasks, start = [], time.perf_counter()
    for index in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, start + index / per_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(http, call)))
    return list(await asyncio.gather(*tasks))
