"""A simulated engine: continuous batching with known step times, the real slot map, and no tokens.

One step takes in waiting prompts (up to `seats` rows and `prompt_tokens` of them) and gives every row one token; loads run between
steps and nothing else runs meanwhile, as in the engine's step thread (epilora/plugin/step_thread.py). Steps between two changes of
the batch take equal time, so only the changes are events.

Left out: KV cache size and preemption, prefix hits (a prompt is computed whole), rollouts.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from epilora.adapters.slots import SlotMap
from epilora.errors import NoFreeSlot

RESULTS = Path(__file__).resolve().parent / "results"
Call = Callable[..., None]


class Clock:
    """Simulated time and what happens when. Equal times keep their order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._events: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, call: Call, *args: Any) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._order), call, args))

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is left to do, or until `until_s`."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, call, args = heapq.heappop(self._events)
            self.events += 1
            call(*args)


class StepTimes(Protocol):
    def step_s(self, rows: int, adapters: int) -> float:
        """Seconds of one step over `rows` tokens that use `adapters` different adapters."""
        ...


@dataclass(frozen=True)
class LinearSteps:
    """base_s + rows * row_s: what the stand-in engine of a real run sleeps."""

    base_s: float
    row_s: float

    def step_s(self, rows: int, adapters: int) -> float:
        return self.base_s + rows * self.row_s


class MeasuredSteps:
    """Decode layers of Qwen3-8B with rank-64 adapters on an H200, from benchmarks/results/kernels_h200.json.

    layers * (time of one layer's four projections at `rows` tokens with 1 adapter + what more adapters cost). In between, linear
    in the measured points: with one adapter at 1 to 2,048 tokens; more of them at 32 tokens with 8 and 32, and with 32 adapters
    at 64 to 2,048 tokens. Attention, norms, sampling and the language-model head were not measured and are not in it.
    """

    def __init__(self, path: Path = RESULTS / "kernels_h200.json", layers: int = 36) -> None:
        rows = json.loads(path.read_text())["rows"]

        def us(tokens: int, adapters: int) -> float:
            found = [
                statistics.median(row["samples_us"])
                for row in rows
                if row["provider"] == "epilora"
                and row["M"] == tokens
                and row["case"] in (f"layer/qwen3-8b/r64/a{adapters}/s8", f"layer/qwen3-8b/r64/a{adapters}/s32")
                and row.get("samples_us")
            ]
            return statistics.median(found)

        self._one = [(tokens, us(tokens, 1)) for tokens in (1, 4, 8, 16, 32, 64, 512, 2048)]
        one = self._one_us
        self._extra = [(1, 0.0), *((tokens, us(tokens, 32) - one(tokens)) for tokens in (32, 64, 128, 256, 512, 2048))]
        most = us(32, 32) - us(32, 1)
        self._share = [(1, 0.0), (8, (us(32, 8) - us(32, 1)) / most), (32, 1.0)]
        self._layers = layers
        self._known: dict[tuple[int, int], float] = {}

    def _one_us(self, tokens: int) -> float:
        return _between(self._one, tokens)

    def step_s(self, rows: int, adapters: int) -> float:
        key = (rows, adapters)
        if key not in self._known:
            extra = max(0.0, _between(self._extra, rows)) * _between(self._share, min(adapters, 32))
            self._known[key] = self._layers * (self._one_us(rows) + extra) * 1e-6
        return self._known[key]


def _between(points: list[tuple[int, float]], at: int) -> float:
    """Linear between points; before the first its value, past the last along the last two."""
    if at <= points[0][0]:
        return points[0][1]
    place = min(bisect_right(points, at, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(eq=False)
class Sequence:
    """One request in an engine. prompt, tokens: lengths; digest: its adapter's, None for the base."""

    prompt: int
    tokens: int
    digest: str | None
    on_first: Call
    on_done: Call


@dataclass
class Engine:
    """seats: rows in the batch; prompt_tokens: prompts taken in by one step; load_s: how long a load stops the steps."""

    clock: Clock
    times: StepTimes
    slots: SlotMap
    seats: int
    prompt_tokens: int
    load_s: float
    node: int = 0
    waiting: deque[Sequence] = field(default_factory=deque)
    rows: int = 0
    _live: list[tuple[int, int, Sequence]] = field(default_factory=list)  # by the step that is their last
    _loads: deque[tuple[str, Call]] = field(default_factory=deque)
    _adapters: Counter[str] = field(default_factory=Counter)
    _order: Any = field(default_factory=itertools.count)
    _steps: int = 0
    _since_s: float = 0.0  # when step `_steps` began, if the batch only decodes
    _step_s: float = 0.0
    _taken: list[Sequence] = field(default_factory=list)  # prompts in the running step
    _busy: bool = False  # a step with prompts or a load runs; its end is an event
    _epoch: int = 0

    @property
    def idle(self) -> bool:
        return not (self.rows or self.waiting or self._loads or self._busy)

    def submit(self, sequence: Sequence) -> None:
        """Raises AdapterNotFound if its adapter is not in a slot."""
        if sequence.digest is not None:
            self.slots.acquire(sequence.digest)
        self.waiting.append(sequence)
        self._wake()

    def load(self, digest: str, done: Callable[[NoFreeSlot | None], None]) -> None:
        """Put a version into a slot between two steps; `done` is called with the error, or None."""
        self._loads.append((digest, done))
        self._wake()

    def _wake(self) -> None:
        """Something waits: the next boundary between steps is an event."""
        if self._busy:
            return
        passed = math.ceil((self.clock.now_s - self._since_s) / self._step_s - 1e-9) if self._live else 0
        self._next(self._since_s + passed * self._step_s if self._live else self.clock.now_s)

    def _next(self, time_s: float) -> None:
        self._epoch += 1
        self.clock.at(time_s, self._boundary, self._epoch)

    def _boundary(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now = self.clock.now_s
        if self._taken:
            self._steps += 1
        elif self._live and not self._busy:
            self._steps += round((now - self._since_s) / self._step_s)
        taken, self._taken, self._busy = self._taken, [], False
        for sequence in taken:
            heapq.heappush(self._live, (self._steps + sequence.tokens - 1, next(self._order), sequence))
        while self._live and self._live[0][0] <= self._steps:
            self._end(heapq.heappop(self._live)[2])
        self._since_s = now
        if self._loads:
            self._run_loads()
        elif not self._take_in() and self._live:
            self._step_s = self.times.step_s(self.rows, len(self._adapters))
            self._next(now + (self._live[0][0] - self._steps) * self._step_s)
        for sequence in taken:
            sequence.on_first()

    def _end(self, sequence: Sequence) -> None:
        self.rows -= 1
        digest = sequence.digest
        if digest is not None:
            self.slots.release(digest)
            self._adapters[digest] -= 1
            if not self._adapters[digest]:
                del self._adapters[digest]
        self.clock.at(self.clock.now_s, sequence.on_done)

    def _run_loads(self) -> None:
        end = self.clock.now_s
        while self._loads:
            digest, done = self._loads.popleft()
            error = None
            try:
                int_id, _ = self.slots.reserve(digest)
                if int_id is not None:
                    self.slots.commit(digest, int_id)
                    end += self.load_s
            except NoFreeSlot as err:
                error = err
            self.clock.at(end, done, error)
        self._busy = True
        self._next(end)

    def _take_in(self) -> bool:
        """Start a step with as many waiting prompts as may enter; False if none may."""
        tokens = 0
        while (
            self.waiting
            and self.rows < self.seats
            and (not tokens or tokens + self.waiting[0].prompt <= self.prompt_tokens)
        ):
            sequence = self.waiting.popleft()
            tokens += sequence.prompt
            self.rows += 1
            if sequence.digest is not None:
                self._adapters[sequence.digest] += 1
            self._taken.append(sequence)
        if not self._taken:
            return False
        self._busy = True
        decoding = self.rows - len(self._taken)
        self._next(self.clock.now_s + self.times.step_s(decoding + tokens, len(self._adapters)))
        return True
