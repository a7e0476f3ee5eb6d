"""Tenants' traffic: streamed completions over HTTP at a steady rate, with every sample kept."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    """One answered request. ttft_ms: to the first streamed token; tpot_ms: mean gap of the following ones (0 with one token).

    version: what the server says it answered with. error: empty, or what went wrong (then nothing else counts).
    """

    tenant: str
    prompt_index: int
    phase: str
    ttft_ms: float
    tpot_ms: float
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    version: str
    error: str = ""


@dataclass
class Tenant:
    """Who asks what: an API key, a model name, prompts to cycle through, a rate in requests per second."""

    name: str
    api_key: str
    model: str
    prompts: list[str]
    requests_per_s: float
    max_tokens: int
    stop: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, tenant: Tenant, index: int, phase: str) -> Answer:
    """One greedy, streamed completion with log-probabilities."""
    prompt = tenant.prompts[index % len(tenant.prompts)]
    body = {
        "model": tenant.model,
        "prompt": prompt,
        "max_tokens": tenant.max_tokens,
        "temperature": 0.0,
        "logprobs": 1,
        "stream": True,
        "stop": tenant.stop or None,
    }
    start = time.perf_counter()
    stamps: list[float] = []
    text, version = "", ""
    tokens: list[str] = []
    logprobs: list[float] = []
    headers = {"Authorization": f"Bearer {tenant.api_key}"}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                detail = (await response.aread()).decode(errors="replace")
                return _failed(tenant, index, phase, f"{response.status_code}: {detail[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return _failed(tenant, index, phase, json.dumps(event["error"])[:200])
                version = event.get("system_fingerprint") or version
                for choice in event.get("choices", []):
                    got = choice.get("logprobs") or {}
                    new = got.get("tokens") or []
                    if new or choice.get("text"):
                        stamps += [time.perf_counter()] * max(1, len(new))
                    text += choice.get("text") or ""
                    tokens += new
                    logprobs += got.get("token_logprobs") or []
    except httpx.HTTPError as err:
        return _failed(tenant, index, phase, f"{type(err).__name__}: {err}")
    if not stamps:
        return _failed(tenant, index, phase, "no token arrived")
    gap = (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else 0.0
    return Answer(
        tenant.name, index % len(tenant.prompts), phase, (stamps[0] - start) * 1e3, gap * 1e3, text,
        tuple(tokens), tuple(logprobs), version,
    )  # fmt: skip


def _failed(tenant: Tenant, index: int, phase: str, error: str) -> Answer:
    return Answer(tenant.name, index % len(tenant.prompts), phase, 0.0, 0.0, "", (), (), "", error)


class Traffic:
    """All tenants asking until stopped. `phase` labels the answers; `answers` keeps them all."""

    def __init__(self, base_url: str, tenants: list[Tenant], timeout_s: float = 60.0) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, timeout=timeout_s)
        self._tenants = tenants
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[Any]] = set()
        self.phase = "rl_off"
        self.answers: list[Answer] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(tenant)) for tenant in self._tenants]

    async def _run(self, tenant: Tenant) -> None:
        index = 0
        next_at = time.monotonic()
        while True:
            task = asyncio.create_task(self._one(tenant, index))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            index += 1
            next_at += 1.0 / tenant.requests_per_s
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _one(self, tenant: Tenant, index: int) -> None:
        self.answers.append(await ask(self._client, tenant, index, self.phase))

    async def stop(self) -> None:
        """Ask nothing more; wait for what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._open)
        await self._client.aclose()
