"""Trained tokens a second of the FP8 trainer over the 16-bit trainer: the same loop, attention, packing, checkpointing.

Both train the same random model of an 8B's shape with one rank-64 adapter on all linears; steps of the arms alternate.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Results
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec

from .random_base import random_base, random_rollouts, shape_folder

ARMS = {"fp8_panel": ("fp8", "panel"), "bf16": ("bf16", "panel"), "fp8_registers": ("fp8", "registers")}


def make_trainer(folder: Path, kind: str, mode: str, tokens: int, rank: int, device: torch.device) -> LoraTrainer:
    """A trainer with one session `s` on a random base of the model in `folder`."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    trainer = LoraTrainer(
        dtype=dtype, micro_batch_tokens=tokens, checkpoint_activations=True, device=str(device), gemm_mode=mode
    )
    trainer.use_base(random_base(folder, kind, device))
    trainer.open_session("s", AdapterSpec(rank, 2.0 * rank, ("all-linear",)), {"lr": 1e-5}, 0)
    return trainer


def timed_step(trainer: LoraTrainer, groups: list[Any], device: torch.device) -> tuple[float, dict[str, float]]:
    """Seconds and metrics of one optimizer step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    metrics = trainer.train_rl("s", groups, {"name": "dapo", "correction": "tis_token"})
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, metrics


def profile_step(trainer: LoraTrainer, groups: list[Any], rows: int = 25) -> list[dict[str, Any]]:
    """The kernels of one step by their summed time on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.train_rl("s", groups, {"name": "dapo", "correction": "tis_token"})
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:rows]
    return [{"kernel": e.key[:90], "ms": round(e.self_device_time_total / 1e3, 2), "calls": e.count} for e in found]


def run(results: Results, *, small: bool, rounds: int = 4, profile: bool = False) -> None:
    """small: a model the CPU can train, for tests."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, tokens, rank, changes = "qwen3-8b", 8192, 64, {}
    groups = None
    if small:
        tokens, rank, rounds = 64, 4, 1
        changes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    arms = {name: arm for name, arm in ARMS.items() if device.type == "cuda" or arm[1] == "panel"}
    with tempfile.TemporaryDirectory() as folder:
        path = shape_folder(shape, Path(folder), **changes)
        trainers = {}
        facts: dict[str, dict[str, Any]] = {}
        for name, (kind, mode) in arms.items():
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            trainers[name] = make_trainer(path, kind, mode, tokens, rank, device)
            held = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
            facts[name] = {"held_bytes": held, "rank": rank, "micro_batch_tokens": tokens}
        vocabulary = trainers["bf16"].vocab_size
        # Each micro-batch is full: four sequences of a quarter of the budget.
        prompt = max(2, tokens // 128)
        groups = random_rollouts(vocabulary, 2, 4, prompt, tokens // 4 - prompt)
        trained = sum(len(r.token_ids) for group in groups for r in group.rollouts)
        speed: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, trainer in trainers.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                seconds, metrics = timed_step(trainer, groups, device)
                if device.type == "cuda":
                    facts[name]["step_peak_bytes"] = torch.cuda.max_memory_allocated() - before
                facts[name] |= {key: metrics[key] for key in ("grad_norm", "loss", "tokens")}
                if number:  # the first round compiles and warms up
                    speed[name].append(trained / seconds)
        for name in arms:
            results.add(f"train_speed/{shape}", name, tokens, speed[name], unit="tok_s", changes=changes, **facts[name])
        results.write()
        if profile:
            for name in ("fp8_panel", "bf16"):
                top = profile_step(trainers[name], groups)
                results.add(f"train_profile/{shape}", name, tokens, [row["ms"] for row in top], unit="ms", kernels=top)
            results.write()
