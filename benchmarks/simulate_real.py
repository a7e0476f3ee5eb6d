"""A small real run to hold the simulation against: router and store on Ray Serve, engines that only keep time.

Everything but the engines is the system: HTTP, tenants, turns, names, the routing policy, loads through Ray's object store, the probe,
retries. A stand-in engine has the real slot map and steps of known length. The calibration asks an idle system one request after the
other: what a request takes beside its known steps is the way to the engine and back, what a load takes is the way of an adapter.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import ray
from ray import serve

from actors.channel import AnswersInBatches
from benchmarks.ports import free_port
from benchmarks.simulate_engine import LinearSteps
from epilora.adapters.slots import SlotMap
from epilora.serving import probe
from epilora.store import AdapterStore
from epilora.types import (
    AdapterSpec,
    AdapterVersion,
    Completion,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    TokenChunk,
)

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "epilora"
BASE_DIGEST = "b" * 64
SPEC = AdapterSpec(2, 4.0, ("q_proj",))
WIDTH = 64


@dataclass(frozen=True)
class Small:
    """The small system and what is asked of it. Times in seconds."""

    engines: int = 3
    slots: int = 6
    seats: int = 16
    base_s: float = 0.06
    row_s: float = 0.0005
    load_s: float = 0.15
    adapters: int = 48
    exponent: float = 1.0
    tenants: int = 4
    rate: float = 5.0
    seconds: float = 90.0
    tokens: tuple[int, int] = (4, 20)
    prompt: tuple[int, int] = (8, 64)
    calibration: int = 20
    kept_in_memory: int = 16
    seeds: tuple[int, ...] = (1,)

    @property
    def adapter_bytes(self) -> int:
        return 2 * 4 * SPEC.rank * WIDTH

    @property
    def host_bytes(self) -> int:
        return self.kept_in_memory * self.adapter_bytes


SMALL = Small()
TIMES = LinearSteps(SMALL.base_s, SMALL.row_s)


@dataclass(frozen=True)
class Call:
    """One request of the run. at_s: after the start; prompt: text of 4 characters a token."""

    at_s: float
    tenant: str
    adapter: int
    prompt: str
    prompt_tokens: int
    tokens: int


def calls(seed: int) -> list[Call]:
    """Poisson arrivals, Zipf popularity, uniform lengths."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(SMALL.rate * SMALL.seconds)
    weights = 1.0 / np.arange(1, SMALL.adapters + 1) ** SMALL.exponent
    chosen = rng.choice(SMALL.adapters, count, p=weights / weights.sum())
    prompts, tokens = rng.integers(*SMALL.prompt, count), rng.integers(*SMALL.tokens, count)
    return [
        Call(float(at), f"t{int(which) % SMALL.tenants}", int(which), f"a{which:03}" * int(prompt), int(prompt), int(new))
        for at, which, prompt, new in zip(np.sort(rng.uniform(0, SMALL.seconds, count)), chosen, prompts, tokens)
    ]  # fmt: skip


@dataclass(eq=False)
class _Row:
    prompt: int
    left: int
    chunks: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class KeepsTime(AnswersInBatches):
    """A stand-in engine: the slot map, a batch, and steps that take `TIMES`. Loads run between steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._slots = SlotMap(SMALL.slots)
        self._waiting: deque[_Row] = deque()
        self._live: list[_Row] = []
        self._loads: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._work = asyncio.Event()
        self._came_s: list[float] = []
        self._late_s: list[float] = []
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        at = asyncio.get_running_loop().time()
        while True:
            if not (self._waiting or self._live or self._loads):
                self._work.clear()
                await self._work.wait()
                at = asyncio.get_running_loop().time()
            if self._loads:
                at = await self._run_loads(at)
                continue
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), SMALL.seats - len(self._live)))]
            at = await self._until(at + TIMES.step_s(len(self._live) + sum(row.prompt for row in taken), 1))
            self._live += taken
            for row in self._live:
                row.left -= 1
                row.chunks.put_nowait(row.left)
            self._live = [row for row in self._live if row.left]

    async def _run_loads(self, at: float) -> float:
        while self._loads:
            digest, done = self._loads.popleft()
            try:
                int_id, _ = self._slots.reserve(digest)
            except Exception as err:
                done.set_exception(err)
                continue
            if int_id is not None:
                self._slots.commit(digest, int_id)
                at = await self._until(at + SMALL.load_s)
            done.set_result(None)
        return at

    async def _until(self, time_s: float) -> float:
        """Sleep until then. A step that came late does not move the ones after it, unless by a whole step."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, time_s - now))
        late_s = asyncio.get_running_loop().time() - time_s
        self._late_s.append(late_s)
        return time_s if late_s < SMALL.base_s else time_s + late_s

    async def info(self) -> EngineInfo:
        return EngineInfo(
            self.name, "none", "keeps-time", BASE_DIGEST, "w8a16", "float32", "none", 4096, SMALL.slots, 64, "none", True, ()
        )  # fmt: skip

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, len(self._live), len(self._waiting), 0.0, self._slots.loaded())

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt:
        done = asyncio.get_running_loop().create_future()
        self._loads.append((version.digest, done))
        self._work.set()
        await done
        return LoadReceipt(version.digest, 0, "r", "r", 1, 1, 1e3 * SMALL.load_s)

    async def unload_adapter(self, digest: str) -> None:
        self._slots.unload(digest)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._came_s.append(time.time())
        tokens = len(request.prompt) // 4 if isinstance(request.prompt, str) else len(request.prompt)
        row = _Row(tokens, request.sampling.max_tokens)
        shift = 0.0
        if request.adapter is not None:
            self._slots.acquire(request.adapter)
            shift = 0.01 + int(request.adapter[:6], 16) / (1 << 24)
        self._waiting.append(row)
        self._work.set()
        try:
            for index in range(row.left):
                await row.chunks.get()
                finish = "length" if index + 1 == request.sampling.max_tokens else None
                yield TokenChunk(
                    request.request_id, (index,), "x", (-0.5 - shift,), finish, tokens, index + 1, adapter=request.adapter
                )  # fmt: skip
        finally:
            if request.adapter is not None:
                self._slots.release(request.adapter)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return list(await asyncio.gather(*(self._whole(request) for request in requests)))

    async def _whole(self, request: GenerateRequest) -> Completion:
        chunks = [chunk async for chunk in self.stream(request)]
        self._came_s.pop()  # the probe's
        return Completion(
            request.request_id, tuple(request.prompt), tuple(t for c in chunks for t in c.token_ids), "x",  # type: ignore[arg-type]
            tuple(p for c in chunks for p in c.logprobs), "length", request.adapter, 1.0, 1.0,
        )  # fmt: skip

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    async def told(self) -> dict[str, list[float]]:
        """When requests came in since last asked, and how late sleeps ended."""
        told = {"came_s": self._came_s, "late_s": self._late_s}
        self._came_s, self._late_s = [], []
        return told


async def ask(http: aiohttp.ClientSession, url: str, call: Call, name: str) -> float | None:
    """Seconds to the first token of a stream that ends well, else None."""
    body = {"model": name, "prompt": call.prompt, "max_tokens": call.tokens, "stream": True}
    headers = {"authorization": f"Bearer {call.tenant}-key", "content-type": "application/json"}
    start = time.perf_counter()
    async with http.post(f"{url}/v1/completions", data=json.dumps(body), headers=headers) as answer:
        if answer.status != 200:
            logger.warning("%s: %s %s", name, answer.status, (await answer.text())[:300])
            return None
        await answer.content.readline()
        first_s = time.perf_counter() - start
        ended = (await answer.read()).rstrip().endswith(b"[DONE]")
    return first_s if ended else None


async def counters(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {key: 0.0 for key in ("slot_hits", "loads", "stale", "host_hits", "disk_reads")}
    names = {
        "epilora_adapter_slot_hits_total": "slot_hits",
        "epilora_adapter_loads_total": "loads",
        "epilora_adapter_slot_stale_total": "stale",
        'epilora_store{what="host_hits"}': "host_hits",
        'epilora_store{what="disk_reads"}': "disk_reads",
    }
    for line in lines:
        name, _, value = line.rpartition(" ")
        for key, short in names.items():
            if name == key or name.startswith(f"{key}{{"):
                found[short] += float(value)
    return found


async def calibrate(http: aiohttp.ClientSession, url: str, engines: list[Any]) -> dict[str, Any]:
    """Costs of the way, from an idle system. Row with the samples."""
    call = Call(0.0, "t0", 0, "abcd" * 16, 16, 1)
    step_s = TIMES.step_s(16, 1)
    probing_s = TIMES.step_s(len(probe.PROMPT), 1) + (probe.SAMPLING.max_tokens - 1) * TIMES.step_s(1, 1)
    before, around, loads = [], [], []
    for index in range(SMALL.calibration):
        loads.append(await _sure(http, url, call, f"calibration-{index}") - SMALL.load_s - probing_s - step_s)
    await asyncio.gather(*(engine.told.remote() for engine in engines))
    for _ in range(SMALL.calibration):
        sent = time.time()
        around.append(await _sure(http, url, call, f"calibration-{SMALL.calibration - 1}") - step_s)
        told = await asyncio.gather(*(engine.told.remote() for engine in engines))
        before.append(next(came for tells in told for came in tells["came_s"]) - sent)
    before_s, around_s = statistics.median(before), statistics.median(around)
    return {
        "case": "calibration",
        "before_s": before_s,
        "after_s": max(0.0, around_s - before_s),
        "load_extra_s": max(0.0, statistics.median(loads) - around_s),
        "samples_s": {"before": before, "around": around, "loads": loads},
    }


async def _sure(http: aiohttp.ClientSession, url: str, call: Call, name: str) -> float:
    first_s = await ask(http, url, call, name)
    if first_s is None:
        raise RuntimeError(f"the idle system did not answer a request for {name}")
    return first_s


async def drive(url: str, seed: int, engines: list[Any]) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        rows = [{"seed": seed, **await calibrate(http, url, engines)}]
        before = await counters(http, url)
        plan = calls(seed)
        start = time.perf_counter()

        async def one(call: Call) -> float | None:
            await asyncio.sleep(max(0.0, start + call.at_s - time.perf_counter()))
            return await ask(http, url, call, f"adapter-{call.adapter}")

        samples = await asyncio.gather(*(one(call) for call in plan))
        after = await counters(http, url)
        late = [s for told in await asyncio.gather(*(e.told.remote() for e in engines)) for s in told["late_s"]]
    rows.append(
        {"case": "small", "provider": "real", "seed": seed, "small": vars(SMALL),
         "ttft_ms": [None if s is None else round(1e3 * s, 2) for s in samples],
         "failed": sum(1 for s in samples if s is None), **{key: after[key] - before[key] for key in after},
         "steps_late_ms": {"p50": 1e3 * statistics.median(late), "max": 1e3 * max(late)}}
    )  # fmt: skip
    return rows


def measure() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of one real run per seed, each on a fresh cluster; the median costs of the way."""
    rows: list[dict[str, Any]] = []
    for seed in SMALL.seeds:
        with tempfile.TemporaryDirectory(prefix="sim-") as folder:
            rows += _one_run(seed, folder)
    calibrations = [row for row in rows if row["case"] == "calibration"]
    costs = ("before_s", "after_s", "load_extra_s")
    return rows, {key: statistics.median(row[key] for row in calibrations) for key in costs}


def _one_run(seed: int, folder: str) -> list[dict[str, Any]]:
    from actors.adapter_store import start_store
    from actors.router import build_app
    from epilora.serving.tenants import hash_key

    store = AdapterStore(folder)
    rng = np.random.default_rng(seed)
    names = [f"adapter-{i}" for i in range(SMALL.adapters)] + [f"calibration-{i}" for i in range(SMALL.calibration)]
    for name in names:
        tensors = {
            "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(SPEC.rank, WIDTH)).astype(np.float32),
            "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(WIDTH, SPEC.rank)).astype(np.float32),
        }
        store.publish(name, SPEC, tensors, base_model="keeps-time", base_digest=BASE_DIGEST)
    ray.init(
        address="local", namespace=NAMESPACE, num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=200 << 20, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        engine_names = [f"e{i}" for i in range(SMALL.engines)]
        actor: Any = ray.remote(num_cpus=0, max_concurrency=1000)(KeepsTime)
        engines = [actor.options(name=name, namespace=NAMESPACE).remote(name) for name in engine_names]
        ray.get([engine.info.remote() for engine in engines])
        ray.get(start_store(folder, host_cache_bytes=SMALL.host_bytes).ready.remote())
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        tenants = [
            {"name": f"t{i}", "key_hashes": [hash_key(f"t{i}-key", salt="ab" * 8)]} for i in range(SMALL.tenants)
        ]
        serve.run(build_app({"engines": engine_names, "tenants": tenants}), name="router", route_prefix="/")
        return asyncio.run(drive(f"http://127.0.0.1:{port}", seed, engines))
    finally:
        serve.shutdown()
        ray.shutdown()
