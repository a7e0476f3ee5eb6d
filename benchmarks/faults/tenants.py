"""What tenants and operators do while faults are injected: whole requests all the time, streams and publishes on demand.

A tenant's request that fails is asked once more, after `Retry-After` if the answer has one; a second failure is a failed
request. A stream that broke before its first token counts the same way. One that broke after it is a cut stream, which should end
with an error event; it is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from actors.adapter_store import NAMESPACE
from epilora.types import AdapterSpec, AdapterVersion

SPEC = AdapterSpec(2, 4.0, ("q_proj",))
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
WORKERS, STREAMS = 4, 4
PAUSE_S, RETRY_S = 0.1, 0.3
WHOLE_TOKENS, STREAM_TOKENS = 6, 60
REQUEST_S = 120.0


@dataclass
class Asked:
    """One request, its retry included. outcome: "" while it runs, then ok, failed or cut. times in monotonic seconds."""

    streamed: bool
    started_s: float
    ended_s: float = 0.0
    attempts: int = 0
    tokens: int = 0
    outcome: str = ""
    event: bool = False  # a cut stream that said so in an error event
    right: bool = True  # every token was of the version that the name points at
    why: str = ""


class Tenants:
    """url, api_key: of the router. adapters: name -> digest its answers must show."""

    def __init__(self, url: str, api_key: str, adapters: dict[str, str]) -> None:
        self._url, self._headers, self._adapters = url, {"Authorization": f"Bearer {api_key}"}, adapters
        self.asked: list[Asked] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stopping = False

    def __enter__(self) -> Tenants:
        self._thread.start()
        self._working: Future[None] = asyncio.run_coroutine_threadsafe(self._work(), self._loop)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping = True
        self._working.result(timeout=REQUEST_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _work(self) -> None:
        names = list(self._adapters)
        async with httpx.AsyncClient(timeout=REQUEST_S, limits=httpx.Limits(max_connections=None)) as self._client:
            await asyncio.gather(*(self._ask_on(names[i:] + names[:i]) for i in range(WORKERS)))

    async def _ask_on(self, names: Sequence[str]) -> None:
        turn = 0
        while not self._stopping:
            await self._ask(names[turn % len(names)], streamed=False)
            turn += 1
            await asyncio.sleep(PAUSE_S)

    def open_streams(self) -> list[Asked]:
        """Streams that have had their first token; a stream that did not get one is left out."""
        names = list(self._adapters)
        opened = [
            asyncio.run_coroutine_threadsafe(self._open(names[i % len(names)]), self._loop) for i in range(STREAMS)
        ]
        return [asked for future in opened if (asked := future.result(timeout=REQUEST_S)).tokens]

    async def _open(self, name: str) -> Asked:
        asked = Asked(True, time.monotonic())
        self.asked.append(asked)
        task = asyncio.get_running_loop().create_task(self._finish(asked, name))
        while not asked.tokens and not task.done():
            await asyncio.sleep(0.01)
        return asked

    async def _ask(self, name: str, *, streamed: bool) -> None:
        asked = Asked(streamed, time.monotonic())
        self.asked.append(asked)
        await self._finish(asked, name)

    async def _finish(self, asked: Asked, name: str) -> None:
        attempt = self._stream_once if asked.streamed else self._whole_once
        for _ in range(2):
            asked.attempts += 1
            try:
                outcome, wait_s = await attempt(asked, name)
            except httpx.HTTPError as err:
                asked.why = f"{type(err).__name__}: {err}"[:200]
                outcome, wait_s = ("cut" if asked.tokens else "failed"), RETRY_S
            if outcome != "failed":
                break
            await asyncio.sleep(wait_s)
        asked.ended_s = time.monotonic()
        asked.outcome = outcome

    def _body(self, name: str, tokens: int, stream: bool) -> dict[str, Any]:
        return {"model": name, "prompt": "hi", "max_tokens": tokens, "stream": stream}

    async def _whole_once(self, asked: Asked, name: str) -> tuple[str, float]:
        body = self._body(name, WHOLE_TOKENS, False)
        reply = await self._client.post(f"{self._url}/v1/completions", json=body, headers=self._headers)
        if reply.status_code != 200:
            asked.why = f"{reply.status_code} {reply.text}"[:200]
            return "failed", float(reply.headers.get("retry-after", RETRY_S))
        words = reply.json()["choices"][0]["text"].split()
        asked.right = len(words) == WHOLE_TOKENS and all(self._is_right(word, name) for word in words)
        return "ok", 0.0

    async def _stream_once(self, asked: Asked, name: str) -> tuple[str, float]:
        body = self._body(name, STREAM_TOKENS, True)
        url = f"{self._url}/v1/completions"
        async with self._client.stream("POST", url, json=body, headers=self._headers) as reply:
            if reply.status_code != 200:
                asked.why = f"{reply.status_code} {(await reply.aread()).decode()}"[:200]
                return "failed", float(reply.headers.get("retry-after", RETRY_S))
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return "ok", 0.0
                event = json.loads(line[6:])
                if "error" in event:
                    asked.event, asked.why = bool(asked.tokens), str(event["error"]["code"])
                    return ("cut" if asked.tokens else "failed"), RETRY_S
                asked.tokens += 1
                asked.right &= self._is_right(event["choices"][0]["text"].strip(), name)
        asked.why = "the stream ended without [DONE]"
        return ("cut" if asked.tokens else "failed"), RETRY_S

    def _is_right(self, word: str, name: str) -> bool:
        return word.startswith(f"{self._adapters[name][:8]}:")

    def running(self) -> tuple[int, int]:
        """Whole requests and streams (past their first token) under way now."""
        open_now = [asked for asked in list(self.asked) if not asked.outcome]
        return sum(not a.streamed for a in open_now), sum(a.streamed and a.tokens > 0 for a in open_now)

    def touched(self, since_s: float, until_s: float) -> list[Asked]:
        """Requests that ran at some time between the two; waits for those that still do, and forgets older ones."""
        met = [a for a in list(self.asked) if a.started_s <= until_s and (not a.outcome or a.ended_s >= since_s)]
        deadline = time.monotonic() + 2 * REQUEST_S
        while any(not asked.outcome for asked in met) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.asked = [a for a in self.asked if not a.outcome or a.ended_s >= since_s]
        return met


def tensors(seed: int) -> dict[str, np.ndarray]:
    """A small adapter's tensors, unlike for unlike seeds."""
    rng = np.random.default_rng(seed)
    return {
        KEY.format("A"): rng.normal(size=(2, 64)).astype(np.float32),
        KEY.format("B"): rng.normal(size=(64, 2)).astype(np.float32),
    }


def publish(name: str, seed: int, base_digest: str, owner: str, timeout_s: float = 60.0) -> AdapterVersion:
    """Publish through the store actor and wait for its word."""
    store = ray.get_actor("store", namespace=NAMESPACE)
    reference = store.publish.remote(name, SPEC, tensors(seed), base_model="tiny", base_digest=base_digest, owner=owner)
    return ray.get(reference, timeout=timeout_s)  # type: ignore[no-any-return]


class Publisher:
    """Publishes one version after another until told to stop; `acknowledged` is called with each that the store confirmed."""

    def __init__(
        self, name: str, base_digest: str, first_seed: int, acknowledged: Callable[[AdapterVersion], None]
    ) -> None:
        self._name, self._base_digest, self._seed = name, base_digest, first_seed
        self._acknowledged = acknowledged
        self.in_flight = self._stopping = False
        self.published = self.asked_again = self.failed = 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping = True
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping:
            self._seed += 1
            self._one()

    def _one(self) -> None:
        for attempt in range(2):
            try:
                self.in_flight = True
                version = publish(self._name, self._seed, self._base_digest, "acme")
                self.in_flight = False
                self._acknowledged(version)
                self.published += 1
                return
            except (RayActorError, GetTimeoutError, ValueError):
                self.in_flight = False
                self.asked_again += attempt == 0
                time.sleep(RETRY_S)
        self.failed += 1
