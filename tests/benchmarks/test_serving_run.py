"""One engine at a time in alternating order; engines that fail or are late leave a row, and the others go on."""

from __future__ import annotations

import pathlib
import time
from typing import ClassVar

import pytest

from benchmarks.harness import Results
from benchmarks.serving import run as run_module
from benchmarks.serving.driving import Request, run_trace, tokens_per_second
from benchmarks.serving.engines import NO_LORA, OURS, STOCK, EngineFailed, EngineSpec
from benchmarks.serving.run import TINY, Run
from benchmarks.serving.summary import summarise

calls: list[tuple[str, str]] = []


class Process:
    """An engine's process without an engine. late: never ready. broken: fails when it is asked."""

    late: ClassVar[set[str]] = set()
    broken: ClassVar[set[str]] = set()

    def __init__(self, spec: EngineSpec, work: pathlib.Path) -> None:
        self.spec, self.facts, self.closed = spec, {}, False

    def build(self, spec: EngineSpec) -> None:
        calls.append((spec.variant, "build"))

    def wait_loaded(self, timeout_s: float) -> float:
        calls.append((self.spec.variant, "loaded"))
        return 0.0

    def wait_ready(self, timeout_s: float) -> dict:
        if self.spec.variant in self.late:
            raise EngineFailed(f"engine {self.spec.variant}: no answer to start in {timeout_s:.0f} s")
        self.facts = {"ready_after_s": 1.0, "features": []}
        return self.facts

    def call(self, command: str, **arguments) -> object:
        calls.append((self.spec.variant, command))
        if command == "tpot" and self.spec.variant in self.broken:
            raise EngineFailed("out of memory")
        return {"paths": {}, "fallbacks": []} if command == "facts" else [4.0]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def benchmark_run(tmp_path, monkeypatch) -> Run:
    calls.clear()
    Process.late, Process.broken = set(), set()
    monkeypatch.setattr(run_module, "EngineProcess", Process)
    monkeypatch.setenv("EPILORA_COMMIT", "0" * 40)
    results = Results(tmp_path / "out.json", summarise, "test")
    return Run(
        model="m",
        variants=(OURS, STOCK[0], NO_LORA),
        tuned_folder="",
        out=tmp_path / "out.json",
        work=tmp_path,
        rounds=3,
        throughput_rounds=1,
        rates=(1.0,),
        requests=1,
        deadline=time.monotonic() + 100,
        reserve_s=10,
        limits=TINY,
        gpu=0,
        command="test",
        waves={},
        results=results,
    )


def asked() -> list[str]:
    return [variant for variant, command in calls if command == "tpot"]


def ask(process: Process) -> list[float]:
    return process.call("tpot")


def test_weights_are_read_where_the_model_has_some_and_drawn_where_not(benchmark_run, tmp_path):
    benchmark_run.model = str(tmp_path)
    assert benchmark_run.spec(2).load_format == "dummy"
    (tmp_path / "model.safetensors").touch()
    assert benchmark_run.spec(2).load_format == "auto"


def test_rounds_alternate_and_rows_hold_every_sample(benchmark_run):
    with benchmark_run.engines(benchmark_run.spec(2), (OURS, STOCK[0], NO_LORA)) as engines:
        benchmark_run.measure(engines, ask, "tpot/m/s2/b1", 1, "ms")
    order = [OURS, STOCK[0], NO_LORA]
    assert asked() == [*order, *reversed(order), *order]
    rows = [row for row in benchmark_run.results.rows if row["case"] == "tpot/m/s2/b1"]
    assert [(row["provider"], row["samples_ms"]) for row in rows] == [(v, [4.0] * 3) for v in order]
    assert [row["engine"]["slots"] for row in rows] == [2, 2, 0]


def test_ours_loads_alone_where_there_is_a_gpu(benchmark_run, monkeypatch):
    monkeypatch.setattr(Run, "has_gpu", lambda self: True)
    spec = benchmark_run.spec(2)
    with benchmark_run.fleet([(spec, (NO_LORA, OURS)), (spec, (STOCK[0], OURS))]) as (first, second):
        assert set(first) == {NO_LORA, OURS}
        assert set(second) == {STOCK[0], OURS}
    starts = [call for call in calls if call[1] in ("build", "loaded")]
    assert starts[:4] == [(OURS, "build"), (OURS, "loaded"), (OURS, "build"), (OURS, "loaded")]
    assert {call for call in starts[4:]} == {(NO_LORA, "build"), (STOCK[0], "build")}


def test_an_engine_that_breaks_leaves_a_row_and_the_others_go_on(benchmark_run):
    Process.broken = {STOCK[0]}
    with benchmark_run.engines(benchmark_run.spec(2), (OURS, STOCK[0])) as engines:
        benchmark_run.measure(engines, ask, "case", 1, "ms")
        assert set(engines) == {OURS}
    by_provider = {row["provider"]: row for row in benchmark_run.results.rows if row["case"] == "case"}
    assert by_provider[STOCK[0]]["failure"] == "out of memory"
    assert by_provider[OURS]["samples_ms"] == [4.0] * 3


def test_a_late_engine_is_dropped_before_the_time_kept_for_measuring(benchmark_run):
    Process.late = {STOCK[0]}
    with benchmark_run.engines(benchmark_run.spec(2), (OURS, STOCK[0])) as engines:
        assert set(engines) == {OURS}
    (row,) = [row for row in benchmark_run.results.rows if row.get("failure")]
    seconds = float(row["failure"].split(" in ")[1].removesuffix(" s"))
    assert 80 < seconds <= 90  # of 100, 10 kept


def test_nothing_starts_after_the_deadline(benchmark_run):
    benchmark_run.deadline = time.monotonic() - 1
    assert benchmark_run.in_rounds({OURS: Process(benchmark_run.spec(2), pathlib.Path())}, ask, 2, "case") == {}
    assert asked() == []


class Engine:
    """An LLMEngine that makes one token a step for every request, all of them ended after their length."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.steps = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list:
        self.steps += 1
        outputs = []
        for name in list(self.live):
            self.live[name] -= 1
            done = self.live[name] == 0
            piece = type("Piece", (), {"token_ids": [7]})
            outputs.append(type("Output", (), {"request_id": name, "outputs": [piece], "finished": done}))
            if done:
                del self.live[name]
        return outputs


def test_a_trace_is_served_by_the_clock(monkeypatch):
    engine = Engine()

    def add(engine: Engine, request: Request) -> str:
        name = f"r{len(added)}"
        added.append(time.perf_counter())
        engine.live[name] = request.new_tokens
        return name

    added: list[float] = []
    monkeypatch.setattr("benchmarks.serving.driving.add_request", add)
    began = time.perf_counter()
    timings = run_trace(engine, [Request((1,), 3, arrival_s=0.5), Request((1,), 2), Request((1,), 1, arrival_s=0.5)])
    assert added[0] - began < 0.5  # the second request of the list arrives first
    assert added[1] - began >= 0.5
    assert [t.tokens for t in timings] == [3, 2, 1]
    assert timings[0].ttft_ms < 500  # from its arrival, not from the start
    assert timings[2].tpot_ms is None
    assert engine.steps == 5  # two alone, then three with the others together
    assert tokens_per_second(timings) == pytest.approx(6 / (timings[0].last_s - timings[1].arrival_s))
