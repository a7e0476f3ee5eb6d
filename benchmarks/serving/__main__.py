"""`python -m benchmarks.serving`: measure our plugin against stock vLLM end to end and append to a results file.

Engines of one wave start side by side on one GPU, are measured one at a time in alternating order, and end together. Every
wave is one set of settings, equal on both sides:

  one         one adapter slot; time per output token of one request: one adapter, none, LoRA off
  many        32 slots; the same, and the throughput of 32 tenants and of no adapter at all
  brief       the headline rows of both from one set of engines
  fp8         throughput with adapters stored in FP8 beside stock
  online      32 slots, traces served by the clock: poisson at several rates and both prompt lengths, then wildchat
  kv          vLLM sizes the KV cache itself; engines one after another, alone on the GPU
  equality    log-probabilities of ours and stock against fp32 (needs a model with weights)
  large       the 72B shape, engines one after another
  smoke       every question once on one set of engines

    python -m benchmarks.serving --waves one many                       # Qwen3-8B shape, weights drawn at random
    python -m benchmarks.serving --waves one --model llama-3.1-8b
    python -m benchmarks.serving --waves smoke --model epilora/models/tiny-arith --tiny       # a machine without a GPU

Rows are written as they are measured; `summary` is recomputed from all rows of the file. Starting costs most of the time: six
engines of the 8B shape side by side took 154 s on 16 cores, of it 53 to 109 s in torch.compile (two streams make every layer a
graph of its own). A second run with the same --work finds vLLM's compile caches and our timed paths.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time

from benchmarks.serving.engines import STOCK, VARIANTS
from benchmarks.serving.models import model_folder
from benchmarks.serving.run import FULL, TINY, Run, command_of, tuned_from
from benchmarks.serving.waves import WAVES, first_variants

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "serving_h200.json"
KERNEL_RESULTS = ROOT / "benchmarks" / "results" / "kernels_h200.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a shape's name, or a folder with a config.json")
    parser.add_argument("--waves", nargs="+", choices=sorted(WAVES), default=["one", "many"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="only these engines")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--work", type=pathlib.Path, help="folder for logs, compile caches, tuned tables")
    parser.add_argument(
        "--tuned", type=pathlib.Path, help="tuned tables (benchmarks.serving.tune); default: from kernel results"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times every engine is measured, order alternating")
    parser.add_argument("--throughput-rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="times every wave's engines are started anew")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2, 4, 8, 16], help="requests a second of the online wave"
    )
    parser.add_argument("--requests", type=int, default=400, help="of a trace, at every rate")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after this long")
    parser.add_argument(
        "--reserve", type=float, default=90.0, help="of these seconds, kept for measuring: drop engines not ready"
    )
    parser.add_argument("--tiny", action="store_true", help="small limits, eager engines: a machine without a GPU")
    parser.add_argument("--gpu", type=int, default=0)
    args = parser.parse_args()
    work = args.work or pathlib.Path(tempfile.mkdtemp(prefix="serving-"))
    work.mkdir(parents=True, exist_ok=True)
    tuned = args.tuned or tuned_from(KERNEL_RESULTS, args.model, work / "tuned")
    variants = args.variants or [v for v in VARIANTS if tuned is not None or "_tuned" not in v]
    if args.tiny:
        variants = [v for v in variants if v not in STOCK[1:]]
    run = Run(
        model=str(model_folder(args.model, work / "models")),
        variants=tuple(variants),
        tuned_folder=str(tuned or ""),
        out=args.out,
        work=work,
        rounds=args.rounds,
        throughput_rounds=args.throughput_rounds,
        rates=tuple(args.rates),
        requests=args.requests,
        deadline=time.monotonic() + args.seconds,
        reserve_s=args.reserve,
        limits=TINY if args.tiny else FULL,
        gpu=args.gpu,
        waves=WAVES,
        command=command_of(sys.argv[1:]),
    )
    plan = [name for _ in range(args.starts) for name in args.waves]
    try:
        run.prefetch(first_variants(run, plan[0]))
        for name, following in zip(plan, [*plan[1:], None], strict=True):
            if following is not None:
                run.prefetch(first_variants(run, following))
            run.wave(name)
    finally:
        run.close()
    for key, value in json.loads(args.out.read_text())["summary"].items():
        print(f"{key} = {value}")


if __name__ == "__main__":
    main()
