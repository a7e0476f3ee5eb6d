"""Learning on a real model: what rounding and correcting do to GRPO, arm by arm, the seeds of an engine as parallel jobs on it.

| arm | engine | trainer | correction |
|---|---|---|---|
| bf16 | 16 bits | the same copy | none |
| flashrl | FP8, W8A8 | 16-bit weights of its own | truncated importance sampling |
| w8a8_tis | FP8, W8A8 | the engine's codes | truncated importance sampling |
| matched | FP8, W8A16 | the engine's codes | none |
| w8a8_uncorrected | FP8, W8A8 | the engine's codes | none |
| rounded_trainer (control) | FP8, W8A8 | the engine's codes, activations rounded alike | none |
| marlin (control) | FP8, vLLM's Marlin kernel, W8A16 (a GPU) | codes of its own: Marlin's are repacked | none |
| fake_quantised (control) | 16 bits, weights rounded to the FP8 codes' values | the codes of those weights | none |

The last two engines export nothing that a trainer on codes could map: theirs come from quantising the checkpoint as vLLM does.

Everything runs in this process: one engine at a time, one trainer a kind, one loop a job; the Marlin engine, whose switch is the
process's, only alone. `kl` and `step_s` of a row hold one
value a step; a job's step waits for its neighbours', so seconds compare arms with the same number of jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.handles import LocalPart
from actors.together import Together
from benchmarks.harness import Results
from epilora.config import load_config
from epilora.config.schema import JobConfig
from epilora.models import TINY_ARITH
from epilora.quant.reference import dequantize
from epilora.tasks import load_task
from epilora.trainer.attach import MappedBase
from epilora.trainer.local_base import LocalBase, make_local_base
from epilora.trainer.trainer import LoraTrainer
from jobs.evaluation import evaluate
from jobs.loop import RLLoop


@dataclass(frozen=True)
class EngineKind:
    """An engine's quantization and activations. own_codes: its trainers get codes made from the checkpoint, not the engine's.
    rounded_weights: it loads the values of those codes in 16 bits.
    """

    quantization: str | None
    activations: str
    own_codes: bool = False
    rounded_weights: bool = False

    @property
    def name(self) -> str:
        return f"{self.quantization or 'none'}-{self.activations}{'-rounded' if self.rounded_weights else ''}"


@dataclass(frozen=True)
class Arm:
    """engine: which kind. trainer: what it is told beside the rest."""

    engine: EngineKind
    trainer: tuple[tuple[str, Any], ...]
    correction: str


W8A8, MATCHED, SIXTEEN = (
    EngineKind("fp8_per_channel", "w8a8"),
    EngineKind("fp8_per_channel", "w8a16"),
    EngineKind(None, "w8a16"),
)
MARLIN = EngineKind("fp8_per_channel", "marlin", own_codes=True)
FAKE = EngineKind(None, "w8a16", own_codes=True, rounded_weights=True)
ARMS = {
    "bf16": Arm(SIXTEEN, (), "none"),
    "flashrl": Arm(W8A8, (("own", "16bit"),), "tis_token"),
    "w8a8_tis": Arm(W8A8, (), "tis_token"),
    "matched": Arm(MATCHED, (), "none"),
    "w8a8_uncorrected": Arm(W8A8, (), "none"),
    "rounded_trainer": Arm(W8A8, (("round_activations", True),), "none"),
    "marlin": Arm(MARLIN, (("own", "fp8"),), "none"),
    "fake_quantised": Arm(FAKE, (("own", "fp8"),), "none"),
}
TASKS = {
    "chain_sum": "task.path=epilora.tasks.chat_arithmetic:chain_sum",
    "products": "task={path: 'epilora.tasks.reasoning:reasoning_gym_task', args: {name: products, size: 3000, template: chatml, "
    "extract: last_number, min_digits: 1, max_digits: 1, held_out_fraction: 0.25}}",
}


@dataclass(frozen=True)
class Scale:
    """How large a run is."""

    model: str
    dtype: str
    steps: int
    prompts: int
    group: int
    max_tokens: int
    eval_problems: int
    lr: float
    context: int
    task: tuple[str, ...] = ()


def scale_of(model: str, *, small: bool) -> Scale:
    """small: a few steps of the shipped tiny model."""
    if small:
        return Scale(
            str(TINY_ARITH), "float32", 2, 4, 4, 5, 16, 3e-3, 32, ("task.path=epilora.tasks.arithmetic:addition",)
        )
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return Scale(model, dtype, 100, 16, 8, 12, 200, 3e-4, 128)


class SharedTrainer:
    """One trainer for all jobs of an engine, as `actors/trainer.py` shares it: one thread, waiting steps run together."""

    def __init__(self, trainer: LoraTrainer) -> None:
        self._trainer = trainer
        self._worker = ThreadPoolExecutor(1)
        self._together = Together(trainer.train_rl_together, self._worker)

    def train_rl(self, session: str, groups: Any, loss: Any) -> dict[str, float]:
        return self._together.submit(session, (session, groups, loss))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._trainer, name)
        return lambda *args, **kwargs: self._worker.submit(method, *args, **kwargs).result()


def rounded_model(folder: Path, codes: LocalBase, out: Path, dtype: torch.dtype) -> Path:
    """The model of `folder` with every linear weight replaced by what its FP8 code stands for, in `dtype`; returns `out`."""
    out.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, out)
    base = MappedBase(codes.manifest)
    values: dict[str, torch.Tensor] = {}
    for entry in codes.manifest.entries:
        if entry.slices:
            whole, start = dequantize(base.operands[entry.name]).to(dtype), 0
            parent = entry.name.rpartition(".")[0]
            for leaf, rows in entry.slices:
                values[f"{parent}.{leaf}.weight"] = whole[start : start + rows].clone()
                start += rows
    for path in folder.glob("*.safetensors"):
        kept = {name: values.get(name, tensor) for name, tensor in load_file(path).items()}
        save_file(kept, out / path.name, metadata={"format": "pt"})
    return out


def job_config(arm: str, task: str, seed: int, scale: Scale) -> JobConfig:
    """The loop's configuration of one job."""
    overrides = [
        f"name={arm}-{task}-{seed}",
        f"seed={100 * seed + list(ARMS).index(arm)}",  # equal first adapters would be one version, whose slot two jobs free
        f"engine.model_path={scale.model}",
        f"engine.dtype={scale.dtype}",
        f"trainer.dtype={scale.dtype}",
        "engine.max_loras=64",
        "trainer.placement=shared_kv_kept",
        f"loss={{name: dapo, correction: {ARMS[arm].correction}}}",
        f"optimizer.lr={scale.lr}",
        f"rl.steps={scale.steps}",
        f"rl.prompts_per_step={scale.prompts}",
        f"rl.group_size={scale.group}",
        f"rl.max_tokens={scale.max_tokens}",
        f"rl.checkpoint_every={scale.steps}",
        *(scale.task or (TASKS[task],)),
    ]
    return load_config(None, overrides)


async def run_job(
    engine: Any, trainer: SharedTrainer, store: Any, config: JobConfig, folder: Path, scale: Scale
) -> dict[str, Any]:
    """Train one policy; its metrics by step and its final held-out accuracy."""
    steps: list[dict[str, float]] = []
    task = load_task(config.task.path, **config.task.args)
    loop = RLLoop(
        config,
        engine=engine,
        trainer=LocalPart(trainer),
        store=store,
        task=task,
        run_dir=folder / config.name,
        record=lambda _, metrics: steps.append(dict(metrics)),
    )
    await loop.start()
    await loop.run()
    assert loop.policy is not None
    found = await evaluate(
        engine,
        task,
        problems=min(scale.eval_problems, task.size("held_out")),
        adapter=loop.policy.version.digest,
        max_tokens=scale.max_tokens,
        stop=(),
        tag=config.name,
    )
    await loop.close(keep_policy=False)
    return {"accuracy": found.accuracy, "problems": found.problems, "steps": steps}


async def run_engine(
    results: Results,
    kind: EngineKind,
    arms: Sequence[str],
    tasks: Sequence[str],
    seeds: Sequence[int],
    scale: Scale,
) -> None:
    """All jobs of the arms that share one kind of engine, at once."""
    from epilora.plugin.engine import VllmEngine
    from epilora.store import AdapterStore

    jobs = [(arm, task, seed) for arm in arms for task in tasks for seed in seeds]
    on_gpu = torch.cuda.is_available()
    own = contextlib.ExitStack()
    codes: LocalBase | None = None
    model = scale.model
    if kind.own_codes:
        place = Path(own.enter_context(tempfile.TemporaryDirectory(prefix="epilora-codes-")))
        codes = make_local_base(scale.model, place, dtype=getattr(torch, scale.dtype))
        if kind.rounded_weights:
            model = str(rounded_model(Path(scale.model), codes, place / "model", getattr(torch, scale.dtype)))
    made = VllmEngine(
        name=f"learning-{kind.name}",
        model_path=model,
        dtype=scale.dtype,
        quantization=kind.quantization,
        activations=kind.activations,
        max_model_len=scale.context,
        max_num_seqs=min(512, len(jobs) * scale.prompts * scale.group),
        max_loras=2 * len(jobs) + 1,
        kv_cache_bytes=(4 << 30) if on_gpu else (64 << 20),
        **({"graph_sizes": [64, 256]} if on_gpu else {}),
    )
    try:
        engine = LocalPart(made)
        manifests = await engine.export_weights() if codes is None else [codes.manifest]
        checksum = await engine.base_checksum()
        trainers: dict[Any, SharedTrainer] = {}
        for arm in arms:
            if ARMS[arm].trainer not in trainers:
                trainer = LoraTrainer(
                    dtype=scale.dtype,
                    device="cuda" if on_gpu else "cpu",
                    gemm_mode="registers",
                    **dict(ARMS[arm].trainer),
                )
                trainer.attach(manifests)
                trainers[ARMS[arm].trainer] = SharedTrainer(trainer)
        with tempfile.TemporaryDirectory() as folder:
            store = LocalPart(AdapterStore(Path(folder) / "store"))
            for task_name in tasks:
                wanted = job_config(arms[0], task_name, 0, scale).task
                task = load_task(wanted.path, **wanted.args)
                problems = min(scale.eval_problems, task.size("held_out"))
                base = await evaluate(
                    engine,
                    task,
                    problems=problems,
                    adapter=None,
                    max_tokens=scale.max_tokens,
                    stop=(),
                    tag=f"base-{task_name}",
                )
                results.add(
                    f"learning/{task_name}/before", "base", 0, [base.accuracy], unit="accuracy", problems=base.problems
                )
            found = await asyncio.gather(
                *(
                    run_job(
                        engine,
                        trainers[ARMS[arm].trainer],
                        store,
                        job_config(arm, task, seed, scale),
                        Path(folder),
                        scale,
                    )
                    for arm, task, seed in jobs
                )
            )
        unchanged = checksum == await engine.base_checksum()
    finally:
        made.close()
        own.close()
    for (arm, task_name, seed), one in zip(jobs, found, strict=True):
        steps = one["steps"]
        facts = {name: [s[f"time/{name}"] for s in steps] for name in ("generate_s", "train_s", "publish_s", "step_s")}
        facts |= {"kl": [s["mismatch/k3_kl"] for s in steps], "reward": [s["rollout/reward_mean"] for s in steps]}
        case = f"learning/{task_name}/{arm}"
        results.add(
            case, arm, seed, [one["accuracy"]], unit="accuracy", problems=one["problems"], base_unchanged=unchanged,
            jobs=len(jobs), **facts,
        )  # fmt: skip
    results.write()


def run(results: Results, *, small: bool, model: str, arms: Sequence[str] = tuple(ARMS), seeds: int = 5) -> None:
    """One engine after another, each with the jobs of its arms."""
    from epilora.plugin.environment import prepare_environment

    prepare_environment()
    scale = scale_of(model, small=small)
    if "marlin" in arms and len(arms) > 1:
        raise ValueError("arms: marlin runs in a process of its own: --arms marlin")
    tasks = ("chain_sum",) if small else tuple(TASKS)
    for kind in dict.fromkeys(ARMS[arm].engine for arm in arms):
        here = [arm for arm in arms if ARMS[arm].engine == kind]
        asyncio.run(run_engine(results, kind, here, tasks, range(1 if small else seeds), scale))
