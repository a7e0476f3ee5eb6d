"""The waves of `python -m benchmarks.serving`: which engines stand side by side, and what is asked of each."""

from __future__ import annotations

import json
import pathlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.serving import summary, traces
from benchmarks.serving.driving import random_prompt
from benchmarks.serving.engines import (
    NO_LORA,
    OURS,
    OURS_FP8,
    OURS_QUANTISING,
    STOCK,
    EngineFailed,
    EngineProcess,
    EngineSpec,
)
from benchmarks.serving.run import Run
from benchmarks.serving.summary import SLOTS_ONE


def _tpot(run: Run, adapter: int) -> Callable[[EngineProcess], list[float]]:
    limits = run.limits

    def ask(process: EngineProcess) -> list[float]:
        wanted = adapter if process.spec.slots else 0
        return process.call("tpot", adapter=wanted, prompt_tokens=limits.tpot_prompt, new_tokens=limits.tpot_new)

    return ask


def _tpot_rows(run: Run, engines: dict[str, EngineProcess], slots: int) -> None:
    """Time per token of one request: under an adapter (LoRA off: without), then without one where LoRA is on."""
    case = summary.tpot_case(run.name, slots)
    run.in_rounds(engines, _tpot(run, 1), 1, f"{case} warm-up")
    run.measure(engines, _tpot(run, 1), case, 1, "ms", adapter=1)
    lora = {v: p for v, p in engines.items() if v in (OURS, STOCK[0])}
    run.measure(lora, _tpot(run, 0), case, 1, "ms", rename="{}_no_adapter", rounds=max(1, run.rounds - 2), adapter=0)


def _throughput(run: Run, tenants: int) -> Callable[[EngineProcess], list[float]]:
    limits = run.limits

    def ask(process: EngineProcess) -> list[float]:
        sizes = {"prompt_tokens": limits.throughput_prompt, "new_tokens": limits.throughput_new}
        wanted = tenants if process.spec.slots else 0
        return [process.call("throughput", requests=limits.throughput_requests, tenants=wanted, **sizes)]

    return ask


ONE_VARIANTS = (OURS, OURS_QUANTISING, *reversed(STOCK), NO_LORA)
ONLINE_VARIANTS = (OURS, STOCK[3], STOCK[1])
FP8_VARIANTS = (OURS_FP8, STOCK[3], STOCK[1])


def first_variants(run: Run, wave: str) -> tuple[str, ...]:
    """The engines a wave starts with, so that their processes can be there in time."""
    limits = run.limits
    by_wave = {"one": ONE_VARIANTS, "many": limits.groups_many[0], "fp8": FP8_VARIANTS, "online": ONLINE_VARIANTS}
    by_wave["brief"] = (*limits.brief_many, *limits.brief_one)
    return by_wave.get(wave, ())


def _one_spec(run: Run) -> EngineSpec:
    limits = run.limits
    spec = run.spec(SLOTS_ONE, kv_bytes=limits.kv_one, max_num_seqs=limits.seqs_one)
    return replace(spec, max_num_batched_tokens=limits.batched_one, capture_sizes=limits.capture_one)


def wave_one(run: Run) -> None:
    with run.engines(_one_spec(run), ONE_VARIANTS) as engines:
        _tpot_rows(run, engines, SLOTS_ONE)


def wave_brief(run: Run) -> None:
    """The headline rows from one set of engines: where machine time is short. LoRA off stands once, beside both."""
    one, many = run.limits.brief_one, run.limits.brief_many
    with run.fleet([(_many_spec(run), many), (_one_spec(run), one)]) as (engines, single):
        if NO_LORA in engines:
            single[NO_LORA] = engines[NO_LORA]
        _tpot_rows(run, single, SLOTS_ONE)
        _tpot_rows(run, engines, run.limits.slots_many)
        _throughput_rows(run, engines)
        _profiles(run, engines, run.limits.slots_many)


def _many_spec(run: Run) -> EngineSpec:
    limits = run.limits
    spec = run.spec(limits.slots_many, kv_bytes=limits.kv_many, max_num_seqs=limits.seqs_many)
    return replace(spec, max_num_batched_tokens=limits.batched_many, capture_sizes=limits.capture_many)


def wave_many(run: Run) -> None:
    for group in run.limits.groups_many:
        if run.time_left() <= 0:
            print(f"out of time before {', '.join(group)}", flush=True)
            return
        with run.engines(_many_spec(run), group) as engines:
            _tpot_rows(run, engines, run.limits.slots_many)
            _throughput_rows(run, engines)
            _profiles(run, engines, run.limits.slots_many)


def wave_fp8(run: Run) -> None:
    """Adapters stored in FP8, beside stock's fastest at this batch size."""
    with run.engines(_many_spec(run), FP8_VARIANTS) as engines:
        _throughput_rows(run, engines)


def _throughput_rows(run: Run, engines: dict[str, EngineProcess]) -> None:
    limits = run.limits
    case = summary.throughput_case(run.name, limits.slots_many)
    rounds = run.throughput_rounds
    ask = _throughput(run, limits.slots_many)
    run.in_rounds(engines, ask, 1, f"{case} warm-up")  # the first batch of an engine compiles for its prompts' lengths
    run.measure(engines, ask, case, limits.throughput_requests, "tok_s", rounds=rounds, tenants=limits.slots_many)


def _profiles(run: Run, engines: dict[str, EngineProcess], slots: int) -> None:
    """Kernel classes of decode steps of one request, and of one prefill outside the captured sizes."""
    limits = run.limits
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("b1", {"prompt_tokens": limits.tpot_prompt, "new_tokens": 40}),
        (
            f"prefill{limits.profile_prefill}",
            {"prompt_tokens": limits.profile_prefill, "new_tokens": 1, "prefill": True},
        ),
    )
    for variant in [v for v in (OURS, STOCK[3], STOCK[0], NO_LORA) if v in engines]:
        process = engines[variant]
        for kind, sizes in kinds:
            if run.time_left() <= 0:
                return
            case = f"profile/{run.name}/s{slots}/{kind}"
            try:
                if "prefill" in sizes:  # the first one of a length loads what later ones find
                    process.call(
                        "tpot",
                        adapter=int(bool(process.spec.slots)),
                        prompt_tokens=limits.profile_prefill,
                        new_tokens=2,
                    )
                found = process.call("profile", adapters=[int(bool(process.spec.slots))], **sizes)
            except EngineFailed as err:
                run.failure(case, variant, str(err))
                break
            run.add(case, process, variant, 1, [found["step_us"]], "us", profile=found)


def wave_online(run: Run) -> None:
    limits = run.limits
    captures = dict.fromkeys((limits.capture_default, limits.capture_long))
    for capture in captures:
        spec = replace(_many_spec(run), capture_sizes=capture)
        with run.engines(spec, ONLINE_VARIANTS) as engines:
            largest = max(capture, default=0)
            for prompt in limits.online_prompts:
                for rate in run.rates:
                    _online_rows(run, engines, "poisson", prompt, largest, rate)
            for rate in run.rates:
                _online_rows(run, engines, "wildchat", 0, largest, rate)


def _online_rows(
    run: Run, engines: dict[str, EngineProcess], trace: str, prompt_tokens: int, capture: int, rate: float
) -> None:
    """One trace at one rate through every engine, order alternating from rate to rate."""
    tenants = run.limits.slots_many
    rows = traces.read(trace, rate=rate, prompt_tokens=prompt_tokens, requests=run.requests, tenants=tenants)
    room = run.limits.max_model_len
    rows = [(arrival, min(prompt, room // 2), min(new, room // 4), tenant) for arrival, prompt, new, tenant in rows]
    order = list(engines) if int(rate) % 4 else list(reversed(engines))
    for variant in order:
        if run.time_left() < rows[-1][0]:
            print(f"out of time before {trace} at {rate}/s on {variant}", flush=True)
            continue
        began = time.monotonic()
        try:
            found = engines[variant].call("online", trace=rows, timeout_s=600.0)
        except EngineFailed as err:
            run.failure(f"online/{trace}/{run.name}/r{rate:g}", variant, str(err))
            continue
        seconds = round(time.monotonic() - began, 2)
        for metric in ("tpot", "ttft"):
            case = summary.online_case(metric, trace, run.name, prompt_tokens, capture, rate)
            facts = {"rate": rate, "trace": trace, "seconds": seconds, "tok_s": round(found["tok_s"][0], 1)}
            run.add(case, engines[variant], variant, len(rows), found[f"{metric}_ms"], "ms", **facts)
        middle = sorted(found["tpot_ms"])[len(rows) // 2]
        print(f"{case} {variant}: tpot {middle:.3f} ms, ttft p99 {summary.p99(found['ttft_ms']):.1f} ms", flush=True)


def wave_kv(run: Run) -> None:
    """KV tokens that vLLM finds room for, engine by engine, each alone on the GPU."""
    for variant in (OURS, STOCK[0]):
        spec = replace(_many_spec(run), kv_bytes=0, gpu_memory_utilization=0.9)
        with run.engines(spec, (variant,)) as engines:
            for process in engines.values():
                case = f"kv_tokens/{run.name}/s{run.limits.slots_many}"
                run.add(case, process, variant, 0, [process.facts["kv_tokens"]], "tokens")


def wave_large(run: Run) -> None:
    """A shape of which only one engine fits: start, measure, end, one variant after another."""
    limits = run.limits
    spec = run.spec(8, kv_bytes=limits.kv_one, max_num_seqs=8, max_num_batched_tokens=limits.batched_one)
    spec = replace(spec, capture_sizes=limits.capture_one)
    for variant in (OURS, STOCK[3], STOCK[1], NO_LORA):
        with run.engines(spec, (variant,)) as engines:
            _tpot_rows(run, engines, SLOTS_ONE)
            sizes = {"prompt_tokens": limits.tpot_prompt, "new_tokens": limits.tpot_new}

            def eight(process: EngineProcess, sizes: dict[str, int] = sizes) -> list[float]:
                adapters = list(range(1, 9)) if process.spec.slots else [0] * 8
                return [process.call("batch_tpot", adapters=adapters, **sizes)]

            run.measure(engines, eight, summary.tpot_case(run.name, 8, 8), 8, "ms", adapters=8)


def wave_equality(run: Run) -> None:
    """Log-probabilities of ours and stock against fp32, prefills chunked. Needs a model with weights: of drawn ones the
    logits say nothing.
    """
    limits = run.limits
    spec = replace(_many_spec(run), max_num_batched_tokens=max(limits.equality_tokens // 2, limits.seqs_many))
    with run.engines(spec, (OURS, STOCK[0])) as engines:
        _equality_rows(run, engines)


def _equality_rows(run: Run, engines: dict[str, EngineProcess]) -> None:
    """|difference| to an fp32 evaluation of the same codes and adapters, in nats, of every token.

    Batches: without any adapter; under adapters only; both together, where stock vLLM serves such a batch right. Without
    an adapter ours must give stock's very numbers: `equal_to_stock` says how many tokens do.
    """
    limits = run.limits
    generator = random.Random(0)
    vocabulary = json.loads((pathlib.Path(run.model) / "config.json").read_text())["vocab_size"]
    for batch in limits.equality_batches:
        first, last = {"base": (0, 0), "adapters": (1, limits.slots_many), "mixed": (0, limits.slots_many)}[batch]
        sequences = [
            (list(random_prompt(generator, generator.randint(2, limits.equality_tokens), vocabulary)), adapter)
            for adapter in list(range(first, last + 1)) * limits.equality_repeats
        ]
        scores = {variant: process.call("score", sequences=sequences) for variant, process in engines.items()}
        for variant, process in engines.items():
            truth = process.call("score_reference", sequences=sequences, rank=run.limits.rank, seed=0)
            errors = [
                abs(a - b) for x, y in zip(scores[variant], truth, strict=True) for a, b in zip(x, y, strict=True)
            ]
            rms = (sum(e * e for e in errors) / len(errors)) ** 0.5
            told = {"rms": round(rms, 8)}
            if STOCK[0] in scores:
                pairs = zip(scores[variant], scores[STOCK[0]], strict=True)
                told["equal_to_stock"] = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=True))
            case = f"equality/{run.name}/{batch}"
            run.add(case, process, variant, len(sequences), errors, "nats", digits=7, **told)
            print(f"{case} {variant}: rms {rms:.2e}, worst {max(errors):.2e}, {len(errors)} tokens, {told}", flush=True)


def wave_smoke(run: Run) -> None:
    """Every question once on one set of engines: what a test runs."""
    with run.engines(_many_spec(run), (OURS, STOCK[0], NO_LORA)) as engines:
        _tpot_rows(run, engines, run.limits.slots_many)
        _throughput_rows(run, engines)
        lora = {variant: process for variant, process in engines.items() if variant != NO_LORA}
        _online_rows(run, lora, "poisson", run.limits.online_prompts[0], 0, run.rates[0])
        _equality_rows(run, lora)
        _profiles(run, engines, run.limits.slots_many)


WAVES: dict[str, Callable[[Run], None]] = {
    "one": wave_one,
    "brief": wave_brief,
    "many": wave_many,
    "fp8": wave_fp8,
    "online": wave_online,
    "kv": wave_kv,
    "equality": wave_equality,
    "large": wave_large,
    "smoke": wave_smoke,
}
