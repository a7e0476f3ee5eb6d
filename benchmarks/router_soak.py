"""A soak of the router's core, a real store and stand-in engines: does memory stay flat while everything churns?

    python -m benchmarks.router_soak --seconds 3600 --requests-per-s 20

Clients of two tenants that use the same adapter names ask (whole and streamed), versions are published, promoted, rolled
back, collected; slots are fewer than adapters, engines die now and then. Every answer is checked: it is whole, and every
token carries the watermark of one version of the adapter that its tenant asked for.

Resident memory is sampled. It is flat if the median of the run's last quarter is at most FLAT above that of its second
quarter (caches fill in the first). The slope of a line through the samples after the first tenth is recorded beside it.
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
from collections import deque
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
CLIENTS, NAMES, KEPT = 12, 6, 4  # NAMES: of each tenant
TENANTS = ("acme", "bolt")
REMEMBERED = 200  # versions of a name that an answer may still carry
FLAT = 0.01


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


def flatness(samples: list[tuple[float, float]], seconds: float) -> dict[str, Any]:
    """Medians (MiB) of the second and of the last quarter, and whether that is flat; samples: (seconds, MiB)."""
    quarters = [
        [mib for at, mib in samples if low * seconds <= at <= high * seconds]
        for low, high in ((0.25, 0.5), (0.75, 1.1))
    ]
    if not all(quarters):
        return {"second_quarter_mib": None, "last_quarter_mib": None, "flat": False}
    second, last = (float(np.median(quarter)) for quarter in quarters)
    return {"second_quarter_mib": second, "last_quarter_mib": last, "flat": last <= (1 + FLAT) * second}


async def _soak(folder: Path, seconds: float, per_s: float, changes_per_s: float) -> dict[str, Any]:
    rng = random.Random(0)
    engines = [Mortal("a"), Mortal("b")]
    parts = Parts(folder, engines=engines, timeouts=Timeouts(slot_s=5.0))
    known: dict[tuple[str, str], deque[str]] = {}
    counts = dict.fromkeys(
        ("answers", "streams", "refused", "broken", "left", "mixed", "lost", "published", "deaths"), 0
    )
    refusals: dict[str, int] = {}
    end, start, cpu = time.monotonic() + seconds, time.monotonic(), time.process_time()

    def publish(owner: str, name: str) -> None:
        version = parts.publish(name, rng.randrange(1 << 30), owner=owner)
        known.setdefault((owner, name), deque(maxlen=REMEMBERED)).append(version.digest)
        counts["published"] += 1

    for owner in TENANTS:
        for index in range(NAMES):
            publish(owner, f"n{index}")

    def check(owner: str, name: str, digest: str, text: str, wanted: int | None) -> None:
        """wanted: tokens of a whole answer, None for a broken one."""
        words = text.split()
        right = digest in known[owner, name] and words == [f"{digest[:8]}:{index}" for index in range(len(words))]
        counts["mixed"] += not right
        counts["lost"] += wanted is not None and len(words) != wanted

    def refused(reply: Reply) -> None:
        assert isinstance(reply.body, dict)
        counts["refused"] += 1
        code = str(reply.body["error"]["code"])
        refusals[code] = refusals.get(code, 0) + 1

    async def ask(mine: random.Random) -> None:
        owner, name, tokens = mine.choice(TENANTS), f"n{mine.randrange(NAMES)}", mine.randrange(1, 6)
        stream = mine.random() < 0.5
        reply = await parts.complete(key=f"{owner}-key", model=name, max_tokens=tokens, stream=stream)
        digest = reply.headers.get("x-epilora-digest", "")
        if reply.status != 200:
            refused(reply)
        elif isinstance(reply.body, EventStream):
            if mine.random() < 0.1:
                counts["left"] += 1  # a client that goes away
                await reply.body.aclose()
                return
            seen = await events(reply)
            counts["streams"] += 1
            whole = "error" not in seen[-1]
            counts["broken"] += not whole
            text = "".join(event["choices"][0]["text"] for event in (seen if whole else seen[:-1]))
            check(owner, name, digest, text, tokens if whole else None)
        else:
            counts["answers"] += 1
            assert isinstance(reply.body, dict)
            check(owner, name, digest, reply.body["choices"][0]["text"], tokens)

    async def client(seed: int) -> None:
        mine = random.Random(seed)
        while time.monotonic() < end:
            await asyncio.sleep(mine.expovariate(per_s / CLIENTS) if per_s else 0)
            await ask(mine)

    async def churn() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(1 / changes_per_s)
            owner, name = rng.choice(TENANTS), f"n{rng.randrange(NAMES)}"
            publish(owner, name)
            what = rng.random()
            if what < 0.3:
                parts.store.store.rollback(name, owner=owner)
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
        "seconds": round(time.monotonic() - start, 1),
        "requests_per_s": per_s or None,
        "changes_per_s": changes_per_s,
        "cpu_s": round(time.process_time() - cpu, 1),
        "growth_mib_per_h": slope(settled),
        **flatness(memory, seconds),
        "rss_mib": memory,
        **counts,
        "refusals": refusals,
        "left_running": core.completions.running + core.completions.gate.running,
    }


def run_soak(seconds: float, *, requests_per_s: float = 0.0, changes_per_s: float = 5.0) -> dict[str, Any]:
    """requests_per_s: of all clients together, 0: each asks again as soon as it is answered. changes_per_s: of versions."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_soak(Path(folder), seconds, requests_per_s, changes_per_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--requests-per-s", type=float, default=0.0, help="of all clients together; 0: as fast as it goes"
    )
    parser.add_argument("--changes-per-s", type=float, default=5.0, help="versions published")
    args = parser.parse_args()
    rates = {"requests_per_s": args.requests_per_s, "changes_per_s": args.changes_per_s}
    print(json.dumps(run_soak(args.seconds, **rates)))


if __name__ == "__main__":
    main()
