"""A tensor-parallel engine, the trainer's ranks on its shards and tenants, under Ray: RL steps, publishing, killed processes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from benchmarks.rl.random_job import FULL, SMALL, job_config, model_folder, tenants_setting

TENANTS = 4
# what is killed, a word of its command line, which of engine and trainer go with it
KILLED = (("trainer_rank", "rank_process", (1,)), ("engine_rank", "VLLM::Worker", (0, 1)))


def run(results: Results, *, tiny: bool, work: Path, steps: int = 6) -> None:
    """Rows `pair/...` (see `summary`)."""
    sizes = SMALL if tiny else dataclasses.replace(FULL, kv_mib=16 * 1024)
    if tiny:  # a step takes a tenth of a second: no tenant might ask in six
        beside: tuple[str, ...] = ("rl.min_step_s=1.5",)
    else:  # tenants are served while the trainer computes
        beside = ("engine.tenant_kv_share=0.25", "engine.tenant_seats=32")
    config = job_config(
        sizes, model_folder(sizes, work), work, "name=pair", f"out={work}/pair", f"rl.steps={steps}",
        "engine.tensor_parallel=2", *beside, tenants_setting(TENANTS, 2.0, sizes, 4 if tiny else 64),
    )  # fmt: skip
    asyncio.run(_measure(results, config, steps, work, sizes))


async def _measure(results: Results, config: Any, steps: int, work: Path, sizes: Any) -> None:
    import psutil
    import ray

    from actors.adapter_store import NAMESPACE
    from epilora.tasks import load_task
    from jobs.loop import RLLoop
    from jobs.system import System
    from jobs.traffic import Tenant, Traffic

    task = load_task(config.task.path, **config.task.args)
    seen: list[dict[str, float]] = []
    names = (config.engine.name, config.trainer.name)

    def loop_of(system: Any, config: Any) -> Any:
        return RLLoop(
            config, engine=system.engine, trainer=system.trainer, store=system.store, task=task, run_dir=work / "pair",
            record=lambda _, metrics: seen.append(dict(metrics)),
        )  # fmt: skip

    async with System(config, router=True) as system:
        checksum = await system.engine.base_checksum()
        prompts = [task.problem("held_out", i).prompt for i in range(64)]
        tenants = [
            Tenant(t.name, system.keys[t.name].api_key, system.info.model_name, prompts, t.requests_per_s, t.max_tokens)
            for t in config.tenants
        ]
        traffic = Traffic(system.base_url, tenants)
        traffic.start()
        loop = loop_of(system, config)
        await loop.start()
        began = time.monotonic()
        traffic.phase = "rl_on"
        await loop.run()
        seconds = time.monotonic() - began
        await traffic.stop()
        during = [answer for answer in traffic.answers if answer.phase == "rl_on"]
        facts = {
            "tenants": len(tenants),
            "tenants_answers": len([a for a in during if not a.error]),
            "tenants_errors": [a.error for a in during if a.error][:5],
            "tenants_ttft_ms": [round(a.ttft_ms, 2) for a in during if not a.error],
            "every_tenant_answered": {a.tenant for a in during if not a.error} == {t.name for t in tenants},
            "base_unchanged": checksum == await system.engine.base_checksum(),
            "rollout_tokens": [step["rollout/tokens"] for step in seen],
            "train_s": [step["time/train_s"] for step in seen],
            "grad_norm": [step["train/grad_norm"] for step in seen],
            "mismatch": [step["mismatch/mean_abs_dlogp"] for step in seen],
            "seconds": round(seconds, 2),
        }
        results.add("pair/steps", "epilora", len(seen), [step["time/step_s"] for step in seen], unit="s", **facts)
        publish_ms = [step["time/publish_s"] * 1e3 for step in seen]
        results.add("pair/publish", "epilora", sizes.rank, publish_ms, unit="ms", rank=sizes.rank)
        results.write()
        print(f"pair: {len(seen)} steps in {seconds:.1f} s, {facts['tenants_answers']} answers to tenants", flush=True)

        for number, (what, mark, going) in enumerate(KILLED, 1):
            pids = [await ray.get_actor(names[i], namespace=NAMESPACE).pid.remote() for i in going]
            below = [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]
            ranks = [p for p in below if any(mark in word for word in p.cmdline())]
            began = time.monotonic()
            ranks[1].kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, [*below, *map(psutil.Process, pids)], 120)
            down_s = time.monotonic() - began
            more = dataclasses.replace(config, resume=True, rl=dataclasses.replace(config.rl, steps=steps + number))
            async with asyncio.timeout(config.ready_timeout_s):
                await _until_new([names[i] for i in going], pids)
                await system.revive()
            back_s = time.monotonic() - began
            resumed = loop_of(system, more)
            await resumed.start()
            await resumed.run()
            results.add(
                f"pair/killed/{what}", "epilora", len(ranks), [down_s, back_s], unit="s", left_alive=[p.pid for p in alive],
                resumed_to_step=resumed.step, base_unchanged=checksum == await system.engine.base_checksum(),
            )  # fmt: skip
            results.write()
            print(
                f"{what} killed: down after {down_s:.1f} s, back after {back_s:.1f} s, step {resumed.step}", flush=True
            )


async def _until_new(names: list[str], pids: list[int]) -> None:
    """Until these actors run in other processes."""
    import ray

    from actors.adapter_store import NAMESPACE

    while True:
        found = []
        for name in names:
            try:
                found.append(await ray.get_actor(name, namespace=NAMESPACE).pid.remote())
            except (ValueError, ray.exceptions.RayError):
                found.append(0)
        if all(found) and not set(found) & set(pids):
            return
        await asyncio.sleep(0.2)
