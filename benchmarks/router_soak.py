"""A soak of the router's core, a real store and stand-in engines: does memory stay flat while everything churns?

    python -m benchmarks.router_soak --seconds 3600

Clients ask (whole and streamed), versions are published, promoted, rolled back, collected; slots are fewer than adapters,
engines die now and then. Every answer is checked for its version's watermark. Resident memory is sampled; the growth is
the slope of a line through the samples after the first tenth, in which caches fill.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from epilora.serving.messages import EventStream, Reply
from epilora.serving.ports import EngineGone
from epilora.serving.settings import Timeouts
from epilora.types import Completion, GenerateRequest, TokenChunk
from tests.actors.fake_engine import PlainFakeEngine
from tests.serving.serving_parts import Parts, events

PAGE = os.sysconf("SC_PAGE_SIZE")
CLIENTS, NAMES, KEPT = 12, 12, 4


class Mortal(PlainFakeEngine):
    """Dies on demand: everything it held is gone, everything it runs fails."""

    def __init__(self, name: str) -> None:
        super().__init__(name, slots=6, token_s=0.001)
        self.deaths = 0

    def die(self) -> None:
        self.deaths += 1
        self.loaded.clear()
        self.loads.clear()
        self.aborted.clear()

    async def generate(self, requests: Any) -> list[Completion]:
        born = self.deaths
        out = await super().generate(requests)
        if self.deaths != born:
            raise EngineGone(f"{self.name} died")
        return out

    async def stream(self, request: GenerateRequest) -> Any:
        born = self.deaths
        chunk: TokenChunk
        async for chunk in super().stream(request):
            if self.deaths != born:
                raise EngineGone(f"{self.name} died")
            yield chunk


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def slope(samples: list[tuple[float, float]]) -> float:
    """MiB an hour of a least-squares line through (seconds, MiB)."""
    if len(samples) < 2:
        return 0.0
    times, values = np.array(samples).T
    return float(np.polyfit(times, values, 1)[0] * 3600)


async def _soak(folder: Path, seconds: float) -> dict[str, Any]:
    rng = random.Random(0)
    engines = [Mortal("a"), Mortal("b")]
    parts = Parts(folder, engines=engines, timeouts=Timeouts(slot_s=5.0))
    known: dict[str, set[str]] = {}
    counts = dict.fromkeys(("answers", "streams", "refused", "broken", "mixed", "published", "deaths"), 0)
    refusals: dict[str, int] = {}
    end, start = time.monotonic() + seconds, time.monotonic()

    def publish(name: str) -> None:
        known.setdefault(name, set()).add(parts.publish(name, rng.randrange(1 << 30)).digest)
        counts["published"] += 1

    for index in range(NAMES):
        publish(f"n{index}")

    def right(name: str, digest: str, text: str) -> bool:
        return digest in known[name] and all(word.startswith(f"{digest[:8]}:") for word in text.split())

    def refused(reply: Reply) -> None:
        assert isinstance(reply.body, dict)
        counts["refused"] += 1
        code = str(reply.body["error"]["code"])
        refusals[code] = refusals.get(code, 0) + 1

    async def client(seed: int) -> None:
        mine = random.Random(seed)
        while time.monotonic() < end:
            name = f"n{mine.randrange(NAMES)}"
            stream = mine.random() < 0.5
            reply = await parts.complete(model=name, max_tokens=mine.randrange(1, 6), stream=stream)
            if reply.status != 200:
                refused(reply)
            elif isinstance(reply.body, EventStream):
                if mine.random() < 0.1:  # a client that leaves
                    await reply.body.aclose()
                    continue
                seen = await events(reply)
                counts["streams"] += 1
                if "error" in seen[-1]:
                    counts["broken"] += 1
                    seen.pop()
                text = "".join(event["choices"][0]["text"] for event in seen)
                counts["mixed"] += not right(name, reply.headers["x-epilora-digest"], text)
            else:
                counts["answers"] += 1
                assert isinstance(reply.body, dict)
                text = reply.body["choices"][0]["text"]
                counts["mixed"] += not right(name, reply.headers["x-epilora-digest"], text)
            await asyncio.sleep(0)

    async def churn() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            name = f"n{rng.randrange(NAMES)}"
            publish(name)
            what = rng.random()
            if what < 0.3:
                parts.store.store.rollback(name)
            elif what < 0.4:
                parts.store.store.gc(KEPT)
            elif what < 0.45:
                counts["deaths"] += 1
                rng.choice(engines).die()

    memory: list[tuple[float, float]] = []

    async def watch() -> None:
        period = max(1.0, seconds / 200)
        while time.monotonic() < end:
            await asyncio.sleep(period)
            gc.collect()
            memory.append((round(time.monotonic() - start, 1), round(rss_mib(), 2)))

    await asyncio.gather(*(client(seed) for seed in range(CLIENTS)), churn(), watch())
    settled = [sample for sample in memory if sample[0] > seconds / 10]
    core = parts.core
    return {
        "case": "soak",
        "seconds": round(time.monotonic() - start, 1),
        "growth_mib_per_h": slope(settled),
        "rss_mib": memory,
        **counts,
        "refusals": refusals,
        "left_running": core.completions.running + core.completions.gate.running,
    }


def run_soak(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_soak(Path(folder), seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    print(json.dumps(run_soak(parser.parse_args().seconds)))


if __name__ == "__main__":
    main()
