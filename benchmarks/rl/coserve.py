"""Tenants and RL jobs on one GPU, together and each alone, through the real router.

The work is the same on both sides: `steps` optimizer steps of every job, and the requests of 8 tenants at a total rate, as many
as the jobs alone take time for. Seconds of "together" run until both are done; "separate" is the sum of the two alone, each
of which would hold a GPU of its own for that long.

| case | provider | samples |
|---|---|---|
| `coserve/qwen3-8b/gpu_s` | together, separate | seconds of the GPU |
| `coserve/qwen3-8b/ttft_p99`, `.../tpot_p50` | together, alone | ms, over all requests |
| `coserve/qwen3-8b/rl_steps_s` | together, alone | steps a second of every job |

M of a row is the number of jobs, `rate` the requests a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from jobs.statistics import percentile

from .random_job import FULL, SMALL, job_config, model_folder, tenants_setting
from .summary import COSERVE_CASE as CASE

TENANTS = 8
REPLY_TOKENS, SMALL_REPLY = 128, 4


def run(
    results: Results,
    *,
    small: bool,
    work: Path,
    rates: Sequence[float] = (2.0, 8.0),
    jobs: Sequence[int] = (1, 2),
    steps: int = 5,
) -> None:
    """Rows of the module's table for every number of jobs and every rate, from one engine."""
    sizes = SMALL if small else FULL
    reply = SMALL_REPLY if small else REPLY_TOKENS
    share = () if small else ("engine.tenant_kv_share=0.25", "engine.tenant_seats=32")
    config = job_config(
        sizes, model_folder(sizes, work), work, "name=coserve", f"rl.steps={steps}", *share,
        tenants_setting(TENANTS, 1.0, sizes, reply),
    )  # fmt: skip
    asyncio.run(_measure(results, config, work, rates, jobs))


async def _measure(results: Results, config: Any, work: Path, rates: Sequence[float], jobs: Sequence[int]) -> None:
    from jobs.system import System

    async with System(config, router=True) as system:
        bench = _Bench(system, config, work)
        checksum = await system.engine.base_checksum()
        await bench.tenants(rates[-1], 4)  # warm up: graphs, kernels, the router's connections
        await bench.train(1, "warm")
        for count in jobs:
            rl_s, rl_rates = await bench.train(count, f"alone{count}")
            for rate in rates:
                requests = max(TENANTS, round(rate * rl_s))
                serve_s, alone = await bench.tenants(rate, requests)
                began = time.monotonic()
                (_, both_rates), (_, both) = await asyncio.gather(
                    bench.train(count, f"both{count}-{rate:g}"), bench.tenants(rate, requests)
                )
                both_s = time.monotonic() - began
                facts = {"rate": rate, "requests": requests, "rl_alone_s": rl_s, "serve_alone_s": serve_s}
                facts["base_unchanged"] = checksum == await system.engine.base_checksum()
                facts["errors"] = [a.error for a in (*alone, *both) if a.error][:3]
                rows: list[tuple[str, str, list[float], str]] = [
                    ("gpu_s", "together", [both_s], "s"),
                    ("gpu_s", "separate", [rl_s + serve_s], "s"),
                    ("rl_steps_s", "together", both_rates, "steps_s"),
                    ("rl_steps_s", "alone", rl_rates, "steps_s"),
                ]
                for side, answers in (("together", both), ("alone", alone)):
                    good = [answer for answer in answers if not answer.error]
                    ttft, gaps = [a.ttft_ms for a in good], [a.tpot_ms for a in good if a.tpot_ms]
                    rows.append(("ttft_p99", side, [percentile(ttft, 99)], "ms"))
                    rows.append(("tpot_p50", side, [percentile(gaps, 50)], "ms"))
                    facts[f"ttft_ms_{side}"] = [round(value, 2) for value in ttft]
                for name, side, values, unit in rows:
                    kept = facts if (name, side) == ("gpu_s", "together") else {"rate": rate}
                    results.add(f"{CASE}/{name}", side, count, values, unit=unit, digits=4, **kept)
                results.write()
                print(
                    f"{count} jobs, {rate:g}/s: together {both_s:.1f} s, alone {rl_s:.1f} + {serve_s:.1f} s", flush=True
                )


class _Bench:
    """What is measured on one running system."""

    def __init__(self, system: Any, config: Any, work: Path) -> None:
        from epilora.tasks import load_task

        self._system, self._config, self._work = system, config, work
        self._task = load_task(config.task.path, **config.task.args)
        self._asked = 0

    async def train(self, count: int, tag: str) -> tuple[float, list[float]]:
        """All steps of `count` jobs at once: (seconds until the last is done, steps a second of each)."""
        began = time.monotonic()
        rates = await asyncio.gather(*(self._job(f"{tag}-{i}", i) for i in range(count)))
        return time.monotonic() - began, list(rates)

    async def _job(self, name: str, seed: int) -> float:
        from jobs.loop import RLLoop

        config = dataclasses.replace(self._config, name=name, seed=seed + 1, tenants=[])
        loop = RLLoop(
            config, engine=self._system.engine, trainer=self._system.trainer, store=self._system.store, task=self._task,
            run_dir=self._work / name, record=lambda step, metrics: None,
        )  # fmt: skip
        await loop.start()
        began = time.monotonic()
        await loop.run()
        rate = loop.step / (time.monotonic() - began)
        await loop.close(keep_policy=False)
        return rate

    async def tenants(self, rate: float, requests: int) -> tuple[float, list[Any]]:
        """`requests` requests at `rate` a second in all, tenants in turn: (seconds to the last answer, answers)."""
        import httpx

        from jobs.traffic import Tenant, ask

        keys = self._system.keys
        sent: list[asyncio.Task[Any]] = []
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self._system.base_url, timeout=120) as client:
            for number in range(requests):
                spec = self._config.tenants[number % len(self._config.tenants)]
                prompt = self._task.problem("held_out", self._asked).prompt
                self._asked += 1
                tenant = Tenant(
                    spec.name, keys[spec.name].api_key, self._system.info.model_name, [prompt], 0.0, spec.max_tokens
                )
                sent.append(asyncio.create_task(ask(client, tenant, 0, "")))
                await asyncio.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
            answers = await asyncio.gather(*sent)
        return time.monotonic() - began, list(answers)
