"""Step time, KV cache and host memory of every trainer placement on an 8B shape, under a cap of GPU memory and without one.

The KV cache of a placement is what its plan leaves under the cap (44.5 GiB, what an L40S has to give), or half of the GPU; NVML
says afterwards whether the cap was kept. What cannot fit leaves a row with the plan's arithmetic.

| case | provider | samples |
|---|---|---|
| `placement/qwen3-8b/capped`, `.../uncapped`, M = rollout tokens | placement | seconds of each step |
| `host_memory/qwen3-8b` | placement | pinned host GiB of the trainer; facts: proportional set size of all processes |
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from epilora import planner
from epilora.config.schema import JobConfig
from epilora.errors import MemoryInfeasible
from epilora.memory import tree_pss_bytes
from epilora.model_facts import read_facts
from epilora.sizing import RECIPES

from .gpu_memory import GIB, GpuMemoryWatch
from .random_job import FULL, SMALL, Sizes, job_config, model_folder
from .summary import ONE_COPY

CAP_GIB = 44.5
ROOM_GIB = 1.0  # below the cap, for what the plan does not count
PLACEMENTS: dict[str, tuple[str, ...]] = {
    ONE_COPY: ("trainer.placement=shared_kv_released",),
    "one_fp8_kv_kept": ("trainer.placement=shared_kv_kept",),
    "own_fp8": ("trainer.placement=own_fp8",),
    "own_fp8_offloaded": ("trainer.placement=own_fp8_offloaded",),
    "flashrl": ("trainer.placement=own_bf16",),
    "flashrl_offloaded": ("trainer.placement=own_bf16_offloaded",),
    "one_bf16_kv_kept": ("trainer.placement=shared_kv_kept", "engine.quantization=none", "engine.activations=w8a16", "loss.correction=none"),
    "two_bf16": ("trainer.placement=own_bf16", "engine.quantization=none", "engine.activations=w8a16", "loss.correction=none"),
    "bf16_offloaded": ("trainer.placement=own_bf16_offloaded", "engine.quantization=none", "engine.activations=w8a16", "loss.correction=none"),
}  # fmt: skip
ON_A_CPU = (ONE_COPY, "one_fp8_kv_kept")


def run(
    results: Results,
    *,
    small: bool,
    work: Path,
    names: Sequence[str] = tuple(PLACEMENTS),
    tokens: Sequence[int] = (2048, 8192),
    capped: Sequence[bool] = (True, False),
    steps: int = 3,
) -> None:
    """One engine and trainer after another. steps: the first of them is left out of the samples."""
    for name in names:
        if small and name not in ON_A_CPU:
            continue
        for length in (8,) if small else tokens:
            for cap in (False,) if small else capped:
                case = f"placement/qwen3-8b/{'capped' if cap else 'uncapped'}"
                sizes = SMALL if small else dataclasses.replace(FULL, new_tokens=length, micro_batch=2 * (length + 64))
                try:
                    config = _config(sizes, work, name, steps, cap)
                except MemoryInfeasible as err:
                    print(f"{case} {name} {length}: does not fit", flush=True)
                    results.add_failure(case, name, length, str(err)[:1500])
                    results.write()
                    continue
                asyncio.run(_measure(results, case, name, length, config, work))


def _config(sizes: Sizes, work: Path, name: str, steps: int, cap: bool) -> JobConfig:
    """The job with the largest KV cache that the plan leaves. Raises MemoryInfeasible."""

    def made(kv_mib: int) -> JobConfig:
        model = model_folder(sizes, work)
        label = f"{name}-{sizes.new_tokens}-{'capped' if cap else 'uncapped'}"
        more = (f"name={label}", f"rl.steps={steps}", f"engine.kv_cache_mib={kv_mib}", *PLACEMENTS[name])
        return job_config(sizes, model, work, *more)

    if sizes.tiny:
        return made(sizes.kv_mib)
    limit = (CAP_GIB - ROOM_GIB) * GIB if cap else 0.9 * planner.GPU_TYPES["H200"].usable_bytes
    config = made(1024)
    plan = planner.plan(config, read_facts(Path(config.engine.model_path), ""))
    kv = config.engine.kv_cache_mib * planner.MIB
    kept = RECIPES[config.trainer.placement].kv_kept
    room = limit - (plan.rollout_bytes - kv)
    if kept:
        room = min(room, limit - (plan.training_bytes - kv))
    elif plan.training_bytes > limit:
        room = -1.0
    if room < 2 * GIB:  # fewer than a few sequences at once
        raise MemoryInfeasible(
            f"{name} leaves {room / GIB:.1f} GiB of {limit / GIB:.1f} for the KV cache:\n{plan.describe()}"
        )
    return made(min(int(room / planner.MIB), 48 * 1024))


async def _measure(results: Results, case: str, name: str, length: int, config: JobConfig, work: Path) -> None:
    from epilora.tasks import load_task
    from jobs.loop import RLLoop
    from jobs.system import System

    seen: list[dict[str, float]] = []
    on_gpu = config.engine.num_gpus > 0
    watch = GpuMemoryWatch() if on_gpu else None
    if watch is not None:
        watch.__enter__()
    try:
        async with System(config, router=False) as system:
            checksum = await system.engine.base_checksum()
            loop = RLLoop(
                config, engine=system.engine, trainer=system.trainer, store=system.store,
                task=load_task(config.task.path, **config.task.args), run_dir=work / config.name,
                record=lambda _, metrics: seen.append(dict(metrics)),
            )  # fmt: skip
            await loop.start()
            await loop.run()
            memory = await system.trainer.memory()
            pss = tree_pss_bytes(os.getpid())
            unchanged = checksum == await system.engine.base_checksum()
    finally:
        if watch is not None:
            watch.__exit__()
    later = seen[1:]
    facts: dict[str, Any] = {
        "generate_s": [s["time/generate_s"] for s in later],
        "train_s": [s["time/train_s"] for s in later],
        "publish_s": [s["time/publish_s"] for s in later],
        "rollout_tokens": [s["rollout/tokens"] for s in later],
        "grad_norm": [s["train/grad_norm"] for s in later],
        "kv_gib": config.engine.kv_cache_mib / 1024,
        "pss_gib": round(pss / GIB, 3),
        "base_unchanged": unchanged,
    }
    if watch is not None:
        facts |= {"peak_gib": round(watch.peak_gib, 2), "before_gib": round(watch.before_bytes / GIB, 2)}
        facts["cap_gib"] = CAP_GIB if case.endswith("/capped") else None
    results.add(case, name, length, [s["time/step_s"] for s in later], unit="s", **facts)
    pinned = memory["pinned_bytes"] / GIB
    results.add("host_memory/qwen3-8b", name, length, [pinned], unit="gib", pss_gib=facts["pss_gib"])
    results.write()
    print(f"{case} {name} {length}: {[round(s['time/step_s'], 2) for s in later]} s, {facts}", flush=True)
