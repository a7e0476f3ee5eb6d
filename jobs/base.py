"""Bring a base up on a running cluster and leave it to others: engine, trainer and store under the pool.

    ray job submit --working-dir . -- python -m jobs.base --config configs/rl_small.yaml [key=value ...] [--dry-run]

Asking for a base that runs with the same settings does nothing. The router (docs/serving.md) serves it as soon as it is there.
"""

from __future__ import annotations

import os

from epilora.config.schema import JobConfig
from jobs.command import job_main
from jobs.system import System


async def run(config: JobConfig) -> None:
    """Ask the pool for the configured base; returns when it runs. Raises ValueError without a cluster to leave it on."""
    if "RAY_ADDRESS" not in os.environ:
        raise ValueError(
            "RAY_ADDRESS is not set: there is no cluster that would keep the base; use `ray job submit`, or jobs.serve"
        )
    async with System(config, router=False) as system:
        print(f"base {system.info.name} ({system.info.model_name}, {system.info.quantization}) runs", flush=True)


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
