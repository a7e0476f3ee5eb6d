"""Measure two GPUs of one host and append to a results file.

    python -m benchmarks.two_gpus PART ... [--work FOLDER] [--out FILE] [--tiny] [--seconds N] [--groups N ...]

PART (each a command of under ten minutes, rows written as they are measured):
  tune       LoRA tables of vLLM for the shards of the 72B shape, into --work; `serving` needs them for the tuned variants
  serving    the 72B shape on two ranks: ours against each variant of vLLM, time per token and throughput (--groups 0 to 3)
  equality   log-probabilities of two ranks and of one against fp32
  all_reduce vLLM's custom all-reduce beside shared weights and a released KV cache
  pair       a tensor-parallel engine, a trainer of two ranks and tenants under Ray: steps, publishing, killed processes
  spread     two engines and one trainer: rollout tokens a second, an engine killed in a step

Order on a machine with two GPUs, the same --work for all:
    python -m benchmarks.two_gpus tune equality all_reduce --work W
    for g in 0 1 2 3; do python -m benchmarks.two_gpus serving --groups $g --work W; done
    python -m benchmarks.two_gpus pair --work W
    python -m benchmarks.two_gpus spread --work W
--tiny: a model of two narrow layers, on a machine without a GPU; needs an --out of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Results, command_line

from .summary import summarise

DEFAULT_OUT = Path(__file__).parents[1] / "results" / "two_gpus_h200x2.json"
PARTS = ("tune", "serving", "equality", "all_reduce", "pair", "spread")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--work", type=Path, default=Path("runs/two_gpus"), help="models, caches and logs; kept")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0, help="serving: no new question after this")
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 1, 2, 3], help="serving: which pairs of engines")
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(given)
    if args.tiny and args.out == DEFAULT_OUT:
        parser.error("--tiny measures nothing that the committed file is about: give --out FILE")
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    results = Results(args.out, summarise, command_line("python -m benchmarks.two_gpus", given))
    tuned = work / "tuned"

    def serving() -> None:
        from . import serving as part

        tables = str(tuned) if tuned.exists() else ""
        part.run(results, tiny=args.tiny, work=work, tuned=tables, seconds=args.seconds, groups=args.groups)

    def tune() -> None:
        from benchmarks.serving.tune import measured, write_tables
        from benchmarks.shapes import MODELS, sharded

        from .summary import MODEL, TENANTS

        MODELS[f"{MODEL}-tp2"] = sharded(MODELS[MODEL], 2)
        write_tables(measured(f"{MODEL}-tp2", 64, (TENANTS,), (1, 8, 32, 64, 512, 2048)), tuned, results.run["gpu"], 64)

    def equality() -> None:
        from . import serving as part

        part.equality(results, tiny=args.tiny, work=work)

    def all_reduce() -> None:
        from . import all_reduce as part

        part.run(results, tiny=args.tiny, work=work)

    def pair() -> None:
        from . import pair as part

        part.run(results, tiny=args.tiny, work=work)

    def spread() -> None:
        from . import spread as part

        part.run(results, tiny=args.tiny, work=work)

    by_name: dict[str, Callable[[], None]] = {
        "tune": tune, "serving": serving, "equality": equality, "all_reduce": all_reduce, "pair": pair, "spread": spread,
    }  # fmt: skip
    failed = results.run_parts(by_name, args.parts)
    for key, value in summarise(results.rows).items():
        print(f"{key} = {value}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see above, and the rows with a `failure`")


if __name__ == "__main__":
    main()
