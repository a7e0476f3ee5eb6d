"""Search launch configurations of the CUDA decode path on the GPU that is there; prints a table, writes JSON.

    python -m benchmarks.kernels.tune --tokens 1 4 8 16 --out tuned.json

Every candidate runs as it will run: a chain of layers with weights of their own in one CUDA graph. A candidate whose result differs
from the reference by more than rounding is rejected before it is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import statistics
import time

import torch

from benchmarks.harness import capture, rms_error, time_graphs
from benchmarks.kernels.layers import ProjectionData, decode_workspace, layer_chain, token_slots, with_tokens
from benchmarks.shapes import MODELS, Projection
from epilora.kernels import lora_decode as ld

MAX_ERROR = 6e-3  # RMS; rounding h and y to bf16 gives 2e-3 to 3e-3


def candidates(shape: Projection, M: int, rank: int, wide: bool) -> list[ld.DecodeConfig]:
    """Legal configurations worth timing: GEMM tiles first, prologue splits for one tile shape each."""
    found = []
    kibs = (200, 104) if wide else (200,)
    for row_tiles, k_warps, stage_k, kib in itertools.product((1, 2, 3, 4, 6), (2, 4, 8), (512, 1024, 2048), kibs):
        if row_tiles * k_warps > 16 or row_tiles * k_warps < 4:
            continue
        tiles = -(-shape.N // (row_tiles * 16))
        rounds = -(-tiles // 132)
        if tiles / (rounds * 132) < 0.7:  # more than 30 % of the multiprocessors idle
            continue
        splits, warps = (6, 8) if shape.K >= 8192 else (4, 4)
        c = ld.DecodeConfig(row_tiles, k_warps, stage_k, kib, 1, warps, splits, 1)
        if ld.is_legal(c, M, shape.K, shape.slices, rank):
            found.append(c)
    return found


def prologue_candidates(best: ld.DecodeConfig, shape: Projection, M: int) -> list[ld.DecodeConfig]:
    """The best GEMM tile with other prologue shapes."""
    out = []
    for splits, warps in itertools.product((1, 2, 4, 6, 8, 12, 16), (2, 4, 8, 16)):
        if 128 <= shape.K / (splits * warps) <= 1024:
            out.append(dataclasses.replace(best, shrink_splits=splits, shrink_warps=warps))
    return out


def precompile(configs: list[ld.DecodeConfig], M: int, rank: int) -> None:
    """Compile every kernel the configurations need, in parallel."""
    jobs = set()
    for c in configs:
        jobs.add(("prologue", tuple(ld.prologue_macros(False, c.shrink_warps, M).items()), c.shrink_warps * 32))
        jobs.add(("gemm", tuple(ld.gemm_macros(False, c, M, rank).items()), (c.row_tiles * c.k_warps + 1) * 32))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: ld._kernel(*job, 0), jobs))


def runner(config: ld.DecodeConfig, slots: torch.Tensor | None, workspace: ld.DecodeWorkspace, **options):
    """fn(data) that launches one projection."""

    def run(data: ProjectionData) -> None:
        lora = (data.lora_a, data.lora_b, slots) if slots is not None else ()
        ld.lora_decode(data.x, data.weight, *lora, workspace=workspace, out=data.y, config=config, implementation="cuda", **options)

    return run


def check(config: ld.DecodeConfig, data: ProjectionData, slots: torch.Tensor | None, workspace: ld.DecodeWorkspace) -> float:
    """RMS error of one configuration against the fp32 reference."""
    data.y.fill_(float("nan"))
    runner(config, slots, workspace)(data)
    lora = (data.lora_a, data.lora_b, slots) if slots is not None else ()
    return rms_error(data.y, ld.lora_decode_ref(data.x, data.weight, *lora))


def search(chain: list[ProjectionData], configs: list[ld.DecodeConfig], slots, workspace, rank: int, replays: int) -> list[tuple[float, ld.DecodeConfig]]:
    """(median us, config), fastest first."""
    precompile(configs, chain[0].x.shape[0], rank)
    graphs = {}
    for c in configs:
        error = check(c, chain[0], slots, workspace)
        if error > MAX_ERROR:
            print(f"REJECTED {chain[0].shape.name} M={chain[0].x.shape[0]} error {error:.2e} {c}", flush=True)
            continue
        graphs[c] = capture(runner(c, slots, workspace), chain, warmups=1)
    times = time_graphs(graphs, len(chain), replays)
    return sorted(((statistics.median(t), c) for c, t in times.items()), key=lambda pair: pair[0])


def short(c: ld.DecodeConfig) -> str:
    return f"rows {c.row_tiles * 16} warps {c.row_tiles}x{c.k_warps} stage {c.stage_k} {c.shared_kib}K shrink {c.shrink_splits}x{c.shrink_warps}/{c.shrink_groups}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1], help="distinct adapters, one for each of --tokens or one for all")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=200.0, help="stop starting new searches after this long")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    start = time.time()
    layer = MODELS[args.model]
    base = layer_chain(1, args.rank, args.slots, layer)
    workspace = decode_workspace(args.rank, layer)
    table: dict[str, dict] = {}
    for index, M in enumerate(args.tokens):
        num_adapters = args.adapters[index] if len(args.adapters) > 1 else args.adapters[0]
        if time.time() - start > args.seconds:
            print(f"out of time before M={M}", flush=True)
            break
        slots = token_slots(M, num_adapters, args.slots)
        layers = [[with_tokens(d, M) for d in one] for one in base]
        best: list[ld.DecodeConfig] = []
        for i, shape in enumerate(layer):
            chain = [one[i] for one in layers]
            found = search(chain, candidates(shape, M, args.rank, wide=M in (1, 16)), slots, workspace, args.rank, args.replays)
            top = found[0][1]
            found2 = search(chain, [dataclasses.replace(c, shrink_groups=g) for c in prologue_candidates(top, shape, M) for g in sorted({1, num_adapters})], slots, workspace, args.rank, args.replays)
            top = found2[0][1]
            best.append(top)
            table[f"{shape.name}/M{M}/a{num_adapters}"] = {"us": found2[0][0], "config": dataclasses.asdict(top)}
            print(f"M={M} a={num_adapters} {shape.name}: {found2[0][0]:.1f} {short(top)} | gemm tiles: " + "; ".join(f"{t:.1f} {c.row_tiles}x{c.k_warps}/{c.stage_k}/{c.shared_kib}" for t, c in found[:5]) + f" ... worst {found[-1][0]:.1f} | shrink: " + "; ".join(f"{t:.1f} {c.shrink_splits}x{c.shrink_warps}/{c.shrink_groups}" for t, c in found2[1:5]) + f" ... worst {found2[-1][0]:.1f}", flush=True)

        def layer_run(with_slots, **options):
            runs = [runner(c, with_slots, workspace, **options) for c in best]

            def run(one):
                for r, d in zip(runs, one, strict=True):
                    r(d)

            return run

        variants = {
            "adapter": layer_run(slots),
            "none": layer_run(None),
            "serial prologue": layer_run(slots, overlap_previous=False),
            "none, serial prologue": layer_run(None, overlap_previous=False),
            "no PDL": layer_run(slots, use_pdl=False),
        }
        precompile(best, M, 0)
        graphs = {name: capture(fn, layers) for name, fn in variants.items()}
        times = {name: statistics.median(t) for name, t in time_graphs(graphs, len(layers), 20).items()}
        table[f"layer/M{M}/a{num_adapters}"] = times
        print(f"M={M} a={num_adapters} LAYER " + ", ".join(f"{n} {t:.1f}" for n, t in times.items()) + f"  ({time.time() - start:.0f} s)", flush=True)
        args.out.write_text(json.dumps({"model": args.model, "gpu": torch.cuda.get_device_name(), "rank": args.rank, "slots": args.slots, "table": table}, indent=1))


if __name__ == "__main__":
    main()
