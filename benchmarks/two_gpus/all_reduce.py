"""vLLM's custom all-reduce beside weights that are shared and a KV cache that is released: does it start, and is it right?

It exchanges CUDA IPC handles of memory, which pooled virtual memory has none of; here only the KV cache is pooled. Two engines of two
ranks on the 8B shape with a few layers, one after another, with it and without.

| case | provider | samples |
|---|---|---|
| `all_reduce/qwen3-8b` | custom, nccl | ms per output token of one request; facts: what still works |
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from benchmarks.random_model import TINY, random_checkpoint
from epilora.types import GenerateRequest, Sampling

LAYERS = 4
ROUNDS = 5


def run(results: Results, *, tiny: bool, work: Path) -> None:
    """Rows of the module's table; an engine that does not start leaves a row that says why."""
    from epilora.plugin.engine import VllmEngine

    changes = TINY if tiny else {"num_hidden_layers": LAYERS}
    model = random_checkpoint("qwen3-8b", work / "all_reduce", **changes)
    sizes: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 16 << 20, "max_model_len": 128, "max_lora_rank": 8}
    if not tiny:
        sizes = {
            "dtype": "bfloat16",
            "activations": "w8a8",
            "kv_cache_bytes": 4 << 30,
            "max_model_len": 1024,
            "max_lora_rank": 64,
        }
        sizes |= {"graph_sizes": [1, 2, 4, 8], "compilation": {"mode": 0, "cudagraph_mode": "FULL"}}
    found: dict[str, dict[str, Any]] = {}
    for provider in ("nccl", "custom"):
        try:
            engine = VllmEngine(
                name=f"all-reduce-{provider}", model_path=str(model), tensor_parallel=2, max_num_seqs=8, max_loras=2,
                custom_all_reduce=provider == "custom", **sizes,
            )  # fmt: skip
        except Exception as err:  # what vLLM raises where its handles cannot be had
            results.add_failure("all_reduce/qwen3-8b", provider, 1, f"{type(err).__name__}: {err}"[:400])
            results.write()
            continue
        try:
            found[provider] = asyncio.run(_look_at(engine, 8 if tiny else 64))
        finally:
            engine.close()
    for provider, seen in found.items():
        facts = {key: value for key, value in seen.items() if key not in ("tokens", "tpot_ms")}
        facts["tokens_equal_nccl"] = seen["tokens"] == found.get("nccl", seen)["tokens"]
        results.add("all_reduce/qwen3-8b", provider, 1, seen["tpot_ms"], unit="ms", **facts)
        print("all_reduce", provider, seen["tpot_ms"], facts, flush=True)
    results.write()


async def _look_at(engine: Any, new_tokens: int) -> dict[str, Any]:
    """Answers before the weights are shared, afterwards, and after the cache was released and restored."""
    sampling = Sampling(max_tokens=new_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    count = 0

    async def answer() -> Any:
        nonlocal count
        count += 1
        await engine.reset_prefix_cache()
        [done] = await engine.generate([GenerateRequest(f"a{count}", tuple(range(3, 35)), sampling)])
        return done

    before = await answer()
    manifests, checksum = await engine.export_weights(), await engine.base_checksum()
    shared = await answer()
    released = await engine.release_kv()
    await engine.restore_kv()
    restored = [await answer() for _ in range(ROUNDS)]
    return {
        "tokens": before.token_ids,
        "tpot_ms": [one.tpot_ms for one in restored],
        "ranks_exported": len(manifests),
        "released_bytes": released,
        "tokens_equal_shared": shared.token_ids == before.token_ids,
        "tokens_equal_restored": all(one.token_ids == before.token_ids for one in restored),
        "base_unchanged": checksum == await engine.base_checksum(),
    }
