"""Decode cases: a layer of 1 to 32 tokens, ours and vLLM's kernels interleaved on the same tensors."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

import torch

from benchmarks.harness import CHAIN_LAYERS, Results, capture, read_bandwidth_bytes_s, rms_error, time_graphs, warm_up
from benchmarks.kernels import tune
from benchmarks.kernels.layers import ProjectionData, decode_workspace, layer_chain, token_slots, with_tokens
from benchmarks.kernels.summary import adapter_case
from benchmarks.shapes import LAYER, layer_adapter_bytes, layer_weight_bytes
from epilora.kernels import dispatch
from epilora.kernels import lora_decode as ld
from epilora.kernels.decode_config import invariant_config
from epilora.quant.operand import Operand

RANK = 64
MAX_SLOTS = 64
# (tokens, distinct adapters, slots): the figures first, then the one-adapter rows with other slot counts
CASES = [
    (1, 1, 8),
    (16, 1, 8),
    (8, 1, 8),
    (4, 1, 8),
    (32, 32, 32),
    (32, 1, 32),
    (32, 8, 32),
    (1, 1, 32),
    (1, 1, 1),
    (16, 1, 32),
]
QUICK = [(1, 1, 8), (16, 1, 8)]


def _with_slots(data: ProjectionData, slots: int) -> ProjectionData:
    """The same adapters, the first `slots` of them."""

    def cut(operand: Operand) -> Operand:
        return Operand(operand.values[:slots], operand.format)

    return dataclasses.replace(data, lora_a=[cut(o) for o in data.lora_a], lora_b=[cut(o) for o in data.lora_b])


def configs_from(table: dict[str, Any] | None, M: int, adapters: int) -> list[ld.DecodeConfig]:
    """Configurations of the layer's projections: from a tuned table where it has them, else what the library would use.

    adapters: 0 for none. With one adapter the library is not told how many there are, as in a captured graph.
    """
    out = []
    rank, expected = (RANK, max(1, adapters)) if adapters else (0, 1)
    for p in LAYER:
        found = None
        for entry in (table or {}).get("entries", []):
            if (entry["N"], entry["K"], entry["M"], entry["rank"], entry["adapters"]) == (p.N, p.K, M, rank, expected):
                groups = adapters if adapters > 1 else 0
                found = dataclasses.replace(ld.DecodeConfig(**entry["config"]), shrink_groups=groups)
        known = adapters if adapters > 1 else None
        name = torch.cuda.get_device_name()
        out.append(found or ld.config_for(M, p.N, p.K, rank, MAX_SLOTS, device_name=name, distinct_adapters=known))
    return out


def run(
    results: Results, *, table_path: pathlib.Path | None, with_vllm: bool, quick: bool, replays: int, seconds: float
) -> None:
    """Time every case and append its rows; the file is written after each case."""
    start = time.time()
    table = json.loads(table_path.read_text()) if table_path else None
    cases = QUICK if quick else CASES
    most_slots = max(s for _, _, s in cases)
    base = layer_chain(1, RANK, most_slots)
    workspace = decode_workspace(RANK)
    warm_up()
    bandwidth = read_bandwidth_bytes_s(2)
    print(
        f"read bandwidth {bandwidth / 1e12:.2f} TB/s, weights alone {layer_weight_bytes() / bandwidth * 1e6:.1f} us a layer",
        flush=True,
    )
    tuned_for: dict[bool, dict] = {}
    for M, adapters, num_slots in cases:
        if time.time() - start > seconds:
            print(f"out of time before M={M} adapters={adapters} slots={num_slots}", flush=True)
            break
        case = adapter_case(adapters, RANK, num_slots)
        slots = token_slots(M, adapters, num_slots)
        layers = [[with_tokens(_with_slots(d, num_slots), M) for d in one] for one in base]
        configs = configs_from(table, M, adapters)
        plain = configs_from(table, M, 0)
        invariant = [invariant_config(p.N, p.K) for p in LAYER]
        tune.precompile(configs, M, RANK)
        tune.precompile(invariant, M, RANK)
        tune.precompile(plain, M, 0)
        errors = [tune.error_of(c, d, slots, workspace) for c, d in zip(configs, layers[0], strict=True)]
        if max(errors) > tune.MAX_ERROR:
            results.add_failure(case, "epilora", M, f"error against the fp32 reference {errors}")
            print(f"WRONG {case} M={M} {errors}", flush=True)
            continue
        variants = {
            "epilora": tune.layer_runner(configs, slots, workspace),
            "epilora_no_adapter": tune.layer_runner(plain, None, workspace),
            "epilora_no_adapter_no_overlap_between_projections": tune.layer_runner(
                plain, None, workspace, overlap_previous=False
            ),
            "epilora_no_overlap_between_projections": tune.layer_runner(
                configs, slots, workspace, overlap_previous=False
            ),
            "epilora_batch_invariant": tune.layer_runner(invariant, slots, workspace),
            "epilora_no_pdl": tune.layer_runner(configs, slots, workspace, use_pdl=False),
        }
        graphs, calls, extra = {}, {}, {}
        for name, fn in variants.items():
            dispatch.reset_calls()
            graphs[name] = capture(fn, layers, warmups=0)
            calls[name] = dispatch.calls()
        if with_vllm:
            from benchmarks.kernels import vllm_baseline

            paths = vllm_baseline.VllmLayer(M, slots, num_slots, RANK)
            many = M == 32 and adapters == 32
            if many not in tuned_for:
                tuned_for[many] = vllm_baseline.tune(layers, paths)
            for mode, chosen in (("default", {}), ("tuned", tuned_for[many])):
                with vllm_baseline.configured(chosen):
                    for streams, fn in (("one_stream", paths.one_stream), ("two_streams", paths.two_streams)):
                        name = f"vllm_lora_{mode}_{streams}"
                        graphs[name] = capture(fn, layers)
                        extra[name] = {"config": {"/".join(map(str, k)): v for k, v in chosen.items()}}
            graphs["vllm_no_adapter"] = capture(paths.no_adapter, layers)
            y = paths.base(layers[0][0]).clone()
            h = paths.shrink(layers[0][0])
            theirs = paths.expand(layers[0][0], h, y, True)
            reference = ld.lora_decode_ref(
                layers[0][0].x, layers[0][0].weight, layers[0][0].lora_a, layers[0][0].lora_b, slots
            )
            extra["vllm_lora_default_one_stream"] |= {"rms_error": [rms_error(theirs, reference)]}
        samples = time_graphs(graphs, CHAIN_LAYERS, replays)
        floor = (layer_weight_bytes() + adapters * layer_adapter_bytes(RANK)) / bandwidth * 1e6
        for name, values in samples.items():
            facts: dict[str, Any] = {
                "adapters": adapters,
                "slots": num_slots,
                "rank": RANK,
                "floor_us": round(floor, 1),
            }
            facts |= {"calls_per_path": calls.get(name, {name: len(LAYER) * CHAIN_LAYERS})} | extra.get(name, {})
            if name == "epilora":
                facts |= {
                    "config": [dataclasses.asdict(c) for c in configs],
                    "rms_error": [round(e, 6) for e in errors],
                }
            results.add(case, name, M, values, **facts)
        results.write()
        medians = {name: sorted(v)[len(v) // 2] for name, v in samples.items()}
        print(
            f"M={M} a={adapters} s={num_slots}: "
            + ", ".join(f"{n} {t:.1f}" for n, t in medians.items())
            + f" | floor {floor:.1f}, error {max(errors):.1e} ({time.time() - start:.0f} s)",
            flush=True,
        )
        del graphs
        torch.cuda.empty_cache()
