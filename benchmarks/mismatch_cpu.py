"""Engine against trainer on the same sampled tokens: mean and max |delta log p| for one precision and one kind of engine.

    python -m benchmarks.mismatch_cpu DTYPE ACTIVATIONS       # prints one JSON line

One engine and one trainer in this process, the trainer on the engine's exported codes in the engine's own dtype; an adapter
with random A and B (so that the LoRA path is part of what is compared); 256 sampled completions of the tiny model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from typing import Any

from epilora.models import TINY_ARITH
from epilora.plugin.engine import VllmEngine
from epilora.tasks import load_task
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec, GenerateRequest, Sampling

COMPLETIONS = 256


async def measure(dtype: str, activations: str) -> dict[str, Any]:
    """Raw |delta log p| of every sampled token, and their mean and maximum."""
    from epilora.store import AdapterStore

    engine = VllmEngine(
        name="mismatch", model_path=str(TINY_ARITH), dtype=dtype, activations=activations, max_model_len=32,
        max_num_seqs=COMPLETIONS, max_num_batched_tokens=4096,
    )  # fmt: skip
    trainer = LoraTrainer(dtype=dtype)
    trainer.attach(await engine.export_weights())
    task = load_task("epilora.tasks.arithmetic:addition")
    trainer.open_session("s", AdapterSpec(16, 32.0, ("all-linear",)), {"lr": 3e-3}, seed=0)
    tokens = [
        (engine.tokenize(p.prompt), (*engine.tokenize(p.answer), engine.info().eos_token_id))
        for p in (task.problem("train", i) for i in range(64))
    ]
    for _ in range(5):  # so that B is not zero
        trainer.train_sft("s", tokens)
    spec, tensors = trainer.adapter("s")
    with tempfile.TemporaryDirectory() as folder:
        version = AdapterStore(folder).publish(
            "m", spec, tensors, base_model="m", base_digest=engine.info().base_digest
        )
    await engine.load_adapter(version, tensors)
    requests = [
        GenerateRequest(
            f"r{i}",
            task.problem("train", i).prompt,
            Sampling(max_tokens=6, seed=i, logprobs=0),
            version.digest,
            "rollout",
        )
        for i in range(COMPLETIONS)
    ]
    completions = await engine.generate(requests)
    ours = trainer.logprobs("s", [(c.prompt_token_ids, c.token_ids) for c in completions])
    deltas = [
        abs(a - b) for c, mine in zip(completions, ours, strict=True) for a, b in zip(c.logprobs, mine, strict=True)
    ]
    engine.close()
    return {
        "dtype": dtype,
        "activations": activations,
        "mean": sum(deltas) / len(deltas),
        "max": max(deltas),
        "deltas": deltas,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2]))))
