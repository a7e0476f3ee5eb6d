"""One planner: what a job will place where and how much memory it needs, before anything starts.

It serves `epilora plan`, `--dry-run`, the refusal of what cannot fit, and the bundle and labels that the EnginePool asks Ray
for. The arithmetic (epilora/sizing.py) is printed line by line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from epilora import sizing
from epilora.config.schema import EngineConfig, JobConfig, Placement
from epilora.errors import MemoryInfeasible
from epilora.gpus import GPU_TYPES, GpuType
from epilora.model_facts import ModelFacts, read_facts
from epilora.sizing import GIB, MIB, MemoryLine

__all__ = ["GIB", "GPU_TYPES", "MIB", "Candidate", "MemoryLine", "Plan", "available_memory_bytes", "plan", "plan_for"]

# Private memory of one process after its imports, without any model (CPU build: vLLM 0.28, transformers 5.24).
CPU_ENGINE_PROCESS_BYTES = 750 * MIB
CPU_TRAINER_PROCESS_BYTES = 350 * MIB
CPU_RAY_BYTES = 900 * MIB  # GCS, raylet, agents, Serve's controller, proxy and one replica, the store, the driver
ACCELERATOR_LABEL = "ray.io/accelerator-type"
NVLINK_PAIR = "nvlink_pair"  # custom resource of a node whose GPUs are NVLink pairs, one per pair


@dataclass(frozen=True)
class Candidate:
    """A GPU type that can run the plan, what the engine is told there, and the kernel path it is expected to take.

    total_bytes: of one such GPU's memory that is needed, in the larger phase.
    """

    gpu: GpuType
    engine: EngineConfig
    kernel_path: str
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """Where one base goes and what it takes.

    bundle: resources of its placement-group bundle. memory: lines of one GPU's memory (or of host memory where there is no
    GPU). host: lines of host memory beside a GPU. candidates: GPU types that can run it, best first; refusals: accelerator
    type -> why it cannot. environment: variables of the engine's and trainer's processes.
    """

    bundle: dict[str, float]
    engine_options: dict[str, float]
    trainer_options: dict[str, float]
    environment: dict[str, str]
    memory: tuple[MemoryLine, ...]
    memory_limit_bytes: int | None
    host: tuple[MemoryLine, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Accelerator types that can run it, best first."""
        return tuple(candidate.gpu.label for candidate in self.candidates)

    @property
    def labels(self) -> dict[str, str]:
        """Label selector of any node that can run it."""
        return {ACCELERATOR_LABEL: f"in({','.join(self.accelerators)})"} if self.candidates else {}

    @property
    def rollout_bytes(self) -> int:
        return sum(line.count_bytes for line in self.memory if line.rollouts)

    @property
    def training_bytes(self) -> int:
        return sum(line.count_bytes for line in self.memory if line.training)

    @property
    def total_bytes(self) -> int:
        """What must fit: the larger of the two phases."""
        return max(self.rollout_bytes, self.training_bytes)

    @property
    def host_bytes(self) -> int:
        """Of host memory beside a GPU."""
        return sum(line.count_bytes for line in self.host)

    def describe(self) -> str:
        """The plan as text: bundle, arithmetic, what can run it and why the rest cannot."""
        on_gpu = bool(self.engine_options.get("num_gpus"))
        lines = [f"placement: one bundle {self.bundle}" + (f" on a node with {self.labels}" if self.labels else "")]
        lines.append(f"  engine {self.engine_options}, trainer {self.trainer_options} in that bundle")
        where = "memory per GPU" if on_gpu else "host memory"
        lines.append(f"{where:<62}{'rollouts':>10}{'training':>10}  MiB")
        for line in self.memory:
            shown = [
                f"{line.count_bytes / MIB:10.1f}" if here else f"{'-':>10}" for here in (line.rollouts, line.training)
            ]
            lines.append(f"  {line.what:<60}{shown[0]}{shown[1]}" + (f"  = {line.how}" if line.how else ""))
        lines.append(f"  {'sum':<60}{self.rollout_bytes / MIB:10.1f}{self.training_bytes / MIB:10.1f}")
        if self.memory_limit_bytes is not None:
            lines.append(f"  {'available':<60}{self.memory_limit_bytes / MIB:10.1f}")
        if self.host:
            lines.append("host memory")
            lines += [
                f"  {line.what:<60}{line.count_bytes / MIB:10.1f}" + (f"  = {line.how}" if line.how else "")
                for line in self.host
            ]
        for candidate in self.candidates:
            free = candidate.gpu.usable_bytes - candidate.total_bytes
            needs = f"{candidate.total_bytes / GIB:.1f} GiB, {free / GIB:.1f} to spare"
            lines.append(f"can run on {candidate.gpu.label}: {needs}; {candidate.kernel_path}")
        lines += [f"cannot run on {name}: {why}" for name, why in self.refusals.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def plan_for(config: JobConfig) -> Plan:
    """The plan for `config` from its model folder, or from its committed shape if the folder is not here.

    Raises FileNotFoundError, ValueError and MemoryInfeasible as `read_facts` and `plan` do.
    """
    folder = _model_folder(config.engine.model_path)
    return plan(config, read_facts(folder, config.engine.shape), available_bytes=available_memory_bytes())


def _model_folder(path: str) -> Path:
    from epilora.models import resolve_model_path

    try:
        return resolve_model_path(path)
    except FileNotFoundError:
        return Path(path)  # read_facts says what is missing, and sizes by a committed shape


def plan(config: JobConfig, facts: ModelFacts, *, available_bytes: int | None = None) -> Plan:
    """The plan for `config`'s base. `available_bytes`: free host memory (no GPU); GPU memory comes from GPU_TYPES.

    Raises MemoryInfeasible with the arithmetic if it cannot fit, ValueError for a placement this machine kind has not.
    """
    if config.engine.num_gpus == 0:
        return _plan_cpu(config, facts, available_bytes)
    return _plan_gpu(config, facts)


def _plan_cpu(config: JobConfig, facts: ModelFacts, available_bytes: int | None) -> Plan:
    if config.trainer.placement not in (Placement.shared_kv_kept, Placement.shared_kv_released):
        raise ValueError(
            f"trainer.placement={config.trainer.placement.value} needs a GPU; without one the trainer maps the engine's copy: "
            "shared_kv_kept or shared_kv_released"
        )
    _check_split(facts, config.engine.tensor_parallel)
    ranks = config.engine.tensor_parallel
    processes = ranks if ranks == 1 else ranks + 1  # each rank is one, and so is what stands before them
    lines = [
        replace(line, count_bytes=line.count_bytes * ranks)
        for line in (
            *sizing.engine_lines(config.engine, facts, kv_in_training=True),
            sizing.engine_step_bytes(config.engine, facts),
            *sizing.trainer_lines(config, facts, on_gpu=False),
        )
    ]
    lines += [
        MemoryLine(f"{processes} engine process(es) (vLLM imported)", CPU_ENGINE_PROCESS_BYTES * processes),
        MemoryLine(
            f"{processes} trainer process(es) (torch, transformers imported)", CPU_TRAINER_PROCESS_BYTES * processes
        ),
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
    result = Plan({"CPU": 1.0}, {"num_cpus": 0}, {"num_cpus": 0}, environment, tuple(lines), available_bytes)
    if available_bytes is not None and result.total_bytes > available_bytes:
        raise MemoryInfeasible(
            f"does not fit this machine's memory:\n{result.describe()}\nlower engine.kv_cache_mib, engine.max_loras or trainer.micro_batch_tokens"
        )
    return result


def _plan_gpu(config: JobConfig, facts: ModelFacts) -> Plan:
    _check_split(facts, config.engine.tensor_parallel)
    draft = _draft(config, facts)
    candidates, refusals = _sort_out(config, facts)
    result = Plan(**{**vars(draft), "candidates": candidates, "refusals": refusals, "notes": _notes(config, facts)})
    if not candidates:
        raise MemoryInfeasible(f"no known GPU can run this:\n{result.describe()}")
    return result


def _draft(config: JobConfig, facts: ModelFacts) -> Plan:
    """Bundle and memory of one base on a GPU, whichever it is."""
    engine, shards = config.engine, config.engine.tensor_parallel
    recipe = sizing.RECIPES[config.trainer.placement]
    lines = [
        *sizing.engine_lines(engine, facts, kv_in_training=recipe.kv_kept),
        sizing.engine_step_bytes(engine, facts),
        *sizing.trainer_lines(config, facts, on_gpu=True),
        MemoryLine("CUDA contexts of engine and trainer", 2 * sizing.GPU_CONTEXT_BYTES, "allowance"),
        MemoryLine("captured CUDA graphs", sizing.CUDA_GRAPH_POOL_BYTES, "allowance"),
    ]
    own = sizing.own_copy_bytes(config, facts)
    host: tuple[MemoryLine, ...] = ()
    if own:
        name = f"trainer: a base of its own ({config.trainer.placement.value})"
        lines.append(MemoryLine(name, own, rollouts=not recipe.offloaded))
        if recipe.offloaded:
            host = (MemoryLine("trainer: pinned copy of its base, exact size", own * shards),)
    return Plan(
        bundle={"GPU": float(shards), "CPU": 2.0} | ({NVLINK_PAIR: 1.0} if shards == 2 else {}),
        # A pair's trainer takes no GPU of Ray's: it gets the engine's devices by UUID.
        engine_options={"num_gpus": float(shards) if shards > 1 else engine.num_gpus, "num_cpus": 1},
        trainer_options={"num_gpus": 0 if shards > 1 else config.trainer.num_gpus, "num_cpus": 1},
        environment={"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"},
        memory=tuple(lines),
        memory_limit_bytes=None,
        host=host,
    )


def engine_on(engine: EngineConfig, accelerator: str) -> EngineConfig:
    """The engine as it is told on `accelerator`: engine.by_accelerator over the section's own values."""
    variant = engine.by_accelerator.get(accelerator)
    if variant is None:
        return engine
    return replace(engine, **{key: value for key, value in vars(variant).items() if value is not None})


def _sort_out(config: JobConfig, facts: ModelFacts) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """GPU types that can run it, in the configuration's order, and why the others cannot."""
    wanted = config.engine.accelerator_types or list(GPU_TYPES)
    unknown = sorted({*wanted, *config.engine.by_accelerator} - set(GPU_TYPES))
    candidates = []
    refusals = {name: f"unknown accelerator type; known: {', '.join(GPU_TYPES)}" for name in unknown}
    for name in [*wanted, *(n for n in GPU_TYPES if n not in wanted)]:
        if name in unknown:
            continue
        gpu, engine = GPU_TYPES[name], engine_on(config.engine, name)
        draft, stored = _draft(replace(config, engine=engine), facts), sizing.base_format(engine.quantization)
        if name not in wanted:
            refusals[name] = f"not among engine.accelerator_types={wanted}"
        elif stored not in gpu.formats:
            refusals[name] = f"sm_{gpu.compute_capability} computes {', '.join(gpu.formats)}, the base is {stored}"
        elif gpu.usable_bytes < draft.total_bytes:
            phase = "rollouts" if draft.rollout_bytes >= draft.training_bytes else "training"
            refusals[name] = (
                f"{draft.total_bytes / GIB:.1f} GiB needed in {phase}, {gpu.usable_bytes / GIB:.1f} GiB usable"
            )
        else:
            path = gpu.kernel_path(stored, engine.activations.value)
            candidates.append(Candidate(gpu, engine, path, draft.total_bytes))
    return tuple(candidates), refusals


def _check_split(facts: ModelFacts, shards: int) -> None:
    if facts.kv_heads % shards:
        raise ValueError(
            f"engine.tensor_parallel={shards} does not divide {facts.kv_heads} key and value heads, which its ranks would hold "
            "twice and train apart; allowed: a divisor of them"
        )
    for kind in facts.layer_kinds:
        for linear in kind.linears:
            side, what = (linear.K, "in") if linear.row_parallel else (linear.N, "out")
            if side % shards:
                raise ValueError(
                    f"engine.tensor_parallel={shards} does not divide {linear.name}'s {side} {what} features; allowed: a "
                    "divisor of them"
                )


def _notes(config: JobConfig, facts: ModelFacts) -> tuple[str, ...]:
    engine = config.engine
    needed = engine.max_num_seqs * facts.state_bytes_per_sequence // engine.tensor_parallel
    if needed > engine.kv_cache_mib * MIB:
        return (
            f"engine.max_num_seqs={engine.max_num_seqs} sequences need {needed / GIB:.1f} GiB of recurrent states alone, "
            f"engine.kv_cache_mib={engine.kv_cache_mib} holds fewer: the engine will run fewer at once",
        )
    return ()


def available_memory_bytes() -> int:
    """MemAvailable of this machine, or the container's limit less what it uses if that is smaller."""
    text = Path("/proc/meminfo").read_text()
    free = int(next(line for line in text.splitlines() if line.startswith("MemAvailable")).split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
