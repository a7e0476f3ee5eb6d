"""Decode layers of other models, their tensor-parallel shards and other ranks, ours beside vLLM's default kernels; no bar hangs on them.

python -m benchmarks.kernels --cases shapes        # rows `layer/{model}[-tpN]/r{rank}/a1/s8`
"""

from __future__ import annotations

import time

import torch

from benchmarks.harness import CHAIN_LAYERS, Results, capture, time_graphs, warm_up
from benchmarks.kernels import tune
from benchmarks.kernels.layers import decode_workspace, layer_chain, token_slots, with_tokens
from benchmarks.kernels.summary import adapter_case
from benchmarks.shapes import MODELS, sharded
from epilora.kernels import dispatch
from epilora.kernels import lora_decode as ld

SLOTS = 8
TOKENS = (1, 16)
# (model, tensor-parallel ranks, rank of the adapter)
SHAPES = [
    ("qwen3-8b", 1, 16),
    ("qwen3-8b", 1, 128),
    ("qwen3-8b", 2, 64),
    ("qwen3-8b", 4, 64),
    ("llama-3.1-8b", 1, 64),
    ("qwen3.5-9b", 1, 64),
    ("qwen3.5-27b", 1, 64),
    ("qwen3.5-27b", 2, 64),
    ("qwen2.5-72b", 1, 64),
    ("qwen2.5-72b", 2, 64),
    ("qwen2.5-72b", 4, 64),
    ("smollm2-135m", 1, 64),
]


def case_of(model: str, tp: int, rank: int) -> str:
    """Name of the rows of one layer."""
    return adapter_case(1, rank, SLOTS, model if tp == 1 else f"{model}-tp{tp}")


def run(results: Results, *, with_vllm: bool, replays: int, seconds: float) -> None:
    """Time every shape and append its rows; the file is written after each."""
    start = time.time()
    warm_up()
    gpu = torch.cuda.get_device_name()
    for model, tp, rank in SHAPES:
        if time.time() - start > seconds:
            print(f"out of time before {model} tp{tp} rank {rank}", flush=True)
            break
        layer, case = sharded(MODELS[model], tp), case_of(model, tp, rank)
        base = layer_chain(1, rank, SLOTS, layer)
        workspace = decode_workspace(rank, layer)
        for M in TOKENS:
            slots = token_slots(M, 1, SLOTS)
            layers = [[with_tokens(d, M) for d in one] for one in base]
            chosen = {
                r: [ld.config_for(M, p.N, p.K, r, SLOTS if r else 0, device_name=gpu) for p in layer] for r in (rank, 0)
            }
            for r, configs in chosen.items():
                tune.precompile(configs, M, r)
            errors = [tune.error_of(c, d, slots, workspace) for c, d in zip(chosen[rank], layers[0], strict=True)]
            if max(errors) > tune.MAX_ERROR:
                results.add_failure(case, "epilora", M, f"error against the fp32 reference {errors}")
                continue
            variants = {
                "epilora": tune.layer_runner(chosen[rank], slots, workspace),
                "epilora_no_adapter": tune.layer_runner(chosen[0], None, workspace),
                "epilora_no_overlap_between_projections": tune.layer_runner(
                    chosen[rank], slots, workspace, overlap_previous=False
                ),
            }
            if with_vllm:
                from benchmarks.kernels.vllm_baseline import VllmLayer

                paths = VllmLayer(M, slots, SLOTS, rank)
                variants["vllm_lora_default_one_stream"] = paths.one_stream
                variants["vllm_lora_default_two_streams"] = paths.two_streams
                variants["vllm_no_adapter"] = paths.no_adapter
            graphs, calls = {}, {}
            for name, fn in variants.items():
                dispatch.reset_calls()
                graphs[name] = capture(fn, layers)
                calls[name] = dispatch.calls() or {name: len(layer) * CHAIN_LAYERS}
            medians = []
            for name, samples in time_graphs(graphs, CHAIN_LAYERS, replays).items():
                results.add(case, name, M, samples, rank=rank, slots=SLOTS, adapters=1, calls_per_path=calls[name])
                medians.append(f"{name} {sorted(samples)[len(samples) // 2]:.1f}")
            print(f"{case} M={M}: " + ", ".join(medians), flush=True)
            del graphs
        del base
        torch.cuda.empty_cache()
        results.write()
