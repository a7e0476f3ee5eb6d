"""What is left of the down-projection under the decode path, projection by projection, and what serial launches would cost.

    python -m benchmarks.kernels.exposure --out exposure.json            # all of it; --quick: one model, one token, rank 64

Providers, each a chain of eight copies of one projection in a CUDA graph:
    decode        the path `lora_decode` takes          no_adapter    the same without adapters
    two_launches  prologue and dependent GEMM           h_given       the GEMM by itself, h and codes in memory
    shrink        the prologue by itself                serial_ours   both, one after the other
    serial_empty, serial_gemm   a kernel that does nothing, or cuBLAS' x A^T, before the GEMM with h given

The model: an adapter costs the epilogue's work (h_given - no_adapter) and whatever of the shrink outlasts the time until a block's first
epilogue needs h. A block works on `rounds` tiles, so that window is no_adapter / rounds. Exposed is two_launches - h_given; predicted
is max(0, shrink - window). The window is the paper's (section 4.1, Table 17), fitted by its authors after their data.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.harness import Results, capture, command_line, time_graphs, warm_up
from benchmarks.kernels import tune
from benchmarks.kernels.layers import ProjectionData, decode_workspace, projection_data, token_slots
from benchmarks.shapes import MODELS, RANKS, Projection, sharded
from epilora.kernels import decode_config as dc
from epilora.kernels.decode_launch import DecodeWorkspace, launch_part

COPIES = 8
SLOTS = 8
# (model, tensor-parallel ranks)
LAYERS = [("qwen3-8b", 1), ("qwen3-8b", 2), ("qwen3-8b", 4), ("qwen3.5-9b", 1), ("smollm2-135m", 1)]
TOKENS = (1, 4, 16)


def case_name(model: str, tp: int, projection: str, rank: int) -> str:
    """Name of one projection's rows."""
    return f"exposure/{model}/tp{tp}/{projection}/r{rank}"


def rounds_of(config: dc.DecodeConfig, N: int, num_sms: int) -> int:
    """Tiles one after another in a block of the GEMM."""
    tiles = -(-N // (config.row_tiles * 16))
    return -(-tiles // (num_sms * config.blocks_per_sm))


def exposure(times: dict[str, float], rounds: int) -> dict[str, float]:
    """The model's terms in us from the medians of one projection: epilogue, exposed, window, predicted."""
    window = times["no_adapter"] / rounds
    return {
        "epilogue_us": times["h_given"] - times["no_adapter"],
        "exposed_us": times["two_launches"] - times["h_given"],
        "window_us": window,
        "predicted_us": max(0.0, times["shrink"] - window),
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a line for every (case, tokens) of the newest run that has all providers of the model."""
    rows = list(rows)
    if not rows:
        return "no rows"
    run = rows[-1]["run_id"]
    found: dict[tuple[str, int], dict[str, float]] = {}
    rounds: dict[tuple[str, int], int] = {}
    for row in rows:
        if row["run_id"] == run and row["samples_us"]:
            key = (row["case"].removeprefix("exposure/"), row["M"])
            found.setdefault(key, {})[row["provider"]] = statistics.median(row["samples_us"])
            rounds[key] = row["rounds"]
    names = ["decode", "two_launches", "no_adapter", "h_given", "shrink", "serial_ours", "serial_empty", "serial_gemm"]
    terms = ["epilogue_us", "exposed_us", "window_us", "predicted_us"]
    lines = ["| projection | tokens | " + " | ".join([*names, *(t.removesuffix("_us") for t in terms)]) + " |"]
    lines.append("|---|" + "---:|" * (1 + len(names) + len(terms)))
    for key, times in found.items():
        model = (
            exposure(times, rounds[key]) if {"two_launches", "no_adapter", "h_given", "shrink"} <= set(times) else {}
        )
        cells = [f"{times[n]:.1f}" if n in times else "" for n in names] + [
            f"{model[t]:.1f}" if model else "" for t in terms
        ]
        lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def providers(
    config: dc.DecodeConfig,
    plain: dc.DecodeConfig,
    two: dc.DecodeConfig,
    slots: torch.Tensor,
    workspace: DecodeWorkspace,
) -> dict[str, Callable[[ProjectionData], object]]:
    """What is timed, by name."""
    nothing = torch.zeros(1, device=slots.device)

    def part(name: str, d: ProjectionData) -> None:
        launch_part(name, d.x, d.weight, d.lora_a, d.lora_b, slots, workspace=workspace, out=d.y, config=two)

    def after(first: Callable[[ProjectionData], object]) -> Callable[[ProjectionData], None]:
        def both(d: ProjectionData) -> None:
            first(d)
            part("gemm", d)

        return both

    slot = int(slots[0])
    return {
        "decode": lambda d: tune.run_projection(d, config, slots, workspace),
        "two_launches": lambda d: tune.run_projection(d, two, slots, workspace),
        "no_adapter": lambda d: tune.run_projection(d, plain, None, workspace),
        "h_given": lambda d: part("gemm", d),
        "shrink": lambda d: part("prologue", d),
        "serial_ours": lambda d: tune.run_projection(d, two, slots, workspace, use_pdl=False),
        "serial_empty": after(lambda d: nothing.zero_()),
        "serial_gemm": after(lambda d: [d.x @ a.values[slot].t() for a in d.lora_a]),
    }


def run_projection_cases(
    results: Results, model: str, tp: int, layer: Sequence[Projection], rank: int, M: int, replays: int
) -> None:
    """Time every provider for every projection of a layer and append the rows."""
    gpu, sms = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).multi_processor_count
    slots = token_slots(M, 1, SLOTS)
    workspace = decode_workspace(rank, layer)
    for shape in layer:
        config = dc.config_for(M, shape.N, shape.K, rank, SLOTS, device_name=gpu)
        plain = dataclasses.replace(dc.config_for(M, shape.N, shape.K, 0, SLOTS, device_name=gpu), fused=0)
        # The two launches that the model is about, where `decode` is one.
        two = dc.config_for(max(M, 2), shape.N, shape.K, rank, SLOTS, device_name=gpu)
        case = case_name(model, tp, shape.name, rank)
        if not all(dc.is_legal(c, M, shape.K, shape.slices, r) for c, r in ((config, rank), (plain, 0), (two, rank))):
            results.add_failure(
                case, "decode", M, f"no legal configuration of the CUDA path for K={shape.K}, {shape.slices}"
            )
            continue
        tune.precompile([config, two, dataclasses.replace(two, early=False)], M, rank)
        tune.precompile([plain], M, 0)
        chain = [projection_data(shape, M, rank, SLOTS) for _ in range(COPIES)]
        graphs = {
            name: capture(fn, chain, warmups=1) for name, fn in providers(config, plain, two, slots, workspace).items()
        }
        for name, samples in time_graphs(graphs, len(chain), replays).items():
            results.add(case, name, M, samples, rank=rank, tp=tp, rounds=rounds_of(two, shape.N, sms))
        del graphs, chain
        torch.cuda.empty_cache()
    results.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/exposure_h200.json"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="start no new layer after this long")
    args = parser.parse_args()
    start = time.time()
    results = Results(args.out, lambda rows: {}, command_line("python -m benchmarks.kernels.exposure", sys.argv[1:]))
    warm_up()
    cases = [(layer, rank, M) for layer in LAYERS for rank in RANKS for M in TOKENS]
    for (model, tp), rank, M in [(LAYERS[0], 64, 1)] if args.quick else cases:
        if time.time() - start > args.seconds:
            print(f"out of time before {model} tp{tp} rank {rank} M={M}", flush=True)
            break
        run_projection_cases(results, model, tp, sharded(MODELS[model], tp), rank, M, args.replays)
    print(table([r for r in results.rows if r["case"].startswith("exposure/")]))


if __name__ == "__main__":
    main()
