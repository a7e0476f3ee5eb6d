"""`epilora doctor`: for each kind of LoRA layer of a model, which path it will take and why not a faster one.

    epilora doctor --model /models/Qwen3-8B --quantization fp8_per_channel --gpu H200 --max-lora-rank 64

It reads config.json only, so it runs anywhere. The same rules decide at load (`gpu_lora.decide`), on the layers themselves;
among the paths that it lists, the engine times the open ones and keeps the fastest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epilora.gpus import GPU_TYPES
from epilora.kernels.lora_decode import MAX_TOKENS, config_for, is_legal
from epilora.kernels.lora_expand import MAX_RANK
from epilora.kernels.tiles import MAX_SLICES
from epilora.model_facts import Layer, Linear, committed_shapes, read_facts

from .settings import ACTIVATIONS, Kind

# vLLM packs these modules of a checkpoint into one layer: packed name -> its parts, in order.
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
ONLINE_FP8 = ("fp8", "fp8_per_tensor", "fp8_per_channel")
_SHARED_LIMIT = {90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}  # bytes a block may have; 99 KiB on 8.9 and 12.x


@dataclass(frozen=True)
class Setup:
    """What an engine would be started with. capability: 90 for compute capability 9.0. base: from `base_format`."""

    capability: int
    base: str
    rank: int = 16
    slots: int = 1
    tensor_parallel: int = 1
    fully_sharded: bool = False
    activations: str = "w8a8"
    dual_stream: bool = False
    device_name: str = ""


@dataclass(frozen=True)
class Row:
    """One kind of layer: packed name, how many, [K, N] of one shard, slices, kind, paths in words, why not a faster one."""

    layer: str
    count: int
    K: int
    slices: tuple[int, ...]
    kind: Kind
    paths: str
    reason: str


def base_format(config: dict[str, Any], quantization: str) -> tuple[str, str]:
    """("fp8" or another name, why the base is not FP8 that our fused operator reads; empty if it is)."""
    stored = config.get("quantization_config") or config.get("compression_config") or {}
    method = str(stored.get("quant_method", "")).lower()
    if quantization in ONLINE_FP8 and method in ("", "fp8") and not stored.get("weight_block_size"):
        return "fp8", ""
    if quantization and quantization not in ("compressed-tensors",):
        return quantization, f"quantization={quantization} is no FP8 with one scale a channel or tensor"
    if not method:
        dtype = config.get("dtype") or config.get("torch_dtype") or "16 bit"
        return str(dtype), f"the base is {dtype}; quantize it: --quantization fp8_per_channel"
    if method == "fp8":
        if stored.get("weight_block_size"):
            return "fp8_block", f"the checkpoint has one scale a block of {stored['weight_block_size']}"
        if stored.get("activation_scheme") == "static":
            return "fp8_static", "the checkpoint's activation scales are static"
        return "fp8", ""
    if method == "compressed-tensors":
        groups = (stored.get("config_groups") or {}).values()
        kinds = [(g.get("weights") or {}, g.get("input_activations") or {}) for g in groups]
        fits = kinds and all(
            w.get("num_bits") == 8 and w.get("type") == "float" and w.get("strategy") in ("channel", "tensor") and a.get("dynamic")
            and a.get("strategy") == "token"
            for w, a in kinds
        )  # fmt: skip
        return (
            ("fp8", "")
            if fits
            else ("compressed-tensors", "its weights are no FP8 with activations quantised per token")
        )
    return method, f"the checkpoint is {method}"


def packed_layers(layer: Layer, shards: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, K, slices) of the linear layers that vLLM makes of a decoder layer's modules, on one of `shards` ranks."""
    linears = {linear.name: linear for linear in layer.linears}
    found: list[tuple[str, int, tuple[int, ...]]] = []
    done: set[str] = set()
    for name, linear in linears.items():
        if name in done:
            continue
        packed = next((p for p, parts in PACKED.items() if parts[0] == name and set(parts) <= set(linears)), None)
        parts = PACKED[packed] if packed else (name,)
        done.update(parts)
        slices = [width for part in parts for width in _widths(linears[part], layer)]
        K = linear.K // shards if linear.row_parallel else linear.K
        found.append((packed or name, K, tuple(n if linear.row_parallel else max(1, n // shards) for n in slices)))
    return found


def _widths(linear: Linear, layer: Layer) -> list[int]:
    """Out features of one module, by vLLM's slices: the delta net's fused q | k | v are three."""
    if linear.name == "in_proj_qkv" and layer.delta is not None:
        keys = layer.delta.key_heads * layer.delta.d_key
        return [keys, keys, layer.delta.values]
    return [linear.N]


def examine(name: str, count: int, K: int, slices: Sequence[int], setup: Setup, base_reason: str) -> Row:
    """The row of one kind of layer."""
    stock = beside = ""
    if setup.capability < 80:
        stock = f"compute capability {setup.capability / 10} is below 8.0"
    elif setup.dual_stream:
        stock = "VLLM_LORA_ENABLE_DUAL_STREAM is set: vLLM runs base and adapters on two streams itself"
    elif setup.fully_sharded and setup.tensor_parallel > 1:
        stock = "fully sharded adapters have a collective between A and B"
    elif setup.rank > MAX_RANK:
        stock = f"max_lora_rank is {setup.rank}; up to {MAX_RANK} is supported"
    elif len(slices) > MAX_SLICES:
        stock = f"it packs {len(slices)} projections; up to {MAX_SLICES} are supported"
    if stock:
        return Row(name, count, K, tuple(slices), Kind.STOCK, "vLLM's own", stock)
    if base_reason:
        beside = base_reason
    elif setup.capability < 89:
        beside = f"compute capability {setup.capability / 10} has no FP8; 8.9 is needed"
    elif K % 16 or sum(slices) % 16:
        beside = f"vLLM pads {K} x {sum(slices)} to multiples of 16"
    if beside:
        return Row(name, count, K, tuple(slices), Kind.BESIDE, "vLLM's base, our shrink and expand-add", beside)
    if setup.activations == "w8a16":
        return Row(name, count, K, tuple(slices), Kind.FUSED, "W8A16, adapters in the epilogue", "")
    decode, reason = f"decode up to {MAX_TOKENS} tokens", ""
    if setup.capability < 90:
        decode, reason = decode + " (Triton)", f"compute capability {setup.capability / 10} has no programmatic launch"
    else:
        limit = _SHARED_LIMIT.get(setup.capability, 99 * 1024)
        unfit = []
        for M in (1, 8, 16, 32):
            config = config_for(M, sum(slices), K, setup.rank, setup.slots, device_name=setup.device_name)
            if not is_legal(config, M, K, list(slices), setup.rank, limit):
                unfit.append(M)
        if unfit:
            decode = decode + " (Triton at " + ", ".join(map(str, unfit)) + ")"
            reason = (
                "K and every slice must be multiples of 16, the rank of 8, and two ring stages fit in shared memory"
            )
    return Row(name, count, K, tuple(slices), Kind.FUSED, f"{decode}, hybrid above", reason)


def rows_of(model: str, shape: str, setup: Setup, base_reason: str) -> list[Row]:
    """Rows of every kind of layer of a model. Raises as `model_facts.read_facts`."""
    facts = read_facts(model, shape)
    found = []
    for layer in facts.layer_kinds:
        for name, K, slices in packed_layers(layer, setup.tensor_parallel):
            found.append(examine(f"{layer.kind}: {name}", layer.count, K, slices, setup, base_reason))
    return found


def main(arguments: list[str]) -> int:
    """Print the table; 1 if some layer is left to vLLM."""
    parser = argparse.ArgumentParser(prog="epilora doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default="", help="a folder with a config.json")
    parser.add_argument("--shape", default="", help=f"instead of a folder, one of {', '.join(committed_shapes())}")
    parser.add_argument("--quantization", default="", help="as vLLM's; empty: what the checkpoint has")
    parser.add_argument("--activations", default="w8a8", choices=ACTIVATIONS)
    parser.add_argument("--gpu", default="H200", choices=sorted(GPU_TYPES))
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--fully-sharded-loras", action="store_true")
    given = parser.parse_args(arguments)
    path = Path(given.model) / "config.json"
    config = json.loads(path.read_text()) if given.model and path.exists() else {}
    base, reason = base_format(config, given.quantization or ("" if config else "fp8_per_channel"))
    setup = Setup(
        GPU_TYPES[given.gpu].compute_capability, base, given.max_lora_rank, given.max_loras, given.tensor_parallel,
        given.fully_sharded_loras, given.activations, device_name=f"NVIDIA {given.gpu}",
    )  # fmt: skip
    found = rows_of(given.model, given.shape, setup, reason)
    print(
        f"base {base}, {given.gpu} (sm_{setup.capability}), rank {setup.rank}, {setup.slots} slots, TP {setup.tensor_parallel}"
    )
    for row in found:
        slices = "+".join(map(str, row.slices))
        print(f"{row.count:>3} x {row.layer:<34} {row.K:>6} -> {slices:<18} {row.kind.value:<12} {row.paths}")
        if row.reason:
            print(f"{'':>6}not faster: {row.reason}")
    print("  embeddings, lm_head and mixtures of experts keep vLLM's own LoRA code")
    return int(any(row.kind is Kind.STOCK for row in found))
