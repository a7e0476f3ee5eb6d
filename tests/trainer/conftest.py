"""Bases without an engine for the trainer's tests: a random small Qwen3 and Llama, and the shipped tiny model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from epilora.models import TINY_ARITH
from epilora.trainer.local_base import LocalBase, make_local_base
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec, Rollout, RolloutGroup

# Without a GPU the training GEMMs run in Triton's interpreter, which is chosen when triton is imported.
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors here are small: a second OpenMP thread only spins, and beside other processes that costs minutes.
torch.set_num_threads(1)

SPEC = AdapterSpec(4, 8.0, ("all-linear",))


@dataclass(frozen=True)
class Small:
    """A model folder and a base quantised from it."""

    folder: Path
    base: LocalBase


def random_model(folder: Path, kind: str, **sizes: int) -> Path:
    """A seeded two-layer model with grouped-query attention, saved in fp32. sizes: what the configuration has instead."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    common = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
    } | sizes
    torch.manual_seed(0)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    elif kind == "hybrid":
        delta = {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        layers = {"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **delta, **layers))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["qwen3", "llama", "hybrid"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = random_model(tmp_path_factory.mktemp(request.param), request.param)
    return Small(folder, make_local_base(folder, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="session")
def small_qwen(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = random_model(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return Small(folder, make_local_base(folder, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> LocalBase:
    return make_local_base(TINY_ARITH, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def trainer(small_qwen: Small) -> LoraTrainer:
    made = LoraTrainer()
    made.attach([small_qwen.base.manifest])
    return made


def sequences(seed: int = 0, count: int = 9) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, completion) pairs of uneven lengths over ids 0..49."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        ids = torch.randint(50, (3 + i % 5 + 2 + i % 4,), generator=g).tolist()
        out.append((tuple(ids[: 3 + i % 5]), tuple(ids[3 + i % 5 :])))
    return out


def rollout_groups(
    trainer: LoraTrainer, session: str | None, *, seed: int = 0, groups: int = 4, noise: float = 0.0, tops: int = 0
) -> list[RolloutGroup]:
    """Groups of four answers with rewards 1, 0, 0, 1; the sampler's log-probabilities are the trainer's and `noise`."""
    g = torch.Generator().manual_seed(seed + 100)
    made = []
    for i in range(groups):
        prompt = tuple(torch.randint(50, (4,), generator=g).tolist())
        answers = [tuple(torch.randint(50, (2 + j,), generator=g).tolist()) for j in range(4)]
        logps = trainer.logprobs(session, [(prompt, answer) for answer in answers])
        rollouts = []
        for j, (answer, logp) in enumerate(zip(answers, logps, strict=True)):
            shifted = tuple(value + noise * float(torch.randn((), generator=g)) for value in logp)
            top = tuple(tuple((k, -3.9) for k in range(tops)) for _ in answer) if tops else ()
            reward = float(j in (0, 3))
            rollouts.append(Rollout(f"p{i}", prompt, answer, shifted, reward, ("v1",), top_logprobs=top))
        made.append(RolloutGroup(f"p{i}", tuple(rollouts)))
    return made
