"""Search launch configurations of the CUDA decode path on the GPU that is there; prints a table, writes JSON.

    python -m benchmarks.kernels.tune --tokens 1 4 8 16 --out tuned.json

Candidates first run alone (a chain of one projection), the best of them then inside the layer, one choice at a time, because what a
projection costs depends on its neighbours: launches overlap. A candidate whose result differs from the reference by more than
rounding is rejected before it is timed.
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
from collections.abc import Iterable

import torch

from benchmarks.harness import capture, rms_error, time_graphs, warm_up
from benchmarks.kernels.layers import ProjectionData, decode_workspace, layer_chain, token_slots, with_tokens
from benchmarks.shapes import MODELS, Projection, sharded
from epilora.kernels import decode_config as dc
from epilora.kernels import decode_launch, lora_decode

MAX_ERROR = 6e-3  # RMS; rounding h and y to bf16 gives 2e-3 to 3e-3
KEPT = 4  # candidates of a projection that are tried inside the layer
# (row tiles, warps or warpgroups along K, bytes of K a stage)
TILES = ((2, 4, 512), (2, 4, 1024), (2, 2, 512), (3, 2, 1024), (4, 2, 512), (6, 2, 512))
WGMMA_TILES = ((2, 1, 1024), (2, 2, 1024), (3, 1, 512), (4, 1, 512), (4, 2, 512))
FUSED_TILES = ((2, 4, 512), (2, 2, 512), (3, 2, 512), (4, 2, 512), (6, 2, 512))


def candidates(shape: Projection, M: int, rank: int, adapters: int) -> list[dc.DecodeConfig]:
    """Legal tile shapes worth timing: those that leave at most 30 % of the multiprocessors idle."""
    found = []
    for kind, tiles in (("mma", TILES), ("wgmma", WGMMA_TILES), ("fused", FUSED_TILES)):
        if kind == "fused" and (M > 4 or adapters > 4):
            continue
        for row_tiles, k_warps, stage_k in tiles:
            blocks = -(-shape.N // (row_tiles * 16))
            if blocks / (-(-blocks // 132) * 132) < 0.7:
                continue
            c = dc.DecodeConfig(
                row_tiles=row_tiles,
                k_warps=k_warps,
                stage_k=stage_k,
                wgmma=kind == "wgmma",
                fused=(1 if M == 1 else 2 if M == 2 else 4) if kind == "fused" else 0,
                window_kib=56,
                shrink_warps=8,
                shrink_splits=4 if shape.K < 8192 else 8,
                shrink_groups=adapters,
                lora_warps=8 if adapters > 4 else 4,
            )
            if dc.is_legal(c, M, shape.K, shape.slices, rank):
                found.append(c)
    return found


def variations(c: dc.DecodeConfig, K: int, rank: int) -> list[list[dc.DecodeConfig]]:
    """Choices to make one after another inside the layer, each a list of alternatives to `c`."""
    pairs = [(s, w) for s, w in itertools.product((1, 2, 4, 8, 16), (4, 8)) if 128 <= K / (s * w) <= 1024]
    if c.fused:
        pairs = [(s, c.shrink_warps) for s in (2, 4, 8, 16)]
    windows = [dataclasses.replace(c, window_kib=w) for w in (32, 40, 72, 96)]
    return [
        [dataclasses.replace(c, shrink_splits=s, shrink_warps=w) for s, w in pairs] if rank else [],
        [*windows, dataclasses.replace(c, shared_kib=220)],
        [] if c.fused else [dataclasses.replace(c, early=not c.early)],
    ]


def precompile(configs: Iterable[dc.DecodeConfig], M: int, rank: int) -> None:
    """Compile every kernel the configurations need, in parallel."""
    jobs = set()
    for c in configs:
        warps = c.shrink_warps if rank else dc.QUANTISE_WARPS
        if not c.fused:
            jobs.add(("prologue", tuple(dc.prologue_macros(False, warps, M).items()), warps * 32))
        jobs.add(("gemm", tuple(dc.gemm_macros(False, c, M, rank).items()), dc.gemm_threads(c, rank)))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: decode_launch.kernel(*job, 0), jobs))


def run_projection(
    data: ProjectionData,
    config: dc.DecodeConfig,
    slots: torch.Tensor | None,
    workspace: decode_launch.DecodeWorkspace,
    **options,
) -> None:
    """One call of the decode path into the projection's own output."""
    lora = (data.lora_a, data.lora_b, slots) if slots is not None else ()
    lora_decode.lora_decode(
        data.x, data.weight, *lora, workspace=workspace, out=data.y, config=config, implementation="cuda", **options
    )


def layer_runner(configs: list[dc.DecodeConfig], slots, workspace, **options):
    """fn(layer) that runs all projections of a layer."""

    def run(layer: list[ProjectionData]) -> None:
        for data, config in zip(layer, configs, strict=True):
            run_projection(data, config, slots, workspace, **options)

    return run


def error_of(config: dc.DecodeConfig, data: ProjectionData, slots, workspace, tries: int = 3) -> float:
    """Largest RMS error of one configuration against the fp32 reference over a few calls."""
    lora = (data.lora_a, data.lora_b, slots) if slots is not None else ()
    reference = lora_decode.lora_decode_ref(data.x, data.weight, *lora)
    worst = 0.0
    for _ in range(tries):
        data.y.fill_(float("nan"))
        workspace.h.fill_(float("nan"))
        run_projection(data, config, slots, workspace)
        worst = max(worst, rms_error(data.y, reference))
    return worst


def search_layer(
    layers: list[list[ProjectionData]], slots, adapters: int, workspace, rank: int, replays: int = 7
) -> tuple[list[dc.DecodeConfig], list[str]]:
    """The fastest configuration found for each projection of the layer, and lines that tell how. slots None, rank 0: no adapter."""
    M = layers[0][0].x.shape[0]
    lists = [candidates(d.shape, M, rank, adapters) for d in layers[0]]
    precompile(itertools.chain.from_iterable(lists), M, rank)
    lines, kept = [], []

    def correct(i: int, configs: Iterable[dc.DecodeConfig]) -> list[dc.DecodeConfig]:
        good = []
        for c in configs:
            error = error_of(c, layers[0][i], slots, workspace, tries=2)
            if error <= MAX_ERROR:
                good.append(c)
            else:
                lines.append(f"REJECTED {layers[0][i].shape.name} M={M} error {error:.1e} {short(c)}")
        return good

    for i, configs in enumerate(lists):
        chain = [one[i] for one in layers]
        good = correct(i, configs)
        graphs = {c: capture(lambda d, c=c: run_projection(d, c, slots, workspace), chain, warmups=1) for c in good}
        times = {c: statistics.median(t) for c, t in time_graphs(graphs, len(chain), replays).items()}
        order = sorted(times, key=times.__getitem__)
        lines.append(
            f"M={M} R={rank} {layers[0][i].shape.name}: "
            + "; ".join(f"{times[c]:.1f} {short(c)}" for c in order[:6])
            + f" ... {times[order[-1]]:.1f}"
        )
        # The fastest of either kind: what runs fast alone need not do so between others.
        kept.append(
            list(
                dict.fromkeys(order[:KEPT] + [c for c in order if c.fused][:2] + [c for c in order if not c.fused][:2])
            )
        )
    best = [k[0] for k in kept]

    def improve(i: int, alternatives: list[dc.DecodeConfig]) -> None:
        shape = layers[0][i].shape
        legal = [c for c in alternatives if c != best[i] and dc.is_legal(c, M, shape.K, shape.slices, rank)]
        if not legal:
            return
        precompile(legal, M, rank)
        legal = [best[i], *correct(i, legal)]
        graphs = {
            c: capture(layer_runner([*best[:i], c, *best[i + 1 :]], slots, workspace), layers, warmups=1) for c in legal
        }
        times = {c: statistics.median(t) for c, t in time_graphs(graphs, len(layers), replays).items()}
        best[i] = min(times, key=times.__getitem__)

    for _ in range(2):
        for i in range(len(best)):
            improve(i, kept[i])
    for choice in range(3):
        for i, data in enumerate(layers[0]):
            improve(i, variations(best[i], data.shape.K, rank)[choice])
    return best, lines


def short(c: dc.DecodeConfig) -> str:
    """A configuration in a few characters."""
    kind = "wg" if c.wgmma else f"fused{c.fused}" if c.fused else "mma"
    return f"{kind} {c.row_tiles}x{c.k_warps}/{c.stage_k} w{c.window_kib}/{c.shared_kib}{'e' if c.early else ''} s{c.shrink_splits}x{c.shrink_warps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument(
        "--adapters",
        type=int,
        nargs="+",
        default=[1],
        help="distinct adapters, one for each of --tokens or one for all",
    )
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that share the model's projections")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=200.0, help="stop starting new searches after this long")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="table of configurations; kept entries of an existing file stay"
    )
    args = parser.parse_args()
    start = time.time()
    layer = sharded(MODELS[args.model], args.tp)
    base = layer_chain(1, args.rank, args.slots, layer)
    workspace = decode_workspace(args.rank, layer)
    table = (
        json.loads(args.out.read_text()) if args.out.exists() else {"gpu": torch.cuda.get_device_name(), "entries": []}
    )
    warm_up()
    for index, M in enumerate(args.tokens):
        if time.time() - start > args.seconds:
            print(f"out of time before M={M}", flush=True)
            break
        adapters = args.adapters[index] if len(args.adapters) > 1 else args.adapters[0]
        slots = token_slots(M, adapters, args.slots)
        layers = [[with_tokens(d, M) for d in one] for one in base]
        best, lines = search_layer(layers, slots, adapters, workspace, args.rank)
        plain, more = search_layer(layers, None, 1, workspace, 0) if adapters == 1 else (best, [])
        precompile(plain, M, 0)
        variants = {
            "adapter": layer_runner(best, slots, workspace),
            "none": layer_runner(plain, None, workspace),
            "serial prologue": layer_runner(best, slots, workspace, overlap_previous=False),
            "none, serial prologue": layer_runner(plain, None, workspace, overlap_previous=False),
            "no PDL": layer_runner(best, slots, workspace, use_pdl=False),
        }
        graphs = {name: capture(fn, layers) for name, fn in variants.items()}
        times = {name: round(statistics.median(t), 2) for name, t in time_graphs(graphs, len(layers), 20).items()}
        lines += more
        found = [(shape, args.rank, config) for shape, config in zip(layer, best, strict=True)]
        found += [(shape, 0, config) for shape, config in zip(layer, plain, strict=True) if adapters == 1]
        for shape, rank, config in found:
            entry = {"N": shape.N, "K": shape.K, "M": M, "rank": rank, "adapters": adapters}
            table["entries"] = [e for e in table["entries"] if any(e[k] != entry[k] for k in entry)]
            table["entries"].append(entry | {"config": dataclasses.asdict(config)})
        name = args.model if args.tp == 1 else f"{args.model}-tp{args.tp}"
        table.setdefault("layers", {})[f"{name}/r{args.rank}/M{M}/a{adapters}/s{args.slots}"] = times
        args.out.write_text(json.dumps(table, indent=1))
        for line in lines:
            print(line, flush=True)
        print(
            f"M={M} a={adapters} LAYER "
            + ", ".join(f"{n} {t:.1f}" for n, t in times.items())
            + f"  ({time.time() - start:.0f} s)",
            flush=True,
        )
        for name, configs in (("adapter", best), ("none", plain)):
            chosen = " | ".join(f"{s.name} {short(c)}" for s, c in zip(layer, configs, strict=True))
            print(f"   {name}: {chosen}", flush=True)


if __name__ == "__main__":
    main()
