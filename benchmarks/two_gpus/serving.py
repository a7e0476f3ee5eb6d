"""The plugin's shards on two GPUs against vLLM's fastest, in one command: time per token, throughput, log-probabilities.

Engines of a group start one after another and stay up, idle ones holding memory and no more; rounds go through them in an order
that reverses every round. Ours is in every group, so that every ratio has both sides measured side by side. All groups of one
--work share vLLM's compile caches (a cache a variant), so that a second command starts in less time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from benchmarks.random_model import TINY as TINY_MODEL
from benchmarks.random_model import random_checkpoint
from benchmarks.serving.engines import OURS, STOCK, EngineFailed, EngineProcess, EngineSpec
from benchmarks.serving.models import model_folder
from benchmarks.two_gpus.summary import MODEL, TENANTS, THROUGHPUT, TPOT

# Two at a time: while a 72B of 16-bit weights is being quantised, a GPU has room for one more engine beside it.
GROUPS = tuple((OURS, variant) for variant in reversed(STOCK))
EQUALITY_LAYERS = 4  # of the 8B shape: weights that depend on their place are written to disk for it


def run(
    results: Results, *, tiny: bool, work: Path, tuned: str, seconds: float, groups: Sequence[int] = (0, 1, 2, 3)
) -> None:
    """Rows `tpot/...` and `throughput/...`. tuned: folder of LoRA tables for the shards; "" leaves tuned variants out."""
    until = time.monotonic() + seconds
    for index in groups:
        wanted = GROUPS[index]
        if "_tuned" in wanted[1] and not tuned:
            print(f"{wanted[1]}: no tables in --work; run the part tune first", flush=True)
            continue
        with _engines(results, [_spec(tiny, work, tuned, v) for v in wanted], work) as engines:
            _rounds(results, engines, tiny, until)


def _spec(tiny: bool, work: Path, tuned: str, variant: str) -> EngineSpec:
    if tiny:
        model = random_checkpoint("qwen3-8b", work / "tiny", **TINY_MODEL)
        sizes: dict[str, Any] = {"slots": 2, "rank": 8, "max_num_seqs": 8, "max_num_batched_tokens": 256}
        sizes |= {"max_model_len": 128, "kv_bytes": 16 << 20, "capture_sizes": (), "load_format": "auto"}
        return EngineSpec(str(model), variant, tensor_parallel=2, **sizes)
    return EngineSpec(
        str(model_folder(MODEL, work)), variant, slots=TENANTS, rank=64, max_num_seqs=64, max_num_batched_tokens=2048,
        max_model_len=2048, kv_bytes=4 << 30, gpu_memory_utilization=0.05, capture_sizes=(1, 2, 4, 8, 16, 32, 64),
        tuned_folder=tuned, tensor_parallel=2,
    )  # fmt: skip


class _engines:
    """Engines by variant, started one after another; one that fails leaves a row that says why."""

    def __init__(self, results: Results, specs: Sequence[EngineSpec], work: Path) -> None:
        self._results, self._specs, self._work = results, specs, work
        self._processes: list[EngineProcess] = []

    def __enter__(self) -> dict[str, EngineProcess]:
        ready: dict[str, EngineProcess] = {}
        for spec in self._specs:
            process = EngineProcess(spec, self._work)
            self._processes.append(process)
            case = f"start/{Path(spec.model).name}/tp{spec.tensor_parallel}"
            try:
                process.build()
                facts = process.wait_ready(600.0)
                process.call("load_adapters", count=spec.slots, rank=spec.rank)
            except EngineFailed as err:
                print(f"FAILED {spec.variant}: {err}", flush=True)
                self._results.add_failure(case, spec.variant, 0, str(err)[-600:].encode("ascii", "replace").decode())
                self._results.write()
                process.close()
                continue
            ready[spec.variant] = process
            kept = ("ranks_agree", "kinds", "fallbacks", "dispatch", "dispatch_s", "lora_classes", "custom_all_reduce")
            told = {key: facts[key] for key in kept if key in facts}
            self._results.add(case, spec.variant, spec.tensor_parallel, [facts["ready_after_s"]], unit="s", **told)
            self._results.write()
            print(f"{spec.variant} ready after {facts['ready_after_s']} s", flush=True)
        return ready

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()


def _rounds(results: Results, engines: dict[str, EngineProcess], tiny: bool, until: float) -> None:
    prompt, new, requests, rounds = (8, 6, 4, 2) if tiny else (64, 128, 64, 5)
    questions: dict[str, dict[str, Any]] = {
        TPOT: {"command": "tpot", "adapter": 1, "prompt_tokens": prompt, "new_tokens": new},
        THROUGHPUT: {
            "command": "throughput", "requests": requests, "tenants": 2 if tiny else TENANTS,
            "prompt_tokens": prompt if tiny else 512, "new_tokens": new,
        },
    }  # fmt: skip
    for case, asked in questions.items():
        command = asked.pop("command")
        found: dict[str, list[float]] = {variant: [] for variant in engines}
        for number in range(rounds + 1):
            for variant in list(engines) if number % 2 == 0 else list(reversed(engines)):
                if time.monotonic() > until:
                    break
                try:
                    value = engines[variant].call(command, **asked)
                except EngineFailed as err:
                    results.add_failure(case, variant, 0, str(err)[-600:].encode("ascii", "replace").decode())
                    engines.pop(variant).close()
                    continue
                if number:  # the first round warms up
                    found[variant] += value if isinstance(value, list) else [value]
        for variant, values in found.items():
            if values and variant in engines:
                facts = engines[variant].call("facts")
                told = {"engine": engines[variant].spec.settings(), "fallbacks": facts.get("fallbacks", [])}
                unit = "ms" if command == "tpot" else "tok_s"
                results.add(
                    case, variant, int(asked.get("tenants", 1)), values, unit=unit, paths=facts.get("paths", {}), **told
                )
        results.write()
        print(case, {variant: sorted(v)[len(v) // 2] for variant, v in found.items() if v}, flush=True)


def equality(results: Results, *, tiny: bool, work: Path) -> None:
    """Rows `equality/...`: errors of both engines' log-probabilities against one fp32 evaluation, under adapters and without."""
    changes = TINY_MODEL if tiny else {"num_hidden_layers": EQUALITY_LAYERS}
    model = random_checkpoint("qwen3-8b", work / "equality", **changes)
    slots, rank, longest = (2, 8, 48) if tiny else (TENANTS, 64, 384)
    spec = EngineSpec(
        str(model), OURS, slots=slots, rank=rank, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
        kv_bytes=(16 << 20) if tiny else (1 << 30), gpu_memory_utilization=0.05, load_format="auto",
        capture_sizes=() if tiny else (1, 2, 4, 8, 16), dtype="float32" if tiny else "bfloat16",
    )  # fmt: skip
    draw = random.Random(0)
    vocabulary = changes.get("vocab_size", 151936)
    sequences = [
        ([draw.randrange(3, vocabulary) for _ in range(draw.randint(2, longest))], adapter)
        for adapter in [*range(slots + 1), *range(slots + 1)]
    ]
    scores: dict[str, list[list[float]]] = {}
    truth: list[list[float]] = []
    for provider, ranks in (("tp1", 1), ("tp2", 2)):
        with _engines(results, [replace(spec, tensor_parallel=ranks)], work) as engines:
            if OURS not in engines:
                raise RuntimeError(f"equality: the engine of {ranks} ranks did not start; see the rows with a failure")
            scores[provider] = engines[OURS].call("score", sequences=sequences)
            if provider == "tp1":
                truth = engines[OURS].call("score_reference", sequences=sequences, rank=rank, seed=0, timeout_s=600.0)
    for provider, found in scores.items():
        errors = [abs(a - b) for x, y in zip(found, truth, strict=True) for a, b in zip(x, y, strict=True)]
        rms = (sum(e * e for e in errors) / len(errors)) ** 0.5
        case = f"equality/{'tiny' if tiny else 'qwen3-8b'}/tp2"
        results.add(
            case, provider, len(sequences), errors, unit="nats", digits=7, rms=rms, layers=changes["num_hidden_layers"]
        )
        print(f"{case} {provider}: rms {rms:.2e}, worst {max(errors):.2e}", flush=True)
    results.write()
