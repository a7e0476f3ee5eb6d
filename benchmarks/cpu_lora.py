"""Rollout tokens a second on the CPU: stock vLLM's LoRA path against ours, in one process, engine by engine in turn.

    python -m benchmarks.cpu_lora --model FOLDER [--sequences 64 256] [--dtype float32] [--adapters 1 2] [--rounds 5]

Variants: `stock` is vLLM's own LoRA classes with its W8A8 base (what runs without the plugin; float32 still needs the
plugin's admission of that dtype); `ours_w8a8` is our LoRA path on the same base; `ours` adds unrounded activations (the
default). Every variant samples the same seeded requests through the same engine class; row i runs under adapter i
modulo their number (1: an RL step's rollouts, 2: neighbouring rows always differ). One sample: tokens of all sequences
over the seconds from submission to the last of them, and the same over the process's CPU seconds. Rounds go through the
variants in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.harness import Results
from epilora.adapters.digest import adapter_digest
from epilora.plugin.engine import VllmEngine
from epilora.plugin.environment import prepare_environment
from epilora.types import AdapterSpec, AdapterVersion, GenerateRequest, Sampling

NEW_TOKENS = 24
VARIANTS = {"stock": "w8a8", "ours_w8a8": "w8a8", "ours": "w8a16"}  # name -> activations
TINY_MODEL = pathlib.Path(__file__).parents[1] / "epilora" / "models" / "tiny-arith"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median tokens/s by variant, dtype and batch, and the ratio to stock of the same run; newest run wins."""
    medians: dict[tuple[str, str, int, str], float] = {}
    for row in rows:
        if row["samples_tok_s"]:
            key = (row["run_id"], row["case"], row["M"], row["provider"])
            medians[key] = statistics.median(row["samples_tok_s"])
    summary: dict[str, Any] = {}
    for (run_id, case, sequences, provider), value in medians.items():
        cell = summary.setdefault(f"{case}/{sequences}", {})
        cell[f"{provider}_tok_s"] = round(value, 1)
        stock = medians.get((run_id, case, sequences, "stock"))
        if stock and provider != "stock":
            cell[f"{provider}_over_stock"] = round(value / stock, 3)
    return summary


def random_adapter(base: list[dict[str, Any]], rank: int, seed: int) -> tuple[AdapterVersion, dict[str, torch.Tensor]]:
    """A random adapter on all linear layers `base` lists."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for row in base:
        name = f"base_model.model.{row['name']}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, row["in_features"], generator=generator) * 0.02
        tensors[f"{name}.lora_B.weight"] = torch.randn(row["out_features"], rank, generator=generator) * 0.02
    targets = tuple(sorted({row["name"].rsplit(".", 1)[-1] for row in base}))
    spec = AdapterSpec(rank, 2.0 * rank, targets)
    return AdapterVersion(f"bench{seed}", 1, adapter_digest(spec, tensors), spec), tensors


def build(variant: str, model: str, dtype: str, sequences: int, adapters: int = 2) -> VllmEngine:
    """An engine of one variant. `stock` is built while vLLM's own classes are back in its table."""
    import vllm.lora.utils as lora_utils

    ours = lora_utils._all_lora_classes
    if variant == "stock":
        lora_utils._all_lora_classes = STOCK_CLASSES
    try:
        return VllmEngine(
            name=variant,
            model_path=model,
            dtype=dtype,
            activations=VARIANTS[variant],
            max_model_len=64,
            max_num_seqs=sequences,
            max_num_batched_tokens=2048,
            max_loras=adapters,
            max_lora_rank=16,
            kv_cache_bytes=256 << 20,
        )
    finally:
        lora_utils._all_lora_classes = ours


async def measure(engine: VllmEngine, digests: list[str], sequences: int, round_index: int) -> tuple[float, float]:
    """(tokens a second, tokens a CPU second) of one batch."""
    await engine.reset_prefix_cache()
    sampling = [Sampling(NEW_TOKENS, seed=i, logprobs=0, ignore_eos=True) for i in range(sequences)]
    prompts = [tuple(3 + (i * 7 + k) % 20 for k in range(6)) for i in range(sequences)]
    batch = [
        GenerateRequest(f"{round_index}-{i}", prompts[i], sampling[i], digests[i % len(digests)], "rollout")
        for i in range(sequences)
    ]
    began, cpu_began = time.perf_counter(), time.process_time()
    done = await engine.generate(batch)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    tokens = sum(len(c.token_ids) for c in done)
    return tokens / seconds, tokens / cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="results file to add to; without it the rows are only printed, as the last line")
    args = parser.parse_args()
    prepare_environment()
    import vllm.lora.utils as lora_utils

    global STOCK_CLASSES
    STOCK_CLASSES = lora_utils._all_lora_classes  # before the plugin is loaded
    from epilora.plugin.register import register

    register()
    command = " ".join(["python", "-m", "benchmarks.cpu_lora", *sys.argv[1:]])
    results = Results(args.out, summarise, command) if args.out else None
    rows: list[dict[str, Any]] = []
    for dtype, sequences, adapters in itertools.product(args.dtype, args.sequences, args.adapters):
        case = f"{dtype}-{adapters}-adapters"
        engines = {variant: build(variant, args.model, dtype, sequences, adapters) for variant in VARIANTS}
        samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        cpu_samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        digests: dict[str, list[str]] = {}
        paths: dict[str, Counter[str]] = {variant: Counter() for variant in VARIANTS}
        for variant, engine in engines.items():
            base = engine._rpc("epilora_linear_modules")
            digests[variant] = []
            for seed in range(adapters):
                version, tensors = random_adapter(base, 16, seed)
                asyncio.run(engine.load_adapter(version, tensors))
                digests[variant].append(version.digest)
        for round_index in range(args.rounds + 1):
            for variant, engine in engines.items():
                before = engine._rpc("epilora_stats")["paths"]
                rate, cpu_rate = asyncio.run(measure(engine, digests[variant], sequences, round_index))
                if round_index:  # the first one warms up
                    samples[variant].append(round(rate, 1))
                    cpu_samples[variant].append(round(cpu_rate, 1))
                    paths[variant].update(
                        {k: v - before.get(k, 0) for k, v in engine._rpc("epilora_stats")["paths"].items()}
                    )
        for variant, engine in engines.items():
            calls = {path: count for path, count in paths[variant].items() if count}
            facts = {
                "sequences": sequences,
                "adapters": adapters,
                "new_tokens": NEW_TOKENS,
                "calls_per_path": calls,
                "samples_cpu_tok_s": cpu_samples[variant],
            }
            rows.append({"provider": variant, "dtype": dtype, "samples_tok_s": samples[variant], **facts})
            if results is not None:
                results.add(case, variant, sequences, samples[variant], unit="tok_s", **facts)
            rate = statistics.median(samples[variant])
            print(f"{case:20s} {sequences:4d} sequences {variant:9s} {rate:8.0f} tok/s", flush=True)
            engine.close()
    if results is not None:
        results.write()
    print(json.dumps({"rows": rows}))


STOCK_CLASSES: tuple[type, ...] = ()

if __name__ == "__main__":
    main()
