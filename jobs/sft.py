"""Supervised steps on a task's right answers: how the quickstart makes a tenant's adapter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from epilora.types import AdapterSpec, AdapterVersion, EngineInfo


async def train_supervised(
    *,
    trainer: Any,
    store: Any,
    info: EngineInfo,
    task: Any,
    name: str,
    owner: str,
    rank: int,
    steps: int,
    batch: int,
    seed: int,
    lr: float,
) -> AdapterVersion:
    """Train one adapter for `task` in `steps` optimizer steps of `batch` answers and publish it as `name`."""
    tokenizer = Tokenizer.from_file(str(Path(info.model_path) / "tokenizer.json"))
    end = () if info.eos_token_id is None else (info.eos_token_id,)
    session = f"sft-{name}"
    spec = AdapterSpec(rank, 2.0 * rank, ("all-linear",))
    await trainer.close_session(session)
    await trainer.open_session(session, spec, {"lr": lr, "grad_clip": 1.0}, seed)
    order = random.Random(seed)
    loss = float("nan")
    for _ in range(steps):
        problems = [task.problem("train", order.randrange(1 << 20)) for _ in range(batch)]
        examples = [
            (tuple(tokenizer.encode(p.prompt).ids), (*tokenizer.encode(p.answer, add_special_tokens=False).ids, *end))
            for p in problems
        ]
        loss = (await trainer.train_sft(session, examples))["loss"]
    spec, tensors = await trainer.adapter(session)
    version = await store.publish(
        name,
        spec,
        tensors,
        base_model=info.model_name,
        base_digest=info.base_digest,
        metadata={"made_by": "sft", "steps": steps, "loss": loss},
        owner=owner,
    )
    await trainer.close_session(session)
    return version
