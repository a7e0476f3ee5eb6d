"""One planner: what a job will place where and how much memory it needs, before anything starts.

It serves `--dry-run`, the refusal of what cannot fit, and the bundle that the EnginePool asks Ray for. The arithmetic is
printed line by line. Sizes of a base: every linear layer's codes (1 byte a weight in FP8) and fp32 scales (one per out
channel), the parameters that stay in the engine's dtype (embeddings, norms, biases), adapter slots, the KV cache, and a
per-process part measured on the machine the results file names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epilora.config.schema import JobConfig, Placement
from epilora.errors import MemoryInfeasible

MIB = 2**20
GIB = 2**30
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Private memory of one process after its imports, without any model (CPU build: vLLM 0.28, transformers 5.24).
CPU_ENGINE_PROCESS_BYTES = 750 * MIB
CPU_TRAINER_PROCESS_BYTES = 350 * MIB
CPU_RAY_BYTES = 900 * MIB  # GCS, raylet, agents, Serve's controller, proxy and one replica, the store, the driver
# A CUDA context with the kernels vLLM loads; a second one for the trainer's process.
GPU_CONTEXT_BYTES = 600 * MIB
# Memory and abilities of the GPUs a cluster may offer, by ray.io/accelerator-type.
GPU_TYPES: dict[str, tuple[int, str]] = {
    "L40S": (48 * GIB, "sm_89"),
    "H100": (80 * GIB, "sm_90"),
    "H200": (141 * GIB, "sm_90"),
    "RTX-PRO-6000": (96 * GIB, "sm_120"),
    "B200": (180 * GIB, "sm_100"),
}


@dataclass(frozen=True)
class ModelFacts:
    """Parameter counts read from a model folder's config.json. A linear layer is (out features, in features)."""

    architecture: str
    linears: tuple[tuple[int, int], ...]
    other_parameters: int
    layers: int
    kv_bytes_per_token: int

    @property
    def linear_parameters(self) -> int:
        return sum(n * k for n, k in self.linears)


@dataclass(frozen=True)
class MemoryLine:
    what: str
    count_bytes: int


@dataclass(frozen=True)
class Plan:
    """Where one base goes and what it takes.

    bundle: resources of its placement-group bundle. memory: lines of host memory (no GPU) or of one GPU's memory.
    refusals: accelerator type -> why it cannot run this. environment: variables of the engine's and trainer's processes.
    """

    bundle: dict[str, float]
    labels: dict[str, str]
    engine_options: dict[str, float]
    trainer_options: dict[str, float]
    environment: dict[str, str]
    memory: tuple[MemoryLine, ...]
    memory_limit_bytes: int | None
    accelerators: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(line.count_bytes for line in self.memory)

    def describe(self) -> str:
        """The plan as text: bundle, arithmetic, what can run it and why the rest cannot."""
        where = "host memory" if not self.engine_options.get("num_gpus") else "memory per GPU"
        lines = [f"placement: one bundle {self.bundle}" + (f" with labels {self.labels}" if self.labels else "")]
        lines += [
            f"  engine {self.engine_options or '{}'}, trainer {self.trainer_options or '{}'} in that bundle",
            f"{where}:",
        ]
        lines += [f"  {line.what:<58}{line.count_bytes / MIB:>10.1f} MiB" for line in self.memory]
        lines.append(f"  {'sum':<58}{self.total_bytes / MIB:>10.1f} MiB")
        if self.memory_limit_bytes is not None:
            lines.append(f"  {'available':<58}{self.memory_limit_bytes / MIB:>10.1f} MiB")
        if self.accelerators:
            lines.append(f"can run on: {', '.join(self.accelerators)}")
        lines += [f"cannot run on {name}: {why}" for name, why in self.refusals.items()]
        return "\n".join(lines)


def read_model(folder: str | Path) -> ModelFacts:
    """Facts of the model in `folder`. Raises FileNotFoundError, and ValueError for an architecture it cannot size."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"engine.model_path: no config.json in {folder}; give a folder that holds a model")
    config: dict[str, Any] = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["unknown"])[0]
    if architecture not in ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        raise ValueError(
            f"{path}: architecture {architecture!r} cannot be sized; sized: Qwen3, Qwen2 and Llama for causal LM"
        )
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head = config.get("head_dim") or hidden // heads
    layer = [
        (heads * head, hidden), (kv_heads * head, hidden), (kv_heads * head, hidden), (hidden, heads * head),
        (ffn, hidden), (ffn, hidden), (hidden, ffn),
    ]  # fmt: skip
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    norms = layers * (2 * hidden + (2 * head if architecture.startswith("Qwen3") else 0)) + hidden
    return ModelFacts(architecture, tuple(layer * layers), embeddings + norms, layers, 2 * layers * kv_heads * head)


def plan(config: JobConfig, facts: ModelFacts, *, available_bytes: int | None = None) -> Plan:
    """The plan for `config`'s base. `available_bytes`: free host memory (no GPU); GPU memory comes from GPU_TYPES.

    Raises MemoryInfeasible with the arithmetic if it cannot fit, ValueError for a placement this machine kind has not.
    """
    if config.engine.num_gpus == 0:
        return _plan_cpu(config, facts, available_bytes)
    return _plan_gpu(config, facts)


def _base_lines(config: JobConfig, facts: ModelFacts, shards: int) -> list[MemoryLine]:
    width = BYTES[config.engine.dtype]
    scales = 4 * sum(n for n, _ in facts.linears)
    slot = sum((n + k) * config.engine.max_lora_rank for n, k in facts.linears) * width
    return [
        MemoryLine(
            f"base: FP8 codes of {facts.linear_parameters:,} weights, one copy", facts.linear_parameters // shards
        ),
        MemoryLine("base: fp32 scales, one per out channel", scales // shards),
        MemoryLine(f"base: embeddings and norms in {config.engine.dtype}", facts.other_parameters * width // shards),
        MemoryLine(
            f"adapter slots: {config.engine.max_loras} of rank {config.engine.max_lora_rank}",
            slot * config.engine.max_loras // shards,
        ),
        MemoryLine("KV cache", config.engine.kv_cache_mib * MIB),
    ]


def _trainer_lines(config: JobConfig, facts: ModelFacts) -> list[MemoryLine]:
    width = BYTES[config.trainer.dtype]
    adapter = sum((n + k) * config.lora.rank for n, k in facts.linears)
    largest = max(n * k for n, k in facts.linears)
    hidden = min(n for n, _ in facts.linears[3:4])
    per_token = width * (sum(k for _, k in facts.linears) + facts.layers * 6 * hidden)
    if config.trainer.checkpoint_activations:
        per_token = width * (facts.layers * hidden + (sum(k for _, k in facts.linears) // facts.layers) + 6 * hidden)
    lines = [
        MemoryLine(f"trainer: adapter, gradient and two moments, fp32, rank {config.lora.rank}", 16 * adapter),
        MemoryLine("trainer: one projection widened at a time", largest * width),
        MemoryLine(
            f"trainer: activations of {config.trainer.micro_batch_tokens} tokens",
            per_token * config.trainer.micro_batch_tokens,
        ),
    ]
    parameters = facts.linear_parameters + facts.other_parameters
    own = {
        Placement.own_fp8: facts.linear_parameters + facts.other_parameters * width,
        Placement.own_fp8_offloaded: facts.linear_parameters + facts.other_parameters * width,
        Placement.own_bf16: 2 * parameters,
        Placement.own_bf16_offloaded: 2 * parameters,
    }.get(config.trainer.placement)
    if own is not None:
        lines.append(MemoryLine(f"trainer: a base of its own ({config.trainer.placement.value})", own))
    return lines


def _plan_cpu(config: JobConfig, facts: ModelFacts, available_bytes: int | None) -> Plan:
    if config.trainer.placement not in (Placement.shared_kv_kept, Placement.shared_kv_released):
        raise ValueError(
            f"trainer.placement={config.trainer.placement.value} needs a GPU; without one the trainer maps the engine's copy: "
            "shared_kv_kept or shared_kv_released"
        )
    lines = [
        *_base_lines(config, facts, 1),
        *_trainer_lines(config, facts),
        MemoryLine("engine process (vLLM imported)", CPU_ENGINE_PROCESS_BYTES),
        MemoryLine("trainer process (torch, transformers imported)", CPU_TRAINER_PROCESS_BYTES),
        MemoryLine("Ray, Serve, store and driver", CPU_RAY_BYTES),
    ]
    environment = {
        "OMP_NUM_THREADS": "1",  # two busy processes with spinning OpenMP pools slow each other down thirtyfold
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",  # the first logprob request would compile for seconds
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    result = Plan({"CPU": 1.0}, {}, {"num_cpus": 0}, {"num_cpus": 0}, environment, tuple(lines), available_bytes)
    if available_bytes is not None and result.total_bytes > available_bytes:
        raise MemoryInfeasible(
            f"does not fit this machine's memory:\n{result.describe()}\nlower engine.kv_cache_mib, engine.max_loras or trainer.micro_batch_tokens"
        )
    return result


def _plan_gpu(config: JobConfig, facts: ModelFacts) -> Plan:
    shards = config.engine.tensor_parallel
    lines = [*_base_lines(config, facts, shards), *_trainer_lines(config, facts)]
    if config.trainer.placement is Placement.shared_kv_released:  # activations and KV take turns
        kv = next(line for line in lines if line.what == "KV cache")
        activations = next(line for line in lines if "activations" in line.what)
        lines.remove(kv if kv.count_bytes < activations.count_bytes else activations)
    lines.append(MemoryLine("CUDA contexts of engine and trainer", 2 * GPU_CONTEXT_BYTES))
    total = sum(line.count_bytes for line in lines)
    wanted = config.engine.accelerator_types or list(GPU_TYPES)
    fits, refusals = [], {}
    for name in wanted:
        if name not in GPU_TYPES:
            refusals[name] = f"unknown accelerator type; known: {', '.join(GPU_TYPES)}"
        elif GPU_TYPES[name][0] * 0.95 < total:
            refusals[name] = f"{total / GIB:.1f} GiB needed, {GPU_TYPES[name][0] * 0.95 / GIB:.1f} GiB usable"
        else:
            fits.append(name)
    gpus = float(shards)
    half = {"num_gpus": config.engine.num_gpus, "num_cpus": 1}
    trainer = {"num_gpus": 0 if shards > 1 else config.trainer.num_gpus, "num_cpus": 1}
    environment = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    labels = {"ray.io/accelerator-type": f"in({','.join(fits)})"} if fits else {}
    result = Plan(
        {"GPU": gpus, "CPU": 2.0}, labels, half, trainer, environment, tuple(lines), None, tuple(fits), refusals
    )  # fmt: skip
    if not fits:
        raise MemoryInfeasible(f"no known GPU can run this:\n{result.describe()}")
    return result


def available_memory_bytes() -> int:
    """MemAvailable of this machine, or the container's limit less what it uses if that is smaller."""
    text = Path("/proc/meminfo").read_text()
    free = int(next(line for line in text.splitlines() if line.startswith("MemAvailable")).split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
