"""The command line all jobs share: `--config FILE key=value ... [--dry-run]`, clean stops on Ctrl-C and SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from epilora import log
from epilora.config import JobConfig, load_config, to_yaml
from epilora.errors import EpiloraError

Job = Callable[[JobConfig], Awaitable[Any]]


def job_main(job: Job, *, description: str, default_config: str | None = None) -> None:
    """Parse, validate, print the plan for `--dry-run`, or run `job` and exit 0; 130 after Ctrl-C, 143 after SIGTERM, 1 for
    a configuration or a placement that cannot work."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=default_config, help="YAML file; see configs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan, then exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    log.setup()
    try:
        config = load_config(args.config, args.overrides)
        if args.dry_run:
            from epilora import planner

            print(to_yaml(config))
            print(planner.plan_for(config).describe())
            return
        sys.exit(_run(job, config))
    except (OmegaConfBaseException, ValueError, FileNotFoundError, EpiloraError) as err:
        raise SystemExit(f"{type(err).__name__}: {err}") from err


def _run(job: Job, config: JobConfig) -> int:
    stopped_by: list[int] = []

    async def guarded() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if not stopped_by:
                print(
                    f"\nstopping ({signal.Signals(number).name}); the last checkpoint stays",
                    file=sys.stderr,
                    flush=True,
                )
                task.cancel()
            stopped_by.append(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await job(config)

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        if not stopped_by:
            raise
        print(f"stopped; go on with resume=true name={config.name}", file=sys.stderr)
        return 128 + stopped_by[0]
    return 0


def prepare_run_dir(config: JobConfig) -> Path:
    """The run's folder with its resolved configuration. An earlier run of the name is moved aside unless this one resumes it."""
    folder = Path(config.out)
    if folder.exists() and not config.resume:
        aside = folder.with_name(
            f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S', time.localtime(folder.stat().st_mtime))}"
        )
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder
