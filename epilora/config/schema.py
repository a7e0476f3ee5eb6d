"""The schema of a job's configuration. Standard library only; OmegaConf fills it and rejects unknown keys and wrong types.

Units end the names. Fields without a default must be given (`MISSING`). Rules inside one section stand in its
`__post_init__`; rules across sections in `validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING: Any = "???"  # OmegaConf's marker for a required value


class Activations(str, Enum):
    """How the engine treats a linear layer's input: rounded to FP8 (w8a8) or not at all (w8a16, "matched")."""

    w8a8 = "w8a8"
    w8a16 = "w8a16"


class Correction(str, Enum):
    """How the policy gradient corrects for the engine sampling from another distribution than the trainer computes."""

    none = "none"
    tis_token = "tis_token"
    tis_sequence = "tis_sequence"
    mask_token = "mask_token"
    mask_sequence = "mask_sequence"
    score_centering = "score_centering"


class Placement(str, Enum):
    """Where the trainer's base weights live. The CPU build supports the first; the planner says so for the others."""

    shared_kv_released = "shared_kv_released"  # the engine's copy; KV blocks are dropped while the trainer runs
    shared_kv_kept = "shared_kv_kept"  # the engine's copy; KV stays
    own_fp8 = "own_fp8"
    own_fp8_offloaded = "own_fp8_offloaded"
    own_bf16 = "own_bf16"
    own_bf16_offloaded = "own_bf16_offloaded"


@dataclass
class EngineVariant:
    """What an engine is told on one accelerator type instead of the section's own values; None keeps those."""

    model_path: str | None = None  # e.g. an NVFP4 checkpoint of the same model
    quantization: str | None = None
    activations: Activations | None = None
    kv_cache_mib: int | None = None


@dataclass
class EngineConfig:
    """One vLLM engine. Engines with equal settings are shared between jobs."""

    name: str = "engine-0"
    model_path: str = MISSING  # folder with config.json, weights and tokenizer; `package:NAME` is a model shipped here
    shape: str = ""  # name of a committed shape (epilora/models/shapes) to plan by when model_path is not here
    dtype: str = "float32"
    quantization: str = "fp8_per_channel"  # vLLM's name; none: the base in engine.dtype
    activations: Activations = Activations.w8a16
    max_model_len: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    tool_parser: str = "hermes"  # how the model writes tool calls, vLLM's name
    tenant_seats: int = 0  # of max_num_seqs, how many rollouts leave to tenants
    max_loras: int = 8  # adapter slots = versions that can be live at once
    max_lora_rank: int = 16
    kv_cache_mib: int = 64
    tenant_kv_share: float = 0.0  # on a GPU: of the cache, what tenants keep while a trainer has the rest; 0: they wait
    graph_sizes: list[int] = field(default_factory=list)  # on a GPU: batch sizes with CUDA graphs; empty: vLLM's choice
    tensor_parallel: int = 1
    num_gpus: float = 0.0  # per engine; 0 runs vLLM's CPU backend
    accelerator_types: list[str] = field(
        default_factory=list
    )  # ray.io/accelerator-type labels that may run it, best first
    by_accelerator: dict[str, EngineVariant] = field(default_factory=dict)  # accelerator type -> what differs there
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"engine.dtype={self.dtype!r}; allowed: float32, float16, bfloat16")
        if self.tensor_parallel < 1:
            raise ValueError(f"engine.tensor_parallel={self.tensor_parallel}; allowed: >= 1")
        if not 0.0 <= self.tenant_kv_share < 1.0:
            raise ValueError(f"engine.tenant_kv_share={self.tenant_kv_share}; allowed: 0 to below 1")
        if self.max_loras < 2:
            raise ValueError(
                f"engine.max_loras={self.max_loras}; allowed: >= 2 (a policy's next version needs a slot of its own)"
            )


@dataclass
class TrainerConfig:
    """The trainer beside the engine."""

    name: str = "trainer-0"
    placement: Placement = Placement.shared_kv_released
    dtype: str = "float32"
    micro_batch_tokens: int = 8192  # padded tokens of one forward and backward pass
    logprob_chunk: int = 2048  # tokens whose logits exist at once
    checkpoint_activations: bool = False
    gemm_mode: str = "panel"  # of the GPU's linears: "panel" (fast) or "registers" (the matched engine's arithmetic)
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.gemm_mode not in ("panel", "registers"):
            raise ValueError(f"trainer.gemm_mode={self.gemm_mode!r}; allowed: panel, registers")


@dataclass
class LoraConfig:
    """The adapter to train."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])


@dataclass
class OptimizerConfig:
    """AdamW in fp32 on the adapter alone."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global L2 norm; 0 switches it off
    warmup_steps: int = 0


@dataclass
class LossConfig:
    """Policy-gradient objective; names and meaning as in `epilora/trainer/loss.py`."""

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Correction = Correction.none
    tis_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 2.0
    centering_weight: str = "none"
    kl_coef: float = 0.0
    inner_steps: int = 1
    advantage: str = "auto"
    max_tokens: int = 0
    centering_top_k: int = 20  # likeliest tokens the engine reports per position for score centering


@dataclass
class TaskConfig:
    """What to solve. `path` is `package.module:function`, called with `args`; it returns a Task (epilora/tasks)."""

    path: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class RlConfig:
    """The reinforcement-learning loop."""

    steps: int = 30
    prompts_per_step: int = 64
    group_size: int = 8
    max_tokens: int = 8
    temperature: float = 1.0
    stop: list[str] = field(default_factory=list)
    max_staleness: int = (
        0  # 0: synchronous; k: rollouts of a step may come from a policy at most k optimizer steps older
    )
    eval_problems: int = 256
    eval_every: int = 0  # 0: before and after only
    checkpoint_every: int = 1
    keep_checkpoints: int = 3
    min_step_s: float = 0.0  # pace, for measuring tenants beside a slower trainer
    left_out_share: float = 0.0  # of a step's groups that bad prompts and rewards may cost before the job stops

    def __post_init__(self) -> None:
        if not 0.0 <= self.left_out_share < 1.0:
            raise ValueError(f"rl.left_out_share={self.left_out_share}; allowed: 0 to less than 1")
        if self.group_size < 2:
            raise ValueError(f"rl.group_size={self.group_size}; allowed: >= 2 (advantages compare within a group)")
        if self.max_staleness < 0:
            raise ValueError(f"rl.max_staleness={self.max_staleness}; allowed: >= 0")


@dataclass
class TenantConfig:
    """One tenant. `task` None: it asks the plain base. Otherwise an adapter is trained for it by supervised steps."""

    name: str = MISSING
    task: TaskConfig | None = None
    prompts_task: TaskConfig | None = None  # what a plain-base tenant asks; required when task is None
    sft_steps: int = 60
    sft_batch: int = 64
    sft_lr: float = 3e-3
    rank: int = 8
    requests_per_s: float = 2.0
    max_tokens: int = 8


@dataclass
class EvaluationConfig:
    """What `jobs/evaluate.py` asks, and `jobs/rl.py` after training. Accuracy is the mean over samples (avg@samples)."""

    tasks: dict[str, TaskConfig] = field(default_factory=dict)  # name -> task; its held-out questions are asked
    adapter: str = ""  # jobs/evaluate.py: NAME, NAME@VERSION or a digest; empty: the base
    problems: int = 0  # of each task; 0: all
    samples: int = 1
    temperature: float = 0.0  # 0: greedy
    max_tokens: int = 2048
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.samples < 1 or self.problems < 0 or self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"evaluation: samples={self.samples} (>= 1), problems={self.problems} (>= 0), max_tokens={self.max_tokens} "
                f"(>= 1), temperature={self.temperature} (>= 0)"
            )
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.samples={self.samples} with temperature=0 asks the same thing again; raise one"
            )


@dataclass
class RouterConfig:
    """The HTTP front end (Ray Serve). admin_port: the operators' port on 127.0.0.1; 0: what operators do is on `port` too.

    More replicas than one need an admin_port.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    admin_port: int = 0


@dataclass
class StoreConfig:
    """Where adapter versions live."""

    root: str = "runs/store"


@dataclass
class ScalingConfig:
    """How many engines the pool may run for this base; meaning of the fields as in `actors/scaling.py`."""

    min_engines: int = 1
    max_engines: int = 1
    adapter_share: float = 0.9
    waiting_s: float = 2.0
    kv_share: float = 0.9
    spare_share: float = 0.6
    up_s: float = 5.0
    down_s: float = 60.0
    to_zero_s: float | None = None  # None: the last engine stays


@dataclass
class WandbConfig:
    """A Weights & Biases run. mode: "online" or "offline" (files in the run's folder, for `wandb sync`)."""

    project: str = MISSING
    entity: str = ""
    mode: str = "online"

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise ValueError(f"tracking.wandb.mode={self.mode!r}; allowed: online, offline")


@dataclass
class MlflowConfig:
    """An MLflow run. tracking_uri: a server's address, or `sqlite:///...` and `file:...` as MLflow takes them."""

    tracking_uri: str = MISSING
    experiment: str = "epilora"


@dataclass
class TrackingConfig:
    """Where a run's metrics go beside its own folder."""

    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None


@dataclass
class JobConfig:
    """Everything a job needs."""

    name: str = "run"
    out: str = "runs/${name}"
    seed: int = 0
    deterministic: bool = False
    resume: bool = False
    ready_timeout_s: float = 300.0  # bound on every wait for a placement or an actor
    engine: EngineConfig = field(default_factory=EngineConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tenants: list[TenantConfig] = field(default_factory=list)
    router: RouterConfig = field(default_factory=RouterConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tenant_baseline_s: float = 4.0  # how long tenants are measured before RL starts
    tenant_prompts: int = 32  # held-out questions a tenant cycles through; each is first asked once in isolation

    def __post_init__(self) -> None:
        validate(self)


def validate(config: JobConfig) -> None:
    """Rules that span sections. Raises ValueError naming both sides."""
    if config.lora.rank > config.engine.max_lora_rank:
        raise ValueError(
            f"lora.rank={config.lora.rank} exceeds engine.max_lora_rank={config.engine.max_lora_rank}; raise the latter"
        )
    for tenant in config.tenants:
        if tenant.task is None and tenant.prompts_task is None:
            raise ValueError(f"tenants[{tenant.name}]: give task (an adapter is trained) or prompts_task (plain base)")
        if tenant.rank > config.engine.max_lora_rank:
            raise ValueError(
                f"tenants[{tenant.name}].rank={tenant.rank} exceeds engine.max_lora_rank={config.engine.max_lora_rank}"
            )
    live = sum(tenant.task is not None for tenant in config.tenants) + 2 + config.rl.max_staleness
    if live > config.engine.max_loras:
        raise ValueError(
            f"engine.max_loras={config.engine.max_loras} is too few: {live} versions can be live at once (tenants' adapters, "
            f"the policy's current and next version, rl.max_staleness={config.rl.max_staleness} older ones)"
        )
    if config.deterministic and (config.tenants or config.rl.max_staleness):
        raise ValueError(
            "deterministic=true needs the synchronous loop without tenants: set rl.max_staleness=0 and tenants=[]"
        )
    if config.trainer.dtype != config.engine.dtype and config.loss.correction is Correction.none:
        raise ValueError(
            f"trainer.dtype={config.trainer.dtype} differs from engine.dtype={config.engine.dtype} with "
            "loss.correction=none; choose a correction or one dtype"
        )
