"""The configuration of an RL job on a model of random weights: what programs about time and memory run.

Sizes are those of a real model on a GPU, and of a model of two narrow layers without one (`tiny`). The task is
`benchmarks.even_ids`: every group trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_model import TINY, random_checkpoint
from epilora.config import load_config
from epilora.config.schema import JobConfig


@dataclass(frozen=True)
class Sizes:
    """prompt_tokens, new_tokens: of a rollout. problems, group: of a step. seqs: rollouts in a batch at once."""

    shape: str
    tiny: bool
    prompt_tokens: int
    new_tokens: int
    problems: int
    group: int
    rank: int
    seqs: int
    kv_mib: int
    micro_batch: int

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens + 8


FULL = Sizes("qwen3-8b", False, 64, 512, 8, 8, 64, 256, 24 * 1024, 8192)
SMALL = Sizes("qwen3-8b", True, 4, 8, 3, 2, 4, 16, 16, 256)


def model_folder(sizes: Sizes, root: Path) -> Path:
    """The random model's folder under `root`, made if it is not there yet."""
    folder = root / (f"{sizes.shape}-tiny" if sizes.tiny else sizes.shape)
    if not (folder / "complete").exists():
        random_checkpoint(sizes.shape, folder, **(TINY if sizes.tiny else {}))
        (folder / "complete").touch()
    return folder


def job_config(sizes: Sizes, model: Path, work: Path, *more: str, vocab_size: int = 0) -> JobConfig:
    """A job named in `more`, on `model`. vocab_size: ids the prompts are drawn from, 0: the model's own."""
    vocab_size = vocab_size or (TINY["vocab_size"] if sizes.tiny else 151936)  # type: ignore[assignment]
    dtype = "float32" if sizes.tiny else "bfloat16"
    settings = [
        f"engine.model_path={model}",
        f"engine.dtype={dtype}",
        f"trainer.dtype={dtype}",
        f"engine.activations={'w8a16' if sizes.tiny else 'w8a8'}",
        f"engine.max_model_len={sizes.context}",
        f"engine.max_num_seqs={sizes.seqs}",
        f"engine.max_num_batched_tokens={max(sizes.seqs, 256 if sizes.tiny else 8192)}",
        "engine.max_loras=10",
        f"engine.max_lora_rank={max(8, sizes.rank)}",
        f"engine.kv_cache_mib={sizes.kv_mib}",
        f"lora={{rank: {sizes.rank}, alpha: {2 * sizes.rank}}}",
        "optimizer.lr=1e-5",
        "loss={name: dapo, correction: tis_token}",
        f"trainer.micro_batch_tokens={sizes.micro_batch}",
        "trainer.checkpoint_activations=true",
        f"trainer.placement={'shared_kv_kept' if sizes.tiny else 'shared_kv_released'}",
        f"task={{path: 'benchmarks.even_ids:EvenIds', args: {{vocab_size: {vocab_size}, prompt_tokens: {sizes.prompt_tokens}}}}}",
        f"rl.prompts_per_step={sizes.problems}",
        f"rl.group_size={sizes.group}",
        f"rl.max_tokens={sizes.new_tokens}",
        "rl.checkpoint_every=1",
        f"store.root={work}/store",
        "ready_timeout_s=400",
    ]
    if not sizes.tiny:
        settings += [
            "engine.num_gpus=0.5",
            "trainer.num_gpus=0.5",
            "engine.graph_sizes=[1, 2, 4, 8, 16, 32, 64, 128, 256]",
        ]
    return load_config(None, [*settings, *more])


def tenants_setting(count: int, requests_per_s: float, sizes: Sizes, max_tokens: int) -> str:
    """`tenants=[...]`: `count` tenants of the plain base, each with prompts of its own and `requests_per_s`."""
    vocab_size = TINY["vocab_size"] if sizes.tiny else 151936
    args = f"{{vocab_size: {vocab_size}, prompt_tokens: {sizes.prompt_tokens}}}"
    one = f"prompts_task: {{path: 'benchmarks.even_ids:EvenIds', args: {args}}}, requests_per_s: {requests_per_s}, max_tokens: {max_tokens}"
    return "tenants=[" + ", ".join(f"{{name: t{i}, {one}}}" for i in range(count)) + "]"
