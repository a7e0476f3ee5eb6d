"""Show what a configuration needs before anything starts: bundles, memory, which GPU types can run it, why others cannot.

    epilora plan configs/rl_27b.yaml [key=value ...]            one plan, with its arithmetic
    epilora plan configs/rl_27b.yaml --placements               every placement of the trainer's base, side by side

Needs no GPU, no Ray and no download: `engine.shape` names a committed shape for models whose folder is not here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from omegaconf.errors import OmegaConfBaseException

from epilora import planner
from epilora.config import JobConfig, load_config
from epilora.config.schema import Placement
from epilora.errors import EpiloraError, MemoryInfeasible


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; 1 if the configuration cannot run anywhere."""
    parser = argparse.ArgumentParser(
        prog="epilora plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML file; see configs/")
    parser.add_argument("--placements", action="store_true", help="compare all placements of the trainer's base")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(args.config, args.overrides)
        print(compare(args.config, args.overrides) if args.placements else describe(config))
    except (OmegaConfBaseException, ValueError, FileNotFoundError, EpiloraError) as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr)
        return 1
    return 0


def describe(config: JobConfig) -> str:
    """The plan, headed by what is planned."""
    engine = config.engine
    return (
        f"{config.name}: engine {engine.quantization} {engine.activations.value}, trainer {config.trainer.placement.value}\n"
        f"{planner.plan_for(config).describe()}"
    )


def compare(path: str, overrides: Sequence[str]) -> str:
    """A table: placement x (GiB of one GPU in rollouts and in training, pinned host GiB, GPU types)."""
    rows = [f"{'trainer base':<24}{'engine base':<18}{'rollouts':>9}{'training':>9}{'pinned':>8}  GiB; can run on"]
    for quantization in dict.fromkeys((load_config(path, overrides).engine.quantization, "none")):
        for placement in Placement:
            config = load_config(
                path,
                [*overrides, f"trainer.placement={placement.value}", f"engine.quantization={quantization}"],
            )
            rows.append(f"{placement.value:<24}{quantization:<18}{_numbers(config)}")
    return "\n".join(rows)


def _numbers(config: JobConfig) -> str:
    try:
        plan = planner.plan_for(config)
    except MemoryInfeasible as err:
        needed = err.args[0].split("cannot run on ", 1)
        return f"does not fit: {needed[1].splitlines()[0]}" if len(needed) > 1 else "does not fit this machine"
    except ValueError as err:
        return f"not possible: {err}"
    where = ", ".join(plan.accelerators) or "this machine"
    gib = planner.GIB
    return f"{plan.rollout_bytes / gib:9.1f}{plan.training_bytes / gib:9.1f}{plan.host_bytes / gib:8.1f}  {where}"


if __name__ == "__main__":
    raise SystemExit(main())
