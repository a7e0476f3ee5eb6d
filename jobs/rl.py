"""One RL job on a shared base: train a policy, evaluate it, publish every step, leave it in the store.

    python -m jobs.rl --config configs/rl_small.yaml [key=value ...] [--dry-run]
    ray job submit --working-dir . -- python -m jobs.rl --config configs/rl_small.yaml

Joins the cluster of `RAY_ADDRESS` (which `ray job submit` sets) and shares a running base with equal settings; without one it
starts everything here. Metrics go to metrics.jsonl and TensorBoard in the run's folder, and to `tracking.wandb` and
`tracking.mlflow` where they are set. SIGTERM (`ray job stop`) leaves the last checkpoint: `resume=true` goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epilora.config.schema import JobConfig
from epilora.tasks import load_task
from jobs.command import job_main, prepare_run_dir
from jobs.evaluation import evaluate, evaluate_sets
from jobs.loop import RLLoop
from jobs.recorder import Recorder
from jobs.revival import train_through
from jobs.system import System
from jobs.trackers import make_trackers


async def run(config: JobConfig) -> dict[str, Any]:
    """Train as configured; the result, also written to result.json in the run's folder."""
    run_dir = prepare_run_dir(config)
    task = load_task(config.task.path, **config.task.args)
    async with System(config, router=False) as system:
        checksum = await system.engine.base_checksum()
        recorder = Recorder(run_dir, config.rl.steps, trackers=make_trackers(config, run_dir))
        loop = RLLoop(
            config,
            engine=system.engine,
            trainer=system.trainer,
            store=system.store,
            task=task,
            run_dir=run_dir,
            record=recorder.step,
            drafts=system.one_engine,
        )
        await loop.start()
        started_at = loop.step
        before = await _evaluate(system, task, None)
        try:
            revivals = await train_through(loop, system)
            assert loop.policy is not None
            after = await _evaluate(system, task, loop.policy.version.digest)
            sets = await evaluate_sets(system.engine, config.evaluation, loop.policy.version.digest, config.name)
            await system.store.export_peft(loop.policy.version.digest, str((run_dir / "adapter").resolve()))
        finally:
            recorder.close()
            await loop.close(keep_policy=False)
        result = {
            "name": config.name,
            "steps": loop.step,
            "resumed_at": started_at,
            "revivals": revivals,
            "policy": loop.policy.version.ref,
            "policy_digest": loop.policy.version.digest,
            "eval_before": before,
            "eval_after": after,
            "evaluation": {name: asdict(found) for name, found in sets.items()},
            "checksum_equal": checksum == await system.engine.base_checksum(),
        }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1))
    _say(result, run_dir)
    return result


async def _evaluate(system: System, task: Any, adapter: str | None) -> dict[str, float]:
    rl = system.config.rl
    seen = await evaluate(
        system.engine,
        task,
        problems=min(rl.eval_problems, task.size("held_out")),
        adapter=adapter,
        max_tokens=rl.max_tokens,
        stop=tuple(rl.stop),
        tag=f"{system.config.name}-{adapter or 'base'}",
    )
    return asdict(seen)


def _say(result: dict[str, Any], run_dir: Path) -> None:
    before, after = result["eval_before"], result["eval_after"]
    print(
        f"{result['name']}: {result['steps']} steps, held-out accuracy {100 * before['accuracy']:.1f} % -> "
        f"{100 * after['accuracy']:.1f} % [{100 * after['ci_low']:.1f}, {100 * after['ci_high']:.1f}], {result['policy']}, {run_dir}"
    )


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
