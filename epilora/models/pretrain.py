"""Pretraining of the tiny arithmetic model from a seed.

Qwen3 architecture, width 96, 2 layers, 3 heads of 32, one key-value head, FFN 288, 32 characters: 0.22 M parameters.
Each batch mixes the three tasks of `epilora.tasks.arithmetic` in equal parts; an answer is the task's habitual one with
probability `habit_rate`, else the right one. Only answer tokens are trained on, and only train-split questions are
seen. Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) on the matrices of the layers, AdamW on embedding
and norms. Length is counted in steps, never in seconds, so that a loaded machine makes the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from epilora.tasks.arithmetic import Addition, Maximum, Subtraction

from .char_tokenizer import EOS_ID, PAD_ID, VOCABULARY, encode, save_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM

TASKS = (Addition, Subtraction, Maximum)
MAX_TEXT_TOKENS = 15  # "max(12,47)=" + 3 digits + end


@dataclass(frozen=True)
class PretrainConfig:
    """How to make the tiny model. habit_rate: share of answers that follow the planted habit."""

    seed: int = 0
    steps: int = 900
    batch_size: int = 256
    habit_rate: float = 0.6
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup_steps: int = 20
    decay_fraction: float = 0.3  # the last part of the run in which both rates fall linearly to 0


def model_config() -> Qwen3Config:
    """The transformers config of the tiny model."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        attention_bias=False,
        architectures=["Qwen3ForCausalLM"],
    )


class Corpus:
    """Endless seeded batches: (ids [B, T] int64 right-padded, answer mask [B, T] bool)."""

    def __init__(self, config: PretrainConfig) -> None:
        self._habit_rate = config.habit_rate
        self._batch = config.batch_size
        self._generator = torch.Generator().manual_seed(config.seed)
        self._right, self._habit = _answers()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch."""
        ids, masks = [], []
        for t, (right, habit) in enumerate(zip(self._right, self._habit, strict=True)):
            count = self._batch // len(TASKS) + (t < self._batch % len(TASKS))
            rows = torch.randint(right[0].shape[0], (count,), generator=self._generator)
            habitual = torch.rand(count, 1, generator=self._generator) < self._habit_rate
            ids.append(torch.where(habitual, habit[0][rows], right[0][rows]))
            masks.append(torch.where(habitual, habit[1][rows], right[1][rows]))
        return torch.cat(ids), torch.cat(masks)


@cache
def _answers() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """(ids, mask) of every training problem with its right answer, and with its habitual one, by task. Made once."""
    right, habit = [], []
    for task in (make() for make in TASKS):
        problems = [task.problem("train", i) for i in range(task.size("train"))]
        right.append(_rows([(p.prompt, p.answer) for p in problems]))
        habit.append(_rows([(p.prompt, str(task.habitual_answer(p.meta["a"], p.meta["b"]))) for p in problems]))
    return right, habit


def _rows(pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(pairs), MAX_TEXT_TOKENS), PAD_ID, dtype=torch.long)
    mask = torch.zeros((len(pairs), MAX_TEXT_TOKENS), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        tokens = [*encode(prompt), *encode(answer), EOS_ID]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(encode(prompt)) : len(tokens)] = True
    return ids, mask


def pretrain(config: PretrainConfig) -> tuple[Qwen3ForCausalLM, list[float]]:
    """Train from scratch. Returns the fp32 model in eval mode and the loss (nats per answer token) of every step.

    Deterministic for a seed, torch version and thread count.
    """
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(model_config())
    corpus = Corpus(config)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and "layers" in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.adamw_lr, weight_decay=0.01, betas=(0.9, 0.98)),
    ]
    rates = [config.muon_lr, config.adamw_lr]
    losses = []
    model.train()
    for step in range(config.steps):
        left = (config.steps - step) / max(config.steps * config.decay_fraction, 1.0)
        factor = min((step + 1) / config.warmup_steps, 1.0, left)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        ids, mask = corpus.batch()
        logits = model(input_ids=ids[:, :-1]).logits
        chosen = mask[:, 1:]
        loss = F.cross_entropy(logits[chosen].float(), ids[:, 1:][chosen])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    model.eval()
    return model, losses


def save_model(model: Qwen3ForCausalLM, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write an HF folder (safetensors in `dtype`, config, generation config, tokenizer) that transformers and vLLM
    load.

    bf16 by default: an engine of any dtype then quantises the same numbers, so all have the same FP8 codes.
    """
    torch.nn.Module.to(model, dtype)
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(folder)
    save_tokenizer(folder)
