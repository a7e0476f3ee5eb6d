"""The whole system once, end to end: one FP8 base, an RL job and three tenants on it at the same time.

    python -m jobs.quickstart --config configs/quickstart_tiny.yaml [key=value ...] [--dry-run]

Starts (or joins) Ray, the pool, the engine, the trainer, the store and the router; makes the tenants' adapters by
supervised steps; measures tenants alone; then trains a policy by GRPO while tenants go on asking; and reports. Everything
lands in the run's folder: metrics.jsonl, TensorBoard events, result.json, plot.png, config.yaml, checkpoints, the adapter.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from epilora.config.schema import JobConfig, TenantConfig
from epilora.errors import AdapterNotFound
from epilora.memory import mapping_report
from epilora.quant.manifest import Location, Transport
from epilora.tasks import load_task
from epilora.types import AdapterVersion, GenerateRequest, Sampling
from jobs import report
from jobs.command import job_main, prepare_run_dir
from jobs.evaluation import EvalResult, evaluate
from jobs.loop import RLLoop
from jobs.memory_watch import MemoryWatch
from jobs.recorder import Recorder, read_metrics
from jobs.sft import train_supervised
from jobs.statistics import percentile
from jobs.system import System
from jobs.trackers import make_trackers
from jobs.traffic import Answer, Tenant, Traffic


class Stages:
    """Seconds each part of the job took, printed as they end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self._console.print(f"[{self.total_s:6.1f} s] {name}: {self.seconds[name]:.1f} s")

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._start


async def run(config: JobConfig) -> dict[str, Any]:
    """The quickstart under `config`; its result, also written to result.json."""
    console = Console(highlight=False)
    stages = Stages(console)
    run_dir = prepare_run_dir(config)
    task = load_task(config.task.path, **config.task.args)
    with MemoryWatch() as memory:
        system = System(config, router=True)
        with stages.stage("start Ray, engine, trainer, store and router"):
            await system.__aenter__()
        try:
            result = await _use(config, system, task, run_dir, stages)
        finally:
            await system.__aexit__(None, None, None)
    result["main_job_s"] = stages.total_s
    result["stages_s"] = stages.seconds
    result["peak_rss_gb"] = memory.peak_rss_bytes / 1e9
    result["peak_pss_gb"] = memory.peak_pss_bytes / 1e9
    (run_dir / "result.json").write_text(json.dumps(result, indent=1))
    report.plot(read_metrics(run_dir), result, run_dir / "plot.png")
    report.print_table(result, console)
    console.print(
        f"\nplot: {run_dir}/plot.png   metrics: {run_dir}/metrics.jsonl   adapter (PEFT): {run_dir}/adapter\n"
        f"TensorBoard: tensorboard --logdir {run_dir}/tensorboard\nserve it: make serve"
    )
    return result


async def _use(config: JobConfig, system: System, task: Any, run_dir: Path, stages: Stages) -> dict[str, Any]:
    engine, stop = system.engine, tuple(config.rl.stop)
    manifest = (await engine.export_weights())[0]
    checksum_before = await engine.base_checksum()
    with stages.stage("tenants' adapters (supervised) and their accuracy"):
        tenants = [await prepare_tenant(system, tenant, config) for tenant in config.tenants]
    with stages.stage("held-out accuracy before"):
        before = await _evaluate(system, task, None)
    with stages.stage("tenants' answers in isolation"):
        isolated = {t.asks.name: await isolated_answers(system, t, stop) for t in tenants}
    traffic = Traffic(system.base_url, [t.asks for t in tenants])
    traffic.start()
    with stages.stage("tenants alone"):
        await asyncio.sleep(config.tenant_baseline_s)
    recorder = Recorder(run_dir, config.rl.steps, trackers=make_trackers(config, run_dir))
    loop = RLLoop(
        config,
        engine=engine,
        trainer=system.trainer,
        store=system.store,
        task=task,
        run_dir=run_dir,
        record=recorder.step,
        drafts=system.one_engine,
    )
    with stages.stage(f"{config.rl.steps} RL steps beside the tenants"):
        await loop.start()
        stats_before = await engine.stats()
        traffic.phase = "rl_on"
        await loop.run()
        traffic.phase = "after"
        stats_after = await engine.stats()
    await traffic.stop()
    recorder.close()
    assert loop.policy is not None
    with stages.stage("held-out accuracy after, export"):
        after = await _evaluate(system, task, loop.policy.version.digest)
        await system.store.export_peft(loop.policy.version.digest, str((run_dir / "adapter").resolve()))
        checksum_after = await engine.base_checksum()
        trainer_memory = await system.trainer.memory()
        sharing = base_sharing(manifest.entries[0].values.location, trainer_memory)
    await loop.close()
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": config.rl.steps,
        "activations": config.engine.activations.value,
        "dtype": config.engine.dtype,
        "eval_before": asdict(before),
        "eval_after": asdict(after),
        "policy": loop.policy.version.ref,
        "versions_published": loop.versions_published,
        "mixed_steps": stats_after.mixed_steps - stats_before.mixed_steps,
        "engine_steps": stats_after.steps - stats_before.steps,
        "dispatch_paths": stats_after.paths,
        **sharing,
        "checksum_equal": checksum_before == checksum_after == system.info.base_digest,
        "trainer_memory": trainer_memory,
        "memory_plan": {line.what: line.count_bytes for line in system.plan.memory},
        **_step_medians(read_metrics(run_dir)),
        **_tenant_results(tenants, traffic.answers, isolated),
    }


def base_sharing(location: Location, trainer_memory: Mapping[str, int]) -> dict[str, Any]:
    """base_copies, base_mappings (processes), base_read_only and base_bytes of the base that an engine exported.

    location: of one of its tensors. In shared memory the kernel's accounts of the file say it; memory mapped through CUDA IPC
    has none, so the trainer's own account of what it keeps besides (own_base_bytes) does, and IPC mappings are writable.
    """
    if location.transport is Transport.SHM:
        shared = mapping_report(location.path)
        mappings = len({m.pid for m in shared.mappings})
        copies, read_only, size = shared.copies, shared.read_only, shared.file_bytes
    else:
        size = trainer_memory["base_bytes"]
        copies, mappings, read_only = 1 + trainer_memory["own_base_bytes"] / size, 2, False
    return {"base_copies": copies, "base_mappings": mappings, "base_read_only": read_only, "base_bytes": size}


async def _evaluate(system: System, task: Any, adapter: str | None, problems: int | None = None) -> EvalResult:
    config = system.config
    return await evaluate(
        system.engine,
        task,
        problems=min(problems or config.rl.eval_problems, task.size("held_out")),
        adapter=adapter,
        max_tokens=config.rl.max_tokens,
        stop=tuple(config.rl.stop),
        tag=f"{config.name}-{task.name}-{adapter or 'base'}",
    )


@dataclass(frozen=True)
class PreparedTenant:
    """A tenant ready to ask: its traffic, and how well the base and its adapter do at its task."""

    asks: Tenant
    version: AdapterVersion | None
    base: EvalResult | None
    adapter: EvalResult | None


async def prepare_tenant(system: System, tenant: TenantConfig, config: JobConfig) -> PreparedTenant:
    """Train, publish, load and evaluate the tenant's adapter (or nothing, for a tenant of the plain base)."""
    source = tenant.task or tenant.prompts_task
    assert source is not None
    task = load_task(source.path, **source.args)
    prompts = [task.problem("held_out", i).prompt for i in range(min(config.tenant_prompts, task.size("held_out")))]
    model, version, base, adapter = system.info.model_name, None, None, None
    if tenant.task is not None:
        model = f"{tenant.name}-{task.name}"
        version = await _kept_version(system, model, tenant.name) if config.resume else None
        version = version or await train_supervised(
            trainer=system.trainer,
            store=system.store,
            info=system.info,
            task=task,
            name=model,
            owner=tenant.name,
            rank=tenant.rank,
            steps=tenant.sft_steps,
            batch=tenant.sft_batch,
            lr=tenant.sft_lr,
            seed=config.seed,
        )
        await system.engine.load_adapter(version, await system.store.tensors(version.digest))
        base = await _evaluate(system, task, None)
        adapter = await _evaluate(system, task, version.digest)
    asks = Tenant(
        name=tenant.name,
        api_key=system.keys[tenant.name].api_key,
        model=model,
        prompts=prompts,
        requests_per_s=tenant.requests_per_s,
        max_tokens=tenant.max_tokens,
        stop=list(config.rl.stop),
    )
    return PreparedTenant(asks, version, base, adapter)


async def _kept_version(system: System, model: str, owner: str) -> AdapterVersion | None:
    """The adapter an interrupted run already made for this base; None if it had not come that far."""
    try:
        version = await system.store.resolve(model, tenant=owner)
    except AdapterNotFound:
        return None
    return version if version.base_digest == system.info.base_digest else None


@dataclass(frozen=True)
class Isolated:
    """A tenant's answer to one prompt when nothing else runs: token texts, log-probabilities, top-two gaps (nats)."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


async def isolated_answers(system: System, tenant: PreparedTenant, stop: tuple[str, ...]) -> list[Isolated]:
    """Greedy answers to the tenant's prompts, one request at a time."""
    answers = []
    for i, prompt in enumerate(tenant.asks.prompts):
        sampling = Sampling(max_tokens=tenant.asks.max_tokens, temperature=0.0, stop=stop, logprobs=2)
        digest = tenant.version.digest if tenant.version else None
        request = GenerateRequest(f"isolated-{tenant.asks.name}-{i}", prompt, sampling, digest, "tenant")
        (seen,) = await system.engine.generate([request])
        gaps = []
        for pairs in seen.top_logprobs:
            best = sorted((value for _, value in pairs), reverse=True)
            gaps.append(best[0] - best[1])
        answers.append(Isolated(seen.token_ids, seen.text, seen.logprobs, tuple(gaps)))
    return answers


def _step_medians(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    def median(key: str) -> float:
        return percentile([m[key] for m in metrics], 50)

    return {
        "rollout_tok_s": median("rollout/tok_s"),
        "generate_s": median("time/generate_s"),
        "train_s": median("time/train_s"),
        "publish_s": median("time/publish_s"),
        "mismatch_mean": sum(m["mismatch/mean_abs_dlogp"] for m in metrics) / len(metrics),
        "mismatch_max": max(m["mismatch/max_abs_dlogp"] for m in metrics),
        "mismatch_k3": sum(m["mismatch/k3_kl"] for m in metrics) / len(metrics),
    }


def _tenant_results(
    tenants: Sequence[PreparedTenant], answers: Sequence[Answer], isolated: dict[str, list[Isolated]]
) -> dict[str, Any]:
    """Latencies per tenant and phase, raw samples included, and how the batched answers compare with the isolated ones."""
    results: list[dict[str, Any]] = []
    for tenant in tenants:
        entry: dict[str, Any] = {
            "name": tenant.asks.name,
            "model": tenant.asks.model,
            "accuracy_base": tenant.base.accuracy if tenant.base else None,
            "accuracy_adapter": tenant.adapter.accuracy if tenant.adapter else None,
        }
        for phase in ("rl_off", "rl_on"):
            seen = [a for a in answers if a.tenant == tenant.asks.name and a.phase == phase and not a.error]
            if seen:
                ttft, tpot = [a.ttft_ms for a in seen], [a.tpot_ms for a in seen if a.tpot_ms > 0] or [0.0]
                entry[phase] = {
                    "answers": len(seen),
                    "ttft_ms_p50": percentile(ttft, 50),
                    "ttft_ms_p99": percentile(ttft, 99),
                    "tpot_ms_p50": percentile(tpot, 50),
                    "tpot_ms_p99": percentile(tpot, 99),
                    "ttft_ms": ttft,
                    "tpot_ms": tpot,
                }
        results.append(entry)
    return {
        "tenants": results,
        "tenant_errors": [a.error for a in answers if a.error],
        **compare_answers([a for a in answers if not a.error and a.phase == "rl_on"], isolated),
    }


def compare_answers(answers: Sequence[Answer], isolated: dict[str, list[Isolated]]) -> dict[str, Any]:
    """How many batched answers equal the isolated ones, differ first where the top two were closer than twice the path's
    measured error (the largest |difference| of a shared token's log-probability), or differ otherwise."""
    pairs = [(a, isolated[a.tenant][a.prompt_index]) for a in answers]
    error = 0.0
    for answer, alone in pairs:
        if answer.text == alone.text:
            error = max([error, *(abs(x - y) for x, y in zip(answer.logprobs, alone.logprobs))])
    equal = near = wrong = 0
    for answer, alone in pairs:
        if answer.text == alone.text:
            equal += 1
            continue
        same = 0
        for x, y in zip(answer.logprobs, alone.logprobs):
            if abs(x - y) > error:
                break
            same += 1
        gap = alone.gaps[min(same, len(alone.gaps) - 1)]
        near += gap < 2 * error
        wrong += gap >= 2 * error
    return {"answers_equal": equal, "answers_near_tie": near, "answers_wrong": wrong, "path_error_logp": error}


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
