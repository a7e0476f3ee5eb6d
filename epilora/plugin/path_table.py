"""Timed dispatch: which path runs a projection of a given shape for a given number of tokens.

Every path that can run a shape is timed on the GPU that will serve, with the engine's own weights, slots and kernels, once
after loading and before the KV cache is sized:

- up to the largest captured batch size: replays of a graph that holds a chain of layers (each with weights of its own, so
  the L2 cache is as cold as in a forward pass, and with a small kernel between them, as a norm lies between in a model);
- above it: eager calls by the wall clock, *host time included*, since that is what such a step pays.

Both with one adapter and with as many as fit the batch; the path with the least product of the two times is kept. Numbers
of tokens are rounded up to a power of two. The table is kept on disk under a key of everything that could change it; ranks of
a tensor-parallel group take the first rank's.
"""

from __future__ import annotations

import bisect
import gc
import hashlib
import json
import logging
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.errors import TritonError

from epilora.errors import UnsupportedKernel

from . import gpu_ops
from .gpu_ops import Call, Mode, Path

logger = logging.getLogger(__name__)

CHAIN = 8  # layers of one shape in a timed chain
REPLAYS = 7
EAGER_SECONDS = 0.02  # of one eager measurement
BUDGET_SECONDS = 25.0  # for all shapes; what is left then keeps the default path

# What a path raises whose kernels do not compile or fit for a shape; anything else is a fault and ends the start.
CANNOT_RUN = (UnsupportedKernel, ValueError, TritonError)

Key = tuple[int, ...]


@dataclass
class PathTable:
    """choices: shape -> sorted [(tokens up to, path)]. times_us: shape -> tokens -> path -> us a projection (one adapter,
    all adapters)."""

    choices: dict[Key, list[tuple[int, Path]]] = field(default_factory=dict)
    times_us: dict[Key, dict[int, dict[str, list[float]]]] = field(default_factory=dict)

    def lookup(self, key: Key, M: int) -> Path | None:
        """The path for M tokens: that of the next larger timed number, of the largest beyond it; None for another shape."""
        rows = self.choices.get(key)
        if not rows:
            return None
        at = bisect.bisect_left(rows, M, key=lambda row: row[0])
        return rows[min(at, len(rows) - 1)][1]

    def to_json(self) -> str:
        return json.dumps(
            [
                {"shape": key, "choices": rows, "times_us": self.times_us.get(key, {})}
                for key, rows in self.choices.items()
            ]
        )

    @staticmethod
    def from_json(text: str) -> PathTable:
        table = PathTable()
        for entry in json.loads(text):
            key = tuple(entry["shape"])
            table.choices[key] = [(int(M), Path(path)) for M, path in entry["choices"]]
            table.times_us[key] = {int(M): times for M, times in entry["times_us"].items()}
        return table


_table = PathTable()


def lookup(key: Key, M: int) -> Path | None:
    """The installed table's path, None where it has none."""
    return _table.lookup(key, M)


def current() -> PathTable:
    """The installed table."""
    return _table


def install(table: PathTable) -> None:
    """Add a table's shapes to the installed one; equal shapes are replaced."""
    _table.choices.update(table.choices)
    _table.times_us.update(table.times_us)


# ---- which sizes ------------------------------------------------------------------------------------------------------


def token_counts(max_captured: int, max_tokens: int) -> tuple[list[int], list[int]]:
    """(sizes timed on graphs, sizes timed eagerly): powers of two that cover both ranges."""
    graphs = [1 << i for i in range(20) if (1 << i) < 2 * max_captured] if max_captured else []
    if graphs:
        graphs[-1] = min(graphs[-1], max(max_captured, 1))
    last = graphs[-1] if graphs else 0
    eager = [1 << i for i in range(20) if last < (1 << i) < 2 * max_tokens]
    if eager:
        eager[-1] = min(eager[-1], max_tokens)
    return graphs, [M for M in eager if last < M]


def worth_timing(call: Call, mode: Mode) -> list[Path]:
    """Candidates that the measured kernels leave open: the hybrid path never wins below 16 tokens, streams never at 8,192
    tokens by more than the noise, but both are timed wherever they come near."""
    found = gpu_ops.candidates(call, mode)
    if call.x.shape[0] < 8 and Path.DECODE in found:
        found = [path for path in found if path not in (Path.HYBRID, Path.HYBRID_STREAMS)]
    return found


# ---- measuring --------------------------------------------------------------------------------------------------------


def _spread(M: int, adapters: int, device: torch.device) -> torch.Tensor:
    """Slots of M tokens in `adapters` equal runs."""
    return (torch.arange(M, device=device) * adapters // max(M, 1)).to(torch.int32)


def graph_us(calls: Sequence[Call], path: Path, mode: Mode) -> float:
    """Microseconds a projection of one graph replay over `calls`, the kernel between them included."""

    def chain() -> None:
        for call in calls:
            torch.neg(call.x, out=call.x)
            gpu_ops.execute(path, call, mode)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def eager_us(calls: Sequence[Call], path: Path, mode: Mode) -> float:
    """Microseconds a projection of eager calls, by the wall clock."""
    for call in calls[:2]:
        gpu_ops.execute(path, call, mode)
    torch.cuda.synchronize()
    done, began = 0, time.perf_counter()
    while True:
        for call in calls:
            gpu_ops.execute(path, call, mode)
        done += len(calls)
        if time.perf_counter() - began >= EAGER_SECONDS / 2:
            break
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6 / done


Measure = Callable[[Sequence[Call], Path, Mode], float]
Prepare = Callable[[torch.Tensor], None]  # make a mapping (slot per token) the engine's current one


@dataclass(frozen=True)
class Problem:
    """Layers of one shape: their calls with x of any length, their mode, and how to install a mapping of slots."""

    calls: tuple[Call, ...]
    mode: Mode
    set_mapping: Prepare

    @property
    def key(self) -> Key:
        return self.calls[0].key

    def at(self, M: int) -> tuple[Call, ...]:
        """The calls with random activations of M tokens, quantised beforehand as vLLM's compiler does."""
        first = self.calls[0]
        x = torch.randn(M, first.weight.shape[0], device=first.x.device, dtype=first.x.dtype)
        codes = x_scale = None
        if first.codes is not None:
            codes, x_scale = gpu_ops.quantise(x)
        return tuple(replace(call, x=x, codes=codes, x_scale=x_scale) for call in self.calls)


def time_paths(
    problems: Sequence[Problem],
    graphs: Sequence[int],
    eager: Sequence[int],
    *,
    on_graph: Measure = graph_us,
    on_host: Measure = eager_us,
    budget_s: float = BUDGET_SECONDS,
) -> PathTable:
    """Time every open path of every shape and keep the fastest.

    graphs, eager: numbers of tokens to time on graph replays and eagerly. Stops when `budget_s` is spent; numbers of tokens
    not reached then have no entry of their own (the largest timed one serves; none: the default path).
    """
    table = PathTable()
    deadline = time.monotonic() + budget_s
    for measure, sizes in ((on_graph, graphs), (on_host, eager)):
        for M in sizes:
            for problem in problems:
                if time.monotonic() > deadline:
                    logger.warning("timed dispatch: %.0f s are spent; larger batches keep the default path", budget_s)
                    return table
                _time_one(table, problem, M, measure)
    return table


def _time_one(table: PathTable, problem: Problem, M: int, measure: Measure) -> None:
    calls = problem.at(M)
    L = calls[0].lora_a[0].shape[0]
    open_paths = worth_timing(calls[0], problem.mode)
    times: dict[str, list[float]] = {path.value: [] for path in open_paths}
    if len(open_paths) > 1:
        for adapters in sorted({1, min(M, L)}):
            problem.set_mapping(_spread(M, adapters, calls[0].x.device))
            for path in list(open_paths):
                try:
                    times[path.value].append(measure(calls, path, problem.mode))
                except CANNOT_RUN as err:
                    logger.warning(
                        "timed dispatch: %s cannot run %s with %d tokens: %s", path.value, problem.key, M, err
                    )
                    open_paths.remove(path)
                    del times[path.value]
        if not open_paths:
            raise UnsupportedKernel(f"no path runs {problem.key} with {M} tokens; see the log, or set path=stock")
    best = min(open_paths, key=lambda path: math.prod(times[path.value]))
    table.choices.setdefault(problem.key, []).append((M, best))
    table.times_us.setdefault(problem.key, {})[M] = times


# ---- at load ----------------------------------------------------------------------------------------------------------


def cache_folder() -> pathlib.Path:
    """Where tables are kept: EPILORA_CACHE, else epilora/ in the user's cache folder."""
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "epilora"
    return pathlib.Path(os.environ.get("EPILORA_CACHE") or default) / "paths"


def _sources_digest() -> str:
    folder = pathlib.Path(gpu_ops.__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("kernels/**/*"), *folder.glob("plugin/*.py")]):
        if path.suffix in (".py", ".cu", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_key(problems: Sequence[Problem], graphs: Sequence[int], eager: Sequence[int]) -> str:
    """Digest of everything that the times depend on: GPU, versions, our sources, shapes, modes, sizes, vLLM's tuned tables."""
    import triton
    import vllm

    device = problems[0].calls[0].x.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = [
        name, torch.__version__, triton.__version__, vllm.__version__, _sources_digest(),
        [(p.key, p.mode.pack(), p.calls[0].codes is not None, str(p.calls[0].x.dtype), p.calls[0].bias is not None) for p in problems],
        list(graphs), list(eager), os.environ.get("VLLM_TUNED_CONFIG_FOLDER", ""),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def warm_up(problems: Sequence[Problem], sizes: Sequence[int]) -> None:
    """Run each chosen path once for every size, so that nothing is compiled while requests wait."""
    for problem in problems:
        for M in sizes:
            call = problem.at(M)[0]
            problem.set_mapping(_spread(M, 1, call.x.device))
            gpu_ops.execute(gpu_ops.path_of(call, problem.mode), call, problem.mode)
            gpu_ops.base_linear(call, problem.mode)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prepare(
    problems: Sequence[Problem],
    graphs: Sequence[int],
    eager: Sequence[int],
    *,
    timed: bool,
    share: Callable[[Any], Any],
) -> dict[str, Any]:
    """Choose the paths of these layers: read the table from disk, or time them and write it; then run each once.

    share: gives every rank the first rank's value (it is called with None on the others). Returns timed_s, warm_up_s,
    cached (bool).
    """
    began = time.monotonic()
    path = cache_folder() / f"{cache_key(problems, graphs, eager)}.json"
    text = path.read_text() if timed and path.exists() else ""
    cached = bool(text)
    if timed and not text:
        text = time_paths(problems, graphs, eager).to_json()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(text)
        part.replace(path)
    text = share(text)
    if text:
        install(PathTable.from_json(text))
    timed_s = time.monotonic() - began
    warm_up(problems, [*graphs, *eager])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    result = {"timed_s": timed_s, "warm_up_s": time.monotonic() - began - timed_s, "cached": cached}
    logger.info("EpiLoRA paths: %s", json.dumps(result))
    return result
