"""Accuracy of the base or of an adapter version on the configuration's evaluation sets.

    python -m jobs.evaluate --config configs/rl_27b.yaml [evaluation.adapter=NAME[@VERSION]] [key=value ...] [--dry-run]
    ray job submit --working-dir . -- python -m jobs.evaluate --config configs/rl_27b.yaml evaluation.adapter=policy-rl-27b

Joins a running base with equal settings, like every job. Writes evaluation.json into the run's folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from epilora.config.schema import JobConfig
from jobs.command import job_main, prepare_run_dir
from jobs.evaluation import evaluate_sets
from jobs.system import System


async def run(config: JobConfig) -> dict[str, Any]:
    """Ask all sets; the result, also written to evaluation.json. Raises ValueError if the configuration names no set."""
    if not config.evaluation.tasks:
        raise ValueError(
            "evaluation.tasks is empty: name at least one set in the configuration (see configs/rl_9b.yaml)"
        )
    run_dir = prepare_run_dir(config)
    async with System(config, router=False) as system:
        digest, ref = None, "base"
        if config.evaluation.adapter:
            version = await system.store.resolve(config.evaluation.adapter)
            await system.engine.load_adapter(version, await system.store.tensors(version.digest))
            digest, ref = version.digest, version.ref
        found = await evaluate_sets(system.engine, config.evaluation, digest, f"{config.name}-{ref}")
    result = {"name": config.name, "adapter": ref, "digest": digest}
    result["sets"] = {name: asdict(one) for name, one in found.items()}
    (run_dir / "evaluation.json").write_text(json.dumps(result, indent=1))
    for name, one in found.items():
        print(
            f"{name}: {ref} {100 * one.accuracy:.1f} % [{100 * one.ci_low:.1f}, {100 * one.ci_high:.1f}], "
            f"{one.problems} problems x {one.samples}"
        )
    return result


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
