"""`python -m benchmarks.kernels`: time the kernels on the GPU that is there and append to a results file.

The decode cases run here, the large batches, W8A16 and training in `large.py` afterwards, in a process of its own.
`--cases shapes` times other models, shards and ranks instead, without a bar. `--quick` keeps to the headline decode rows (under two minutes); without vLLM installed, `--no-vllm` leaves its rows out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

from benchmarks.harness import Results, command_line
from benchmarks.kernels import decode, other_shapes
from benchmarks.kernels.summary import summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results/kernels_h200.json"))
    parser.add_argument(
        "--table",
        type=pathlib.Path,
        help="tuned configurations (see benchmarks.kernels.tune); default: the library's own",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no new case after this long")
    parser.add_argument(
        "--cases", choices=("figures", "shapes"), default="figures", help="shapes: other models and ranks"
    )
    parser.add_argument("--decode-only", action="store_true", help="leave out large.py")
    args = parser.parse_args()
    results = Results(args.results, summarise, command_line("python -m benchmarks.kernels", sys.argv[1:]))
    if args.cases == "shapes":
        other_shapes.run(results, with_vllm=not args.no_vllm, replays=args.replays, seconds=args.seconds)
        results.write()
        return
    decode.run(
        results,
        table_path=args.table,
        with_vllm=not args.no_vllm,
        quick=args.quick,
        replays=args.replays,
        seconds=args.seconds,
    )
    results.write()
    if not args.quick and not args.decode_only:
        large = [sys.executable, "-m", "benchmarks.kernels.large", "--out", str(args.results)]
        subprocess.run(large, check=True)  # appends its rows to the same file
        results.rows = json.loads(args.results.read_text())["rows"]
    for key, value in summarise(results.rows).items():
        if value is not None:
            print(f"{key} = {value}")


if __name__ == "__main__":
    main()
