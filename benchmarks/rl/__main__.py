"""Run parts of the RL benchmark and add their rows to the results file.

    python -m benchmarks.rl PART ... [--out FILE] [--small] [--profile] [--model FOLDER] [--arms NAME ...] [--seeds N]
                                     [--work FOLDER] [--placements NAME ...] [--tokens N ...] [--rates N ...] [--jobs N ...]

PART: gradients, train_speed, memory, learning (vLLM), one_copy (a GPU and vLLM), coserve and placements (vLLM and Ray).
--small runs shapes that a machine without a GPU can do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Results, command_line

from . import coserve, gradients, learning, memory, one_copy, placements, train_speed
from .summary import summarise

DEFAULT_OUT = Path(__file__).parents[1] / "results" / "rl_h200.json"
PARTS = ("gradients", "train_speed", "memory", "learning", "one_copy", "coserve", "placements")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true", help="train_speed: also list the step's kernels")
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="learning: a model folder")
    parser.add_argument(
        "--arms", nargs="+", choices=list(learning.ARMS), default=[a for a in learning.ARMS if a != "marlin"]
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/rl"), help="coserve, placements: the random model; kept"
    )
    parser.add_argument(
        "--placements", nargs="+", choices=list(placements.PLACEMENTS), default=list(placements.PLACEMENTS)
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="placements: tokens of a rollout")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 8.0], help="coserve: requests a second")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2], help="coserve: RL jobs at once")
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(given)
    results = Results(args.out, summarise, command_line("python -m benchmarks.rl", given))
    parts: dict[str, Callable[[], None]] = {
        "gradients": lambda: gradients.run(results, small=args.small),
        "train_speed": lambda: train_speed.run(results, small=args.small, profile=args.profile),
        "memory": lambda: memory.run(results, small=args.small),
        "learning": lambda: learning.run(results, small=args.small, model=args.model, arms=args.arms, seeds=args.seeds),
        "one_copy": lambda: one_copy.run(results, quick=args.small),
        "coserve": lambda: coserve.run(
            results, small=args.small, work=args.work.resolve(), rates=args.rates, jobs=args.jobs
        ),
        "placements": lambda: placements.run(
            results, small=args.small, work=args.work.resolve(), names=args.placements, tokens=args.tokens
        ),
    }
    failed = results.run_parts(parts, args.parts)
    for row in results.rows:
        if row["run_id"] == results.run_id and not row["case"].startswith("train_profile"):
            print(row["case"], row["provider"], row["M"], row[f"samples_{row['unit']}"], row.get("tensor", ""))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see above, and the rows with a `failure`")


if __name__ == "__main__":
    main()
