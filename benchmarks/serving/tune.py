"""Tuned launch configurations for vLLM's LoRA kernels, written as the JSON files that vLLM reads.

    python -m benchmarks.serving.tune --folder FOLDER --model qwen3-8b                       # measure on this GPU
    python -m benchmarks.serving.tune --folder FOLDER --model qwen3-8b --from-results benchmarks/results/kernels_h200.json

With VLLM_TUNED_CONFIG_FOLDER=FOLDER vLLM looks up `[slots + 1][outputs][tokens][K][N]` and takes the nearest key where one is
absent, except for the number of outputs, which must be there. Measuring: for every projection the fastest of a list of
configurations of the shrink and of the expand, alone on this GPU (`vllm_baseline.tune`); vLLM's default is among them.
From results: what the kernel benchmark's tuned rows were launched with. Token counts that one slot count lacks are taken
from the nearest slot count that has them, so that no prefill runs with a configuration made for one token.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.shapes import MODELS

Key = tuple[str, int, int]  # op, hidden size (K of the shrink, widest output of the expand), outputs
Config = dict[str, int | None]
Tables = dict[int, dict[int, dict[Key, Config]]]  # slots -> tokens -> key -> configuration
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
SLOTS = (1, 32)
_CASE = re.compile(r"layer/(?P<model>[^/]+)/r(?P<rank>\d+)/a(?P<adapters>\d+)/s(?P<slots>\d+)")


def tables_from_rows(rows: Sequence[dict[str, Any]], model: str, rank: int) -> Tables:
    """Configurations of the kernel benchmark's tuned rows; where several fit, most adapters, then the newest run.

    Raises ValueError if no row fits.
    """
    tables: Tables = {}
    most: dict[tuple[int, int], int] = {}
    for row in rows:
        case = _CASE.fullmatch(row["case"])
        if case is None or case["model"] != model or int(case["rank"]) != rank or not row.get("samples_us"):
            continue
        if not row["provider"].startswith("vllm_lora_tuned"):
            continue
        slots, tokens, adapters = int(case["slots"]), row["M"], int(case["adapters"])
        if adapters < most.get((slots, tokens), 0):
            continue
        most[slots, tokens] = adapters
        found: dict[Key, Config] = {}
        for name, config in row["config"].items():
            op, hidden, outputs = name.split("/")
            found[op, int(hidden), int(outputs)] = config
        tables.setdefault(slots, {})[tokens] = found
    if not tables:
        raise ValueError(f"no tuned rows of {model} at rank {rank}; measure them (leave out --from-results)")
    return filled(tables)


def filled(tables: Tables) -> Tables:
    """Tables in which every slot count has every token count that any has (from the nearest slot count)."""
    tokens = sorted({m for by_tokens in tables.values() for m in by_tokens})
    whole: Tables = {}
    for slots in tables:
        whole[slots] = {}
        for m in tokens:
            nearest = min((s for s in tables if m in tables[s]), key=lambda s: abs(s - slots))
            whole[slots][m] = tables[nearest][m]
    return whole


def measured(model: str, rank: int, slots: Sequence[int], tokens: Sequence[int]) -> Tables:
    """Tune on this GPU. model: a name in `benchmarks.shapes.MODELS`."""
    import torch

    from benchmarks.kernels import large, vllm_baseline
    from benchmarks.kernels.layers import layer_chain, token_slots, with_tokens

    tables: Tables = {}
    for num_slots in slots:
        base = layer_chain(1, rank, num_slots, MODELS[model], num_layers=2)
        for M in tokens:
            layers = [[with_tokens(d, M) for d in one] for one in base]
            slots_M = token_slots(M, min(M, num_slots), num_slots)
            candidates = None if M <= 32 else large.vllm_candidates_for(large.is_small(M))
            paths = vllm_baseline.VllmLayer(M, slots_M, num_slots, rank)
            chosen = vllm_baseline.tune(layers, paths, candidates=candidates)
            for op, hidden, outputs in {vllm_baseline.op_key(o, d) for d in layers[0] for o in ("shrink", "expand")}:
                if (op, hidden, outputs) not in chosen:
                    chosen[op, hidden, outputs] = _default(op, num_slots, M, hidden, rank, outputs)
            tables.setdefault(num_slots, {})[M] = chosen
            print(f"{model}: tuned {len(chosen)} launches, {M} tokens, {num_slots} slots", flush=True)
        del base
        torch.cuda.empty_cache()
    return tables


def _default(op: str, slots: int, M: int, hidden: int, rank: int, outputs: int) -> Config:
    """vLLM's own configuration."""
    from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

    return get_lora_op_configs(op, slots + 1, M, hidden, rank, outputs, None if op == "shrink" else True)


def write_tables(tables: Tables, folder: pathlib.Path, gpu: str, rank: int) -> list[pathlib.Path]:
    """Write vLLM's three files for a GPU's name; the expand's is the same for adding and for overwriting.

    Tables that the files already hold for other keys (another model) stay.
    """
    trees: dict[str, dict[str, Any]] = {"shrink": {}, "expand": {}}
    name = gpu.replace(" ", "_").replace("-", "_")
    names = {"shrink": [f"{name}_SHRINK.json"], "expand": [f"{name}_EXPAND_TRUE.json", f"{name}_EXPAND_FALSE.json"]}
    folder.mkdir(parents=True, exist_ok=True)
    for op, files in names.items():
        if (folder / files[0]).exists():
            trees[op] = json.loads((folder / files[0]).read_text())
    for slots, by_tokens in tables.items():
        for M, by_key in by_tokens.items():
            for (op, hidden, outputs), config in by_key.items():
                K, N = (hidden, rank) if op == "shrink" else (rank, hidden)
                leaf = trees[op]
                for key in (slots + 1, outputs, M, K):
                    leaf = leaf.setdefault(str(key), {})
                leaf[str(N)] = config
    written = []
    for op, files in names.items():
        for file in files:
            (folder / file).write_text(json.dumps(trees[op]))
            written.append(folder / file)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(MODELS))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--from-results", type=pathlib.Path)
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = parser.parse_args()
    if args.from_results:
        results = json.loads(args.from_results.read_text())
        gpu, tables = results["gpu"], tables_from_rows(results["rows"], args.model, args.rank)
    else:
        import torch

        gpu, tables = torch.cuda.get_device_name(), measured(args.model, args.rank, args.slots, args.tokens)
    for path in write_tables(tables, args.folder, gpu, args.rank):
        print(path)


if __name__ == "__main__":
    main()
