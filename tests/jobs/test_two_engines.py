"""One trainer and two real engines under the pool: an engine killed in a step loses none of it, comes back and takes part."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.adapter_store import NAMESPACE
from epilora.config import load_config
from epilora.tasks import load_task
from jobs.loop import RLLoop
from jobs.system import System

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS, GROUP = 24, 4


def second() -> Any:
    return ray.get_actor("engine-0.1", namespace=NAMESPACE)


async def kill_while_it_samples() -> None:
    """Kill the second engine once rollouts run on it."""
    pid = await second().pid.remote()
    while (await second().stats.remote()).running == 0:
        await asyncio.sleep(0.002)
    os.kill(pid, signal.SIGKILL)


def test_an_engine_killed_in_a_step_loses_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(
        "configs/quickstart_tiny.yaml",
        ["name=two-engines", f"store.root={tmp_path}/store", "tenants=[]", "scaling.min_engines=2", "scaling.max_engines=2",
         "rl.steps=6", f"rl.prompts_per_step={PROMPTS}", f"rl.group_size={GROUP}"],
    )  # fmt: skip
    steps: list[dict[str, float]] = []

    async def go() -> None:
        killing: list[asyncio.Task[None]] = []

        def record(step: int, metrics: Any) -> None:
            steps.append(dict(metrics))
            if step == 2:
                killing.append(asyncio.create_task(kill_while_it_samples()))

        async with System(config, router=False) as system:
            checksum = await system.engine.base_checksum()
            loop = RLLoop(
                config, engine=system.engine, trainer=system.trainer, store=system.store,
                task=load_task(config.task.path), run_dir=tmp_path / "run", record=record, drafts=system.one_engine,
            )  # fmt: skip
            await loop.start()
            await loop.run()
            await killing[0]
            began = time.monotonic()
            await system.engine.wait_for(2, 200.0)
            print(f"the killed engine took part again {time.monotonic() - began:.1f} s after the last step")
            assert loop.policy.version.digest in (await second().stats.remote()).loaded
            assert await system.engine.base_checksum() == checksum
            rows = (await second().stats.remote()).rollout_rows
            await loop._sample(9, 0, loop.policy)
            assert (await second().stats.remote()).rollout_rows > rows

    asyncio.run(go())
    assert [step["train/sequences"] + GROUP * step["train/zero_variance_groups"] for step in steps] == [
        PROMPTS * GROUP
    ] * 6
    # The trainer finds the same log-probabilities: every rollout came from the adapter that its step trains.
    assert max(step["mismatch/max_abs_dlogp"] for step in steps) < 1e-4
