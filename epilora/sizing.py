"""The memory arithmetic of one base: an engine and the trainer beside it, on a GPU (or one rank of several) or on a CPU.

Every line says what it counts and how. A base alternates between two phases, and a line may belong to one of them: in
*rollouts* the engine samples and the trainer waits; in *training* the trainer computes, and the KV cache and an offloaded
copy of the base are elsewhere or here. What must fit is the larger phase.

What is exact: weights, scales, adapters, optimizer state, KV cache, recurrent states, pinned copies. What is derived from the
tensors autograd keeps (counted on transformers' layers, `tests/test_sizing.py` holds it): activations. What is an allowance,
for things no shape determines: CUDA contexts and the pool of captured graphs.

Legend: T tokens of a micro-batch, w bytes of an activation, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from epilora.config.schema import EngineConfig, JobConfig, Placement
from epilora.model_facts import Layer, ModelFacts

MIB = 2**20
GIB = 2**30
WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
# A CUDA context with the modules torch, Triton and cuBLAS load; engine and trainer are two processes.
GPU_CONTEXT_BYTES = 600 * MIB
# Memory of the engine's captured CUDA graphs.
CUDA_GRAPH_POOL_BYTES = 1 * GIB
# The gated delta net works through a sequence in chunks of this many tokens (transformers' and FLA's kernels).
DELTA_CHUNK = 64
# epilora/trainer/logprob.py never holds more fp32 logits than this per chunk.
CPU_LOGITS_CHUNK_BYTES = 8 * MIB
GPU_LOGITS_CHUNK_BYTES = 256 * MIB
# epilora/kernels/training.py widens codes by panels of this size.
GPU_PANEL_BYTES = 32 * MIB


@dataclass(frozen=True)
class MemoryLine:
    """count_bytes of `what`, counted as `how`; whether it exists in rollouts and in training."""

    what: str
    count_bytes: int
    how: str = ""
    rollouts: bool = True
    training: bool = True


@dataclass(frozen=True)
class Recipe:
    """What a trainer placement keeps where.

    own: format of the trainer's own base ("" none: it maps the engine's). offloaded: that copy waits in pinned host memory
    during rollouts. kv_kept: the engine keeps its KV cache while the trainer computes.
    """

    own: str
    offloaded: bool
    kv_kept: bool


RECIPES: dict[Placement, Recipe] = {
    Placement.shared_kv_released: Recipe("", offloaded=False, kv_kept=False),
    Placement.shared_kv_kept: Recipe("", offloaded=False, kv_kept=True),
    Placement.own_fp8: Recipe("fp8", offloaded=False, kv_kept=True),
    Placement.own_fp8_offloaded: Recipe("fp8", offloaded=True, kv_kept=False),
    Placement.own_bf16: Recipe("16bit", offloaded=False, kv_kept=True),
    Placement.own_bf16_offloaded: Recipe("16bit", offloaded=True, kv_kept=False),
}


def base_format(quantization: str) -> str:
    """`fp8`, `nvfp4` or `16bit` (unquantised: the engine's dtype), from vLLM's name of a quantisation.

    Raises ValueError for a name whose size is not known.
    """
    if quantization in ("none", ""):
        return "16bit"
    if quantization.startswith("fp8"):
        return "fp8"
    if "fp4" in quantization:
        return "nvfp4"
    raise ValueError(
        f"engine.quantization={quantization!r} cannot be sized; sized: none, fp8*, and names with fp4 (NVFP4)"
    )


def base_bytes(facts: ModelFacts, stored: str, width: int) -> int:
    """Bytes of a whole copy: linear layers in format `stored`, everything else in `width` bytes."""
    return weight_bytes(facts, stored, width) + scale_bytes(facts, stored) + facts.other_parameters * width


def weight_bytes(facts: ModelFacts, stored: str, width: int) -> int:
    """Of the linear layers' stored values."""
    return {"fp8": facts.linear_parameters, "nvfp4": facts.linear_parameters // 2}.get(
        stored, facts.linear_parameters * width
    )


def scale_bytes(facts: ModelFacts, stored: str) -> int:
    """fp8: one fp32 per out channel. nvfp4: one byte per 16 values (the scale of a tensor is not counted)."""
    return {"fp8": 4 * facts.out_channels, "nvfp4": facts.linear_parameters // 16}.get(stored, 0)


def engine_lines(engine: EngineConfig, facts: ModelFacts, kv_in_training: bool) -> list[MemoryLine]:
    """The engine's memory on one of its GPUs (tensor_parallel of them), or of its host memory."""
    shards, width, stored = engine.tensor_parallel, WIDTH[engine.dtype], base_format(engine.quantization)
    per = f" / {shards}" if shards > 1 else ""
    values, scales = weight_bytes(facts, stored, width), scale_bytes(facts, stored)
    slot = facts.adapter_parameters(engine.max_lora_rank, shards)
    kv_bytes = engine.kv_cache_mib * MIB
    kept_bytes = 0 if kv_in_training else int(kv_bytes * engine.tenant_kv_share)
    name = {"fp8": "FP8 codes", "nvfp4": "NVFP4 codes", "16bit": engine.dtype}[stored]
    lines = [
        MemoryLine(
            f"base: {name}, one copy",
            values // shards,
            f"{facts.linear_parameters:,} weights x {values / facts.linear_parameters:g} B{per}",
        ),
        MemoryLine(
            f"base: embeddings, head, norms in {engine.dtype}",
            facts.other_parameters * width // shards,
            f"{facts.other_parameters:,} x {width} B{per}",
        ),
        MemoryLine(
            f"adapter slots: {engine.max_loras} of rank {engine.max_lora_rank}",
            slot * engine.max_loras * width,
            f"{engine.max_loras} x {slot:,} x {width} B",
        ),
        MemoryLine("KV cache", kv_bytes - kept_bytes, kv_capacity(engine, facts), training=kv_in_training),
    ]
    if kept_bytes:
        how = f"{engine.tenant_kv_share:g} of the cache"
        lines.append(MemoryLine("KV cache that tenants keep in training", kept_bytes, how))
    if scales:
        how = f"{facts.out_channels:,} channels x 4 B{per}" if stored == "fp8" else f"1 B per 16 weights{per}"
        lines.insert(1, MemoryLine("base: scales", scales // shards, how))
    return lines


def kv_capacity(engine: EngineConfig, facts: ModelFacts) -> str:
    """What engine.kv_cache_mib holds, in words: tokens, and whole sequences with their recurrent states."""
    shards = engine.tensor_parallel
    per_token = facts.kv_elements_per_token * WIDTH[engine.dtype] // min(shards, facts.kv_heads)
    state = facts.state_bytes_per_sequence // shards
    longest = per_token * engine.max_model_len + state
    fits = engine.kv_cache_mib * MIB // longest
    text = f"{per_token:,} B a token"
    if state:
        text += f" + {state / MIB:.1f} MiB of states a sequence"
    return f"{text}: {fits} sequences of {engine.max_model_len} tokens at once"


def engine_step_bytes(engine: EngineConfig, facts: ModelFacts) -> MemoryLine:
    """Activations of one engine step at its largest, and the sampler's logits.

    A token: residual and hidden state, both halves of the MLP, its product and that in 8 bit. A row of logits: the engine's
    dtype, fp32, log-probabilities, sorted values and int64 indices.
    """
    width, shards = WIDTH[engine.dtype], engine.tensor_parallel
    tokens, rows = engine.max_num_batched_tokens, engine.max_num_seqs
    per_token = 3 * facts.hidden * width + (3 * width + 1) * facts.ffn // shards
    per_row = facts.vocab * (width + 4 + 4 + 4 + 8)
    return MemoryLine(
        f"engine step: {tokens} tokens, {rows} rows of logits",
        tokens * per_token + rows * per_row,
        f"{tokens} x {per_token:,} B + {rows} x {per_row:,} B",
        training=False,
    )


def layer_saved_bytes(layer: Layer, facts: ModelFacts, width: int) -> int:
    """Bytes per token that autograd keeps of one layer (its input not counted), as transformers computes it.

    Norms keep an fp32 copy of what they normalise; every linear layer keeps its input for the adapter's gradient; the MLP
    keeps gate, its activation, up and the product. The delta net's fp32 terms are those of the reference chunk algorithm
    with Z = DELTA_CHUNK: 14 tensors of the values' width, 5 of Z per head, one state per chunk.
    """
    total = 4 * facts.ffn * width + 2 * facts.hidden * (4 + width)
    if layer.delta is None:
        total += layer.q * (2 * width + 4) + layer.kv * (2 * width + 4)
        return total + (2 * layer.q * width if layer.gated else 0)
    delta = layer.delta
    fp32 = 8 * delta.value_heads * delta.d_key + 6 * delta.values + 5 * delta.value_heads * DELTA_CHUNK
    fp32 += delta.state // DELTA_CHUNK
    return total + 2 * width * (delta.conv + delta.values) + 4 * fp32


def trainer_lines(config: JobConfig, facts: ModelFacts, *, on_gpu: bool) -> list[MemoryLine]:
    """The trainer's memory without a base of its own, on one of its ranks (as many as the engine has).

    A micro-batch holds trainer.micro_batch_tokens tokens, or one sequence that is longer.
    """
    trainer, shards, rank = config.trainer, config.engine.tensor_parallel, config.lora.rank
    width, tokens = WIDTH[trainer.dtype], max(trainer.micro_batch_tokens, config.engine.max_model_len)
    adapter = facts.adapter_parameters(rank, shards)
    saved = {kind.kind: layer_saved_bytes(kind, facts, width) // shards for kind in facts.layer_kinds}
    inputs = facts.layers * facts.hidden * width
    widest = max(max(linear.N, linear.K) for kind in facts.layer_kinds for linear in kind.linears) // shards
    # The MLP's gradients; without kernels also one projection's fp32 output and its gradient.
    gradients = 3 * facts.ffn * width // shards + (0 if on_gpu else 2 * 4 * widest)
    if trainer.checkpoint_activations:
        kept, again = inputs, max(saved.values()) + gradients
        how = f"{tokens} x {facts.layers} layers x {facts.hidden} x {width} B"
    else:
        kept, again = inputs + sum(kind.count * saved[kind.kind] for kind in facts.layer_kinds), gradients
        how = f"{tokens} x {kept:,} B of all layers"
    bound = GPU_LOGITS_CHUNK_BYTES if on_gpu else CPU_LOGITS_CHUNK_BYTES
    logits = 2 * min(4 * facts.vocab * min(trainer.logprob_chunk, tokens), bound)
    activations = MemoryLine(f"trainer: kept activations of {tokens} tokens", tokens * kept, how, rollouts=False)
    # A chunk's logits are gone when the first layer is computed again.
    if tokens * again >= logits:
        what = "one layer again and its gradients" if trainer.checkpoint_activations else "one layer's gradients"
        working = MemoryLine(f"trainer: {what}", tokens * again, f"{tokens} x {again:,} B", rollouts=False)
    else:
        working = MemoryLine("trainer: a chunk's logits and their gradient", logits, "2 chunks", rollouts=False)
    largest = max(linear.N * linear.K for kind in facts.layer_kinds for linear in kind.linears) // shards
    size, what = (GPU_PANEL_BYTES, "a panel") if on_gpu else (largest * width, f"{largest:,} x {width} B")
    widened = MemoryLine("trainer: weights widened at a time", size, what, rollouts=False)
    computing = [activations, working, widened]
    if 4 * adapter > sum(line.count_bytes for line in computing):  # the optimizer's step comes after the backward pass
        computing = [MemoryLine("trainer: optimizer's step", 4 * adapter, f"{adapter:,} x 4 B", rollouts=False)]
    states = MemoryLine(
        f"trainer: adapter, gradient, two moments, rank {rank}", 16 * adapter, f"{adapter:,} x 4 x 4 B (fp32)"
    )
    if on_gpu and shards > 1:
        whole = facts.adapter_parameters(rank, 1)
        how = f"{whole:,} x 4 B"
        return [
            states,
            MemoryLine("trainer: the whole adapter, for the engine's rank here", 4 * whole, how),
            *computing,
        ]
    return [states, *computing]


def own_copy_bytes(config: JobConfig, facts: ModelFacts) -> int:
    """Bytes of the trainer's own base, 0 if it maps the engine's. Raises ValueError if there are no codes to copy."""
    recipe = RECIPES[config.trainer.placement]
    stored = base_format(config.engine.quantization)
    if recipe.own == "fp8" and stored != "fp8":
        raise ValueError(
            f"trainer.placement={config.trainer.placement.value} copies the engine's FP8 codes, but "
            f"engine.quantization={config.engine.quantization} has none; use own_bf16 or a shared placement"
        )
    if not recipe.own:
        return 0
    width = WIDTH[config.engine.dtype if recipe.own == "fp8" else config.trainer.dtype]
    return base_bytes(facts, recipe.own, width) // config.engine.tensor_parallel
