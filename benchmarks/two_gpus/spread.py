"""Two engines, one trainer: rollout tokens a second of both over one, and what a killed engine costs a step."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from benchmarks.rl.random_job import FULL, SMALL, job_config, model_folder
from epilora.types import GenerateRequest, Sampling

PROMPTS, SMALL_PROMPTS = 512, 32


def run(results: Results, *, tiny: bool, work: Path, rounds: int = 3, steps: int = 4) -> None:
    """Rows `spread/rollouts` and `spread/killed` (see `summary`)."""
    sizes = SMALL if tiny else FULL
    config = job_config(
        sizes, model_folder(sizes, work), work, "name=spread", f"out={work}/spread", f"rl.steps={steps}",
        "scaling.min_engines=2", "scaling.max_engines=2", "trainer.placement=shared_kv_kept",
    )  # fmt: skip
    asyncio.run(_measure(results, config, SMALL_PROMPTS if tiny else PROMPTS, rounds, work))


async def _measure(results: Results, config: Any, prompts: int, rounds: int, work: Path) -> None:
    import ray

    from actors.adapter_store import NAMESPACE
    from actors.handles import RemotePart
    from epilora.tasks import load_task
    from jobs.loop import RLLoop
    from jobs.system import System

    steps: list[dict[str, float]] = []
    name = config.engine.name
    async with System(config, router=False) as system:
        checksum = await system.engine.base_checksum()
        loop = RLLoop(
            config, engine=system.engine, trainer=system.trainer, store=system.store,
            task=load_task(config.task.path, **config.task.args), run_dir=work / "spread",
            record=lambda _, metrics: steps.append(dict(metrics)), drafts=False,
        )  # fmt: skip
        await loop.start()
        assert loop.policy is not None
        one = RemotePart(ray.get_actor(name, namespace=NAMESPACE))
        speed: dict[str, list[float]] = {"two": [], "one": []}
        asked = 0
        for number in range(rounds + 1):
            for which in ("two", "one") if number % 2 == 0 else ("one", "two"):
                questions = range(asked, asked + prompts)  # new ones: no prefix is cached
                rate = await _rate(system.engine if which == "two" else one, config, questions, loop.policy.key)
                asked += prompts
                if number:  # the first round warms up
                    speed[which].append(rate)
        for which, values in speed.items():
            results.add("spread/rollouts", which, prompts, values, unit="tok_s", new_tokens=config.rl.max_tokens)
        results.write()
        print("rollout tokens/s:", {key: [round(v) for v in values] for key, values in speed.items()}, flush=True)

        killed_at = time.monotonic()

        async def kill() -> None:
            nonlocal killed_at
            other = ray.get_actor(f"{name}.1", namespace=NAMESPACE)
            pid = await other.pid.remote()
            while not steps or (await other.stats.remote()).running == 0:
                await asyncio.sleep(0.005)
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        await loop.run()
        await killing
        await system.engine.wait_for(2, config.ready_timeout_s)
        back_s = time.monotonic() - killed_at
        results.add(
            "spread/killed", "epilora", len(steps), [step["rollout/tokens"] for step in steps], unit="tokens",
            staleness=[step["rollout/staleness_steps"] for step in steps], back_s=round(back_s, 1),
            publish_s=[step["time/publish_s"] for step in steps], step_s=[step["time/step_s"] for step in steps],
            mismatch=[step["mismatch/mean_abs_dlogp"] for step in steps],
            base_unchanged=checksum == await system.engine.base_checksum(),
        )  # fmt: skip
        results.write()


async def _rate(engine: Any, config: Any, questions: range, adapter: str) -> float:
    """Generated tokens a second of one rollout of every question under `adapter`, submitted at once."""
    from epilora.tasks import load_task

    task = load_task(config.task.path, **config.task.args)
    sampling = Sampling(max_tokens=config.rl.max_tokens, temperature=1.0, logprobs=0, ignore_eos=True)
    requests = [
        GenerateRequest(f"rate-{i}", task.problem("held_out", i).prompt, sampling, adapter, "rollout")
        for i in questions
    ]
    began = time.perf_counter()
    done = await engine.generate(requests)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - began)
