"""One run of `python -m benchmarks.serving`: its settings, the engines it starts, and the rows it keeps.

One engine works at a time. Rounds go through the engines in an order that reverses every round, so that drift of the GPU's
clocks hits all of them alike. An engine that fails leaves a row that says why; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.serving import summary
from benchmarks.serving.engines import (
    CAPTURE_SIZES,
    NO_LORA,
    OURS,
    OURS_QUANTISING,
    STOCK,
    EngineFailed,
    EngineProcess,
    EngineSpec,
)
from benchmarks.serving.summary import SLOTS_MANY

GIB = 1 << 30
RANK = 64


@dataclass(frozen=True)
class Limits:
    """Sizes that depend on the machine, equal for all engines of a wave.

    kv_one, kv_many: bytes of the KV cache in engines of one slot and of many. capture_*: batch sizes with CUDA graphs.
    groups_many: engines of many slots that fit on the GPU together; ours stands in every group, so that every ratio has both
    sides measured side by side.
    """

    slots_many: int = SLOTS_MANY
    rank: int = RANK
    max_model_len: int = 4096
    kv_one: int = 768 << 20
    kv_many: int = 14 * GIB
    seqs_one: int = 8
    seqs_many: int = 128
    batched_one: int = 128
    batched_many: int = 8192
    capture_one: tuple[int, ...] = (1, 2, 4, 8)
    capture_many: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    capture_default: tuple[int, ...] = (*CAPTURE_SIZES, 384, 512)
    capture_long: tuple[int, ...] = (*CAPTURE_SIZES, 384, 512, 768, 1024, 1536, 2048)
    tpot_prompt: int = 64
    tpot_new: int = 192
    throughput_requests: int = 256
    throughput_prompt: int = summary.PROMPT_TOKENS
    throughput_new: int = summary.NEW_TOKENS
    online_prompts: tuple[int, ...] = (512, 2048)
    groups_many: tuple[tuple[str, ...], ...] = (
        (OURS, STOCK[3], STOCK[1], NO_LORA),
        (OURS, STOCK[2], STOCK[0], NO_LORA),
    )
    brief_many: tuple[str, ...] = (OURS, STOCK[3], NO_LORA)
    brief_one: tuple[str, ...] = (OURS, OURS_QUANTISING, STOCK[3], STOCK[1])
    profile_prefill: int = 2048
    equality_tokens: int = 384
    equality_repeats: int = 2
    equality_batches: tuple[str, ...] = ("base", "adapters", "mixed")
    start_timeout_s: float = 420.0


FULL = Limits()
TINY = Limits(
    slots_many=2, rank=16, max_model_len=128, kv_one=16 << 20, kv_many=32 << 20, seqs_many=8,
    batched_one=128, batched_many=256, capture_one=(), capture_many=(), capture_default=(), capture_long=(), tpot_prompt=8,
    tpot_new=6, throughput_requests=6, throughput_prompt=8, throughput_new=4, online_prompts=(8,),
    groups_many=((OURS, STOCK[0], NO_LORA),), brief_many=(OURS, STOCK[0]), brief_one=(OURS, STOCK[0]),
    equality_tokens=48, equality_repeats=4, profile_prefill=64,
    equality_batches=("base", "adapters"),  # stock's CPU build gives rows without an adapter the last slot's
)  # fmt: skip


def command_of(arguments: Sequence[str]) -> str:
    """How the program was started, for the results file."""
    from benchmarks.harness import command_line

    return command_line("python -m benchmarks.serving", arguments)


def tuned_from(results: pathlib.Path, model: str, folder: pathlib.Path) -> pathlib.Path | None:
    """Tuned tables of `model` from the committed kernel results; None where they have none (tune it on the GPU then)."""
    from benchmarks.serving.tune import tables_from_rows, write_tables

    found = json.loads(results.read_text())
    try:
        tables = tables_from_rows(found["rows"], pathlib.Path(model).name, RANK)
    except ValueError as err:
        print(f"no tuned variants: {err}", flush=True)
        return None
    write_tables(tables, folder, found["gpu"], RANK)
    return folder


@dataclass
class Run:
    """One run of the program: settings, and the results file its rows go to."""

    model: str
    variants: tuple[str, ...]
    tuned_folder: str
    out: pathlib.Path
    work: pathlib.Path
    rounds: int
    throughput_rounds: int
    rates: tuple[float, ...]
    requests: int
    deadline: float
    reserve_s: float
    limits: Limits
    gpu: int
    command: str
    waves: Mapping[str, Callable[[Run], None]]
    results: Any = None
    spares: dict[str, list[EngineProcess]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return pathlib.Path(self.model).name

    def time_left(self) -> float:
        """Seconds until nothing new starts."""
        return self.deadline - time.monotonic()

    def wave(self, name: str) -> None:
        """Run one wave if time is left."""
        if self.time_left() <= 0:
            print(f"out of time before wave {name}", flush=True)
            return
        began = time.monotonic()
        self.waves[name](self)
        print(f"wave {name}: {time.monotonic() - began:.0f} s", flush=True)

    def has_gpu(self) -> bool:
        """Whether this machine has an NVIDIA GPU; asks no library."""
        return pathlib.Path("/dev/nvidiactl").exists()

    def prefetch(self, variants: Sequence[str]) -> None:
        """Start processes that a later wave will need: they import vLLM (seconds) while this wave's engines are built."""
        for variant in variants:
            if variant in self.variants:
                process = EngineProcess(self.spec(1).as_variant(variant), self.work)
                self.spares.setdefault(variant, []).append(process)

    def close(self) -> None:
        """End spares that nothing needed."""
        for processes in self.spares.values():
            for process in processes:
                process.close()

    def _open(self) -> None:
        """Make the results file's writer; importing what it needs takes seconds, so engines start first."""
        if self.results is None:
            from benchmarks.harness import Results

            self.results = Results(self.out, summary.summarise, self.command)

    @contextlib.contextmanager
    def engines(self, spec: EngineSpec, variants: Sequence[str]) -> Iterator[dict[str, EngineProcess]]:
        """Engines of those variants that this run wants (see `fleet`)."""
        with self.fleet([(spec, variants)]) as groups:
            yield groups[0]

    @contextlib.contextmanager
    def fleet(self, groups: Sequence[tuple[EngineSpec, Sequence[str]]]) -> Iterator[list[dict[str, EngineProcess]]]:
        """Engines of several specifications, built side by side; every slot holds an adapter. Those that start, by group.

        Ours load first and one by one: they time their kernels then, and nothing else may use the GPU meanwhile. Without a
        GPU engines are built one after another: there are few cores. Engines that are not ready `reserve_s` before the
        deadline end with a row that says so, and the others are measured.
        """
        members: list[tuple[int, EngineSpec, EngineProcess]] = []
        for index, (spec, variants) in enumerate(groups):
            for variant in (v for v in variants if v in self.variants):
                wanted = spec.as_variant(variant)
                spare = self.spares.get(variant, [])
                members.append((index, wanted, spare.pop() if spare else EngineProcess(wanted, self.work)))
        members.sort(key=lambda member: not member[1].variant.startswith(OURS))
        ready: list[dict[str, EngineProcess]] = [{} for _ in groups]
        try:
            self._open()
            until = time.monotonic() + min(self.limits.start_timeout_s, max(self.time_left() - self.reserve_s, 1.0))
            for _, spec, process in members if self.has_gpu() else ():
                process.build(spec)
                if spec.variant.startswith(OURS):
                    with contextlib.suppress(EngineFailed):  # wait_ready meets the same failure and keeps its reason
                        seconds = process.wait_loaded(max(1.0, until - time.monotonic()))
                        print(f"{spec.variant} of {spec.slots} slots loaded after {seconds:.1f} s", flush=True)
            for index, spec, process in members:
                try:
                    if not self.has_gpu():
                        process.build(spec)
                    facts = process.wait_ready(max(1.0, until - time.monotonic()))
                    if spec.slots:
                        process.call("load_adapters", count=spec.slots, rank=spec.rank)
                except EngineFailed as err:
                    self.failure(f"start/{self.name}/s{spec.slots}", spec.variant, str(err))
                    process.close()
                    continue
                ready[index][spec.variant] = process
                print(f"{spec.variant} of {spec.slots} slots ready after {facts['ready_after_s']} s", flush=True)
                self._started_row(process)
            yield ready
        finally:
            for *_, process in members:
                process.close()

    def failure(self, case: str, variant: str, reason: str) -> None:
        print(f"FAILED {case} {variant}: {reason[-1500:]}", flush=True)
        kept = reason if len(reason) <= 600 else f"{reason[:250]} ... {reason[-350:]}"
        self.results.add_failure(case, variant, 0, kept.encode("ascii", "replace").decode())
        self.results.write()

    def _started_row(self, process: EngineProcess) -> None:
        facts = process.facts
        case = f"start/{self.name}/s{process.spec.slots}"
        kept = ("torch_reserved_bytes", "torch_peak_bytes", "kv_tokens", "features", "kinds", "fallbacks", "dispatch")
        told = {key: facts[key] for key in kept if key in facts}
        self.results.add(case, process.spec.variant, 0, [facts["ready_after_s"]], unit="s", side_by_side=True, **told)
        if "dispatch_s" in facts and not facts["dispatch_cached"]:
            case = f"dispatch_cold/{self.name}/s{process.spec.slots}"
            times = facts["dispatch_us"]
            self.results.add(case, process.spec.variant, 0, [facts["dispatch_s"]], unit="s", times_us=times)
        self.results.write()

    def add(
        self, case: str, process: EngineProcess, provider: str, M: int, values: Sequence[float], unit: str, **more: Any
    ) -> None:
        """One row: raw samples, the engine's settings, and why projections fell back if any did."""
        facts = process.call("facts")
        extra: dict[str, Any] = {"engine": process.spec.settings(), "rank": process.spec.rank, **more}
        if process.spec.variant.startswith(OURS):
            extra |= {"paths": facts["paths"], "fallbacks": facts.get("fallbacks", [])}
        self.results.add(case, provider, M, values, unit=unit, **extra)
        self.results.write()

    def in_rounds(
        self, engines: dict[str, EngineProcess], ask: Callable[[EngineProcess], list[float]], rounds: int, what: str
    ) -> dict[str, list[float]]:
        """variant -> samples; every round asks each engine once, in an order that reverses from round to round.

        An engine that fails is closed and taken out of `engines`; its samples are dropped, a row says why.
        """
        samples: dict[str, list[float]] = {variant: [] for variant in engines}
        for number in range(rounds):
            for variant in list(engines) if number % 2 == 0 else list(reversed(engines)):
                if self.time_left() <= 0:
                    print(f"out of time in round {number} of {what}", flush=True)
                    return {v: s for v, s in samples.items() if s}
                try:
                    samples[variant] += ask(engines[variant])
                except EngineFailed as err:
                    self.failure(what, variant, str(err))
                    engines.pop(variant).close()
                    del samples[variant]
        return {v: s for v, s in samples.items() if s}

    def measure(
        self,
        engines: dict[str, EngineProcess],
        ask: Callable[[EngineProcess], list[float]],
        case: str,
        M: int,
        unit: str,
        *,
        rounds: int = 0,
        rename: str = "{}",
        **more: Any,
    ) -> None:
        """Rounds of one question, one row an engine, the medians on the terminal."""
        samples = self.in_rounds(engines, ask, rounds or self.rounds, case)
        for variant, values in samples.items():
            self.add(case, engines[variant], rename.format(variant), M, values, unit, **more)
        line = ", ".join(f"{rename.format(v)} {sorted(s)[len(s) // 2]:.3f}" for v, s in samples.items())
        print(f"{case} [{unit}]: {line}", flush=True)

    def spec(self, slots: int, **changes: Any) -> EngineSpec:
        """The engine of a wave, as our variant."""
        limits = self.limits
        base = EngineSpec(
            model=self.model,
            variant=OURS,
            slots=slots,
            rank=limits.rank,
            max_model_len=limits.max_model_len,
            load_format="auto" if any(pathlib.Path(self.model).glob("*.safetensors")) else "dummy",
            gpu=self.gpu,
            tuned_folder=self.tuned_folder,
            gpu_memory_utilization=0.05,  # only a bound on free memory at start; kv_bytes sizes the cache
        )
        return replace(base, **changes)
