"""Search the tiles of the 16-bit-activation GEMM for a storage format on the GPU that is there; prints the best by shape.

    python -m benchmarks.formats tune [--base nvfp4] [--tokens 1 16] [--seconds 60]

One choice of a configuration changes at a time, twice through; a candidate must agree with the reference before it is timed. What is found
goes into `w8a16_config_for` by hand. Chains of four copies of one Qwen3-8B projection in CUDA graphs, candidates replayed in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.formats.layers import BASES, CHAIN, LIMIT, RANK, Check, Layer, compile_ahead, make_layer
from benchmarks.harness import rms_error, time_variants, warm_up
from benchmarks.shapes import LAYER
from epilora.kernels.arguments import shared_limit, weight_kind
from epilora.kernels.w8a16 import W8A16Config, is_legal_w8a16, w8a16_config_for, w8a16_gemm, w8a16_gemm_ref

CHOICES: dict[str, tuple[int, ...]] = {
    "block_m": (8, 16, 32),
    "block_k": (64, 128, 256, 512),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5),
    "split_k": (1, 2, 4, 8),
    "block_n": (32, 64, 128),
}


def _microseconds(layers: Sequence[Layer], base: str, candidates: Sequence[W8A16Config]) -> dict[W8A16Config, float]:
    """Median time of every candidate that is right."""
    right, x, weight = [], layers[0].x, layers[0].bases[base]
    wanted = w8a16_gemm_ref(x, weight)
    checks = [
        Check(str(c), lambda c=c: (w8a16_gemm(x, weight, config=c), wanted, LIMIT[x.dtype]))  # type: ignore[misc]
        for c in candidates
    ]
    compile_ahead(checks)
    for config, check in zip(candidates, checks, strict=True):
        out, want, limit = check.run()
        if rms_error(out, want) <= limit:
            right.append(config)
        else:
            print(f"WRONG {config}", flush=True)
    variants = {str(c): (lambda d, c=c: w8a16_gemm(d.x, d.bases[base], config=c)) for c in right}
    times = time_variants(variants, layers, replays=12)
    return {c: statistics.median(times[str(c)]) for c in right}


def run(arguments: Sequence[str]) -> int:
    """The `tune` command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.formats tune", description=__doc__.splitlines()[0])
    parser.add_argument("--base", choices=sorted(BASES), default="nvfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=60.0, help="stop starting new searches after this long")
    given = parser.parse_args(arguments)
    device, until = torch.device("cuda"), time.monotonic() + given.seconds
    warm_up()
    for M in given.tokens:
        whole = 0.0
        for shape in LAYER:
            layers = [
                make_layer(shape, M, torch.bfloat16, device, rank=RANK, slots=1, bases=(given.base,))
                for _ in range(CHAIN)
            ]
            weight = layers[0].bases[given.base]
            kind, shared = weight_kind(weight), shared_limit(device)
            first = best = w8a16_config_for(M, shape.N, shape.K, shared, kind)
            times = _microseconds(layers, given.base, [first])
            for name, values in (*CHOICES.items(), *CHOICES.items()):
                if time.monotonic() > until:
                    print("out of time", flush=True)
                    break
                tried = [replace(best, **{name: value}) for value in values]
                tried = [c for c in tried if is_legal_w8a16(c, shape.N, shape.K, shared, kind) and c not in times]
                times |= _microseconds(layers, given.base, tried)
                best = min(times, key=times.__getitem__)
            whole += times[best]
            print(f"M={M} {shape.name}: {times[first]:.1f} -> {times[best]:.1f} us {asdict(best)}", flush=True)
        print(f"M={M} layer {whole:.1f} us", flush=True)
    return 0
