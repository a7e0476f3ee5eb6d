"""Memory of a trainer's full step on a 27B hybrid of random weights, by NVML at 10 Hz: 8 problems x 8 samples x 2,048 tokens.

This program runs the trainer alone, on a base of its own: what remains under a cap is the engine's. The row says so.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Results

from .gpu_memory import GIB, GpuMemoryWatch
from .random_base import random_rollouts, shape_folder
from .train_speed import make_trainer, timed_step


def run(results: Results, *, small: bool, problems: int = 8, group_size: int = 8, micro_batch: int = 2) -> None:
    """small: a two-layer model on whatever device there is, for tests (without NVML no memory is recorded)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, prompt, completion, rank, changes = "qwen3.5-27b", 64, 2048, 64, {}
    if small:
        problems, group_size, prompt, completion, rank = 2, 2, 4, 12, 4
        changes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        changes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    tokens = micro_batch * (prompt + completion)
    watch = GpuMemoryWatch() if device.type == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        path = shape_folder(shape, Path(folder), **changes)
        if watch is not None:
            watch.__enter__()
        try:
            start = time.perf_counter()
            trainer = make_trainer(path, "fp8", "panel", tokens, rank, device)
            made_s = time.perf_counter() - start
            groups = random_rollouts(trainer.vocab_size, problems, group_size, prompt, completion)
            first_s, _ = timed_step(trainer, groups[:1], device)
            seconds, metrics = timed_step(trainer, groups, device)
        finally:
            if watch is not None:
                watch.__exit__()
    facts: dict[str, Any] = {
        "engine": "none",
        "problems": problems,
        "group_size": group_size,
        "completion_tokens": completion,
        "rank": rank,
        "micro_batch_tokens": tokens,
        "make_s": round(made_s, 2),
        "first_step_s": round(first_s, 2),
        "step_s": round(seconds, 2),
        "changes": changes,
    }
    facts |= {key: metrics[key] for key in ("grad_norm", "loss", "tokens", "sequences", "zero_variance_groups")}
    if watch is not None:
        facts |= {
            "before_gib": round(watch.before_bytes / GIB, 2),
            "torch_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        }
        facts["samples_taken"] = len(watch.samples)
    results.add(
        f"memory/{shape}/trainer", "fp8_panel", tokens, [] if watch is None else [watch.peak_gib], unit="gib", **facts
    )
    results.write()
