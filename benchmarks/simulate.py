"""Router, store and placement at 1,000 GPUs and 100,000 adapters: the policies that run, simulated engines.

    python -m benchmarks.simulate [scale growth fairness gpu_hours real ...]

Parts, each of which replaces its rows in benchmarks/results/simulation.json:

  scale      1,000 engines, Zipf popularity, rising load and other arrangements of stores and routers
  growth     one engine at first; the scaling policy adds up to 32, one start (as measured) after the other
  fairness   three times as many requests as the places bear; ten of 100 tenants ask for half of them
  gpu_hours  engines that hold one adapter each (merged fine-tunes) for one hour of the same requests, kept up or let go when idle
  real       the real router and store on Ray Serve with stand-in engines of known step times, and the simulation of the same requests

Step times are of benchmarks/results/kernels_h200.json (see `MeasuredSteps`), loads into a slot and starts of an engine of
rl_h200.json and serving_h200.json. What no run measured is set here: ASSUMED.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

import numpy as np

from actors.scaling import ScalingLimits
from benchmarks.harness import commit_id, write_results
from benchmarks.serving.traces import read
from benchmarks.simulate_engine import RESULTS as FOLDER
from benchmarks.simulate_engine import LinearSteps, MeasuredSteps
from benchmarks.simulate_system import Request, Setup, System
from epilora.fairness.counters import jain, service
from epilora.model_facts import read_facts
from jobs.statistics import percentile

RESULTS = FOLDER / "simulation.json"
PARTS = ("scale", "growth", "fairness", "gpu_hours", "real")

# Nobody measured these: hardware as sold, and the way through one router of a quiet machine.
ASSUMED = {
    "host_bytes": 256 << 30,  # of each store's node for adapters
    "disk_bytes_s": 6e9,  # one NVMe drive
    "link_bytes_s": 25e9,  # 200 Gbit/s
    "before_s": 0.010,
    "after_s": 0.002,
    "gpu_bytes": 141e9,
}
RANK, ADAPTERS, TENANTS = 16, 100_000, 200
ADAPTER_BYTES = 4 * read_facts("", "qwen3-8b").adapter_parameters(RANK)  # fp32, as they travel
WARM_S = 4.0


def _rows(name: str, case: str) -> list[dict[str, Any]]:
    return [row for row in json.loads((FOLDER / name).read_text())["rows"] if row["case"].startswith(case)]


def load_s() -> float:
    """Median time of putting an adapter into a slot, from rl_h200.json (rank 64, handed over on the GPU)."""
    return statistics.median(ms for row in _rows("rl_h200.json", "publish/qwen3-8b") for ms in row["load_ms"]) / 1e3


def start_s() -> float:
    """Median time until an engine with our slots was up, from serving_h200.json."""
    rows = [row for row in _rows("serving_h200.json", "start/qwen3-8b") if row["provider"] == "epilora"]
    return statistics.median(second for row in rows for second in row["samples_s"])


def base_bytes() -> int:
    """Of the FP8 base, from rl_h200.json."""
    return max(row["base_bytes"] for row in _rows("rl_h200.json", "checksum/qwen3-8b"))


def gpu_setup(engines: int, **changes: Any) -> Setup:
    keys = ("host_bytes", "disk_bytes_s", "link_bytes_s", "before_s", "after_s")
    common = {key: ASSUMED[key] for key in keys} | {"load_s": load_s(), "adapter_bytes": ADAPTER_BYTES}
    return Setup(**{"engines": engines, "slots": 32, "seats": 64, "max_active": 64 * engines, **common, **changes})


def digest_of(adapter: int) -> str:
    return f"{adapter:064x}"


def zipf(adapters: int, exponent: float) -> np.ndarray:
    """Probability of each adapter, most asked-for first."""
    weights = 1.0 / np.arange(1, adapters + 1) ** exponent
    return weights / weights.sum()


def requests(
    *, seconds: float, rate: float, adapters: int, exponent: float, seed: int, tenants: int = TENANTS
) -> list[Request]:
    """Poisson arrivals, Zipf popularity, prompt and reply lengths of the wildchat trace. Adapter i is tenant i % tenants'."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    arrivals = np.sort(rng.uniform(0.0, seconds, count))
    chosen = rng.choice(adapters, count, p=zipf(adapters, exponent))
    lengths = [(prompt, tokens) for _, prompt, tokens, _ in read("wildchat", rate=1.0)]
    drawn = rng.integers(0, len(lengths), count)
    return [
        Request(float(at), f"t{adapter % tenants}", digest_of(int(adapter)), *lengths[which], f"{adapter:0128}")
        for at, adapter, which in zip(arrivals, chosen, drawn)
    ]


def counted(values: list[float]) -> list[list[float]]:
    """Milliseconds, rounded to one, and how many there were."""
    return [[ms, many] for ms, many in sorted(Counter(round(1e3 * value) for value in values).items())]


def outcome(asked: list[Request], system: System) -> dict[str, Any]:
    """What the rows of a simulated run keep: samples as [value, count], tiers, failures, the run's counters."""
    answered = [request for request in asked if request.ttft_s is not None]
    return {
        "requests": len(asked),
        "answered": len(answered),
        "failed": dict(Counter(request.failed for request in asked if request.failed)),
        "tiers": dict(Counter(request.tier for request in answered)),
        "ttft_ms_counts": counted([request.ttft_s for request in answered if request.ttft_s is not None]),
        "loads": sum(router.loads for router in system.routers),
        "stale": sum(router.stale for router in system.routers),
        "events": system.clock.events,
    }


def run_scale(name: str, *, rate: float, seconds: float, exponent: float = 1.0, **changes: Any) -> dict[str, Any]:
    began = time.perf_counter()
    setup = gpu_setup(1000, **changes)
    system = System(setup, MeasuredSteps())
    system.warm([digest_of(adapter) for adapter in range(ADAPTERS)])
    offered = requests(seconds=seconds, rate=rate, adapters=ADAPTERS, exponent=exponent, seed=7)
    system.offer(offered)
    system.run(seconds)
    asked = [request for request in offered if request.arrival_s >= WARM_S]
    # The last seconds' requests have not all been answered when the run ends; what is waiting longer than this is overload.
    asked = [request for request in asked if request.arrival_s < seconds - 2.0]
    return {
        "case": "scale", "name": name, "rate": rate, "seconds": seconds, "exponent": exponent, "adapters": ADAPTERS,
        "setup": vars(setup), **outcome(asked, system), "wall_s": time.perf_counter() - began,
    }  # fmt: skip


def scale() -> list[dict[str, Any]]:
    return [
        run_scale("as_built", rate=4000, seconds=12),
        run_scale("as_built_500_per_s", rate=500, seconds=60),
        run_scale("store_per_node", rate=4000, seconds=12, stores=0),
        run_scale("store_per_node_16_routers", rate=4000, seconds=12, stores=0, routers=16),
        run_scale("store_per_node_zipf_0.8", rate=4000, seconds=12, stores=0, exponent=0.8),
        run_scale("store_per_node_zipf_1.2", rate=4000, seconds=12, stores=0, exponent=1.2),
    ]


def growth() -> list[dict[str, Any]]:
    began, seconds, rate = time.perf_counter(), 3600.0, 12.0
    setup = gpu_setup(1, max_engines=32, start_s=start_s())
    system = System(setup, MeasuredSteps(), ScalingLimits(min_engines=1, max_engines=32))
    offered = requests(seconds=seconds, rate=rate, adapters=2000, exponent=1.0, seed=8)
    system.offer(offered)
    system.run(seconds)
    rows = []
    for start in range(0, 3600, 900):
        asked = [request for request in offered if start <= request.arrival_s < min(start + 900, seconds - 30)]
        rows.append(
            {"case": "growth", "from_s": start, "to_s": start + 900, "rate": rate, "adapters": 2000, "setup": vars(setup),
             **outcome(asked, system), "engines": system.engines_over_time, "engine_s": system.engine_s,
             "wall_s": time.perf_counter() - began}
        )  # fmt: skip
    return rows


def fairness() -> list[dict[str, Any]]:
    """Places for one request an engine. Light tenants together ask for half, each for a little more than its fair share."""
    rows, tenants, heavy, seconds = [], 100, 10, 14.0
    rng = np.random.default_rng(9)
    for fair in (True, False):
        began = time.perf_counter()
        setup = gpu_setup(1000, stores=0, max_active=1000, max_queue=100_000, fair=fair)
        system = System(setup, MeasuredSteps())
        system.warm([digest_of(adapter) for adapter in range(ADAPTERS)])
        offered = requests(seconds=seconds, rate=3000, adapters=ADAPTERS, exponent=1.0, seed=10)
        share = np.where(np.arange(tenants) < heavy, 0.5 / heavy, 0.5 / (tenants - heavy))
        for request, tenant in zip(offered, rng.choice(tenants, len(offered), p=share)):
            request.tenant = f"t{tenant}"
        system.offer(offered)
        system.run(seconds)
        served: Counter[str] = Counter({f"t{tenant}": 0 for tenant in range(tenants)})
        for request in offered:
            if request.done_s is not None and request.done_s >= WARM_S:
                served[request.tenant] += int(service(request.prompt, request.tokens))
        rows.append(
            {"case": "fairness", "turns": "virtual token counters" if fair else "first come, first served",
             "heavy_tenants": heavy, "places": 1000, "setup": vars(setup), "served_virtual_tokens": dict(served),
             **outcome(offered, system), "wall_s": time.perf_counter() - began}
        )  # fmt: skip
    return rows


def up_seconds(times: np.ndarray, adapters: np.ndarray, idle_s: float, seconds: float) -> tuple[float, int]:
    """Seconds that engines with one adapter each are up, and how many requests find theirs down.

    An engine is up from a request until nobody has asked for idle_s (the rule of actors/scaling.py, to_zero_s).
    times, adapters: of the requests, in order of time.
    """
    order = np.lexsort((times, adapters))
    at, whose = times[order], adapters[order]
    last = np.append(whose[1:] != whose[:-1], True)
    gap = np.where(last, seconds - at, np.append(at[1:], seconds) - at)
    cold = np.append(True, (whose[1:] != whose[:-1]) | (gap[:-1] >= idle_s))
    return float(np.minimum(gap, idle_s).sum()), int(cold.sum())


def gpu_hours() -> list[dict[str, Any]]:
    """One hour of the arrivals of `scale`, at each of its rates."""
    rows: list[dict[str, Any]] = []
    tokens = statistics.fmean(tokens for _, _, tokens, _ in read("wildchat", rate=1.0))
    per_engine = 64 / (tokens * MeasuredSteps().step_s(64, 1))  # requests a second of a full engine
    fit = int(0.95 * ASSUMED["gpu_bytes"] // base_bytes())
    for rate in (500.0, 4000.0):
        rng, seconds = np.random.default_rng(11), 3600.0
        count = rng.poisson(rate * seconds)
        times = np.sort(rng.uniform(0.0, seconds, count))
        adapters = rng.choice(ADAPTERS, count, p=zipf(ADAPTERS, 1.0))
        more = np.ceil(np.bincount(adapters, minlength=ADAPTERS) / seconds / per_engine) - 1
        extra_s = float(np.maximum(more, 0).sum()) * seconds
        for idle_s in (None, 1800.0, 300.0):
            up_s, cold = (ADAPTERS * seconds, 0) if idle_s is None else up_seconds(times, adapters, idle_s, seconds)
            rows.append(
                {"case": "gpu_hours", "rate": rate, "requests": count, "idle_s": idle_s, "engine_s": up_s + extra_s,
                 "cold_requests": cold, "ours_engine_s": 1000 * seconds, "merged_copies_per_gpu": fit,
                 "requests_per_s_of_an_engine": per_engine}
            )  # fmt: skip
    return rows


def real() -> list[dict[str, Any]]:
    """See simulate_real.py. The simulated requests are the ones the real router got, at the same times."""
    from benchmarks.simulate_real import SMALL, calls, measure

    rows, costs = measure()
    small = Setup(
        engines=SMALL.engines, slots=SMALL.slots, seats=SMALL.seats, load_s=SMALL.load_s, prompt_tokens=1 << 20,
        adapter_bytes=SMALL.adapter_bytes, host_bytes=SMALL.host_bytes, disk_bytes_s=1e12, link_bytes_s=1e12,
        before_s=costs["before_s"], after_s=costs["after_s"], load_extra_s=costs["load_extra_s"],
    )  # fmt: skip
    for seed in SMALL.seeds:
        system = System(small, LinearSteps(SMALL.base_s, SMALL.row_s))
        offered = [
            Request(call.at_s, call.tenant, digest_of(call.adapter), call.prompt_tokens, call.tokens, call.prompt)
            for call in calls(seed)
        ]
        system.routers[0].probed |= set(system.engines)  # by the calibration
        system.offer(offered)
        system.run(1e9)
        rows.append(
            {"case": "small", "provider": "simulated", "seed": seed, "setup": vars(small),
             "ttft_ms": [None if r.ttft_s is None else round(1e3 * r.ttft_s, 2) for r in offered],
             "failed": sum(1 for r in offered if r.failed), "slot_hits": sum(r.slot_hits for r in system.routers),
             "loads": sum(r.loads for r in system.routers), "stale": sum(r.stale for r in system.routers),
             "host_hits": sum(store.cache.hits for store in system.stores),
             "disk_reads": sum(store.cache.reads for store in system.stores)}
        )  # fmt: skip
    return rows


def of_counts(counts: list[list[float]], q: float) -> float:
    """Percentile of [value, count] pairs."""
    return percentile([value for value, many in counts for _ in range(int(many))], q)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows alone."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["case"] == "scale":
            name, total = row["name"], sum(row["tiers"].values())
            for tier in ("slot", "engine", "host", "disk"):
                found[f"{name}_hit_{tier}"] = row["tiers"].get(tier, 0) / total
            found[f"{name}_answered"] = row["answered"] / row["requests"]
            for q in (50, 99):
                found[f"{name}_ttft_p{q}_ms"] = of_counts(row["ttft_ms_counts"], q)
        if row["case"] == "growth":
            found[f"growth_{row['from_s']}s_ttft_p99_ms"] = of_counts(row["ttft_ms_counts"], 99)
            found["growth_engines_at_end"] = row["engines"][-1][1]
            found["growth_engine_hours"] = row["engine_s"] / 3600
        if row["case"] == "fairness":
            turns = "turns" if row["turns"].startswith("virtual") else "fifo"
            found[f"jain_{turns}"] = jain(list(row["served_virtual_tokens"].values()))
        if row["case"] == "gpu_hours":
            name = f"{row['rate']:.0f}_per_s_" + (f"idle_{row['idle_s']:.0f}s" if row["idle_s"] else "always_up")
            found[f"separate_gpu_hours_over_ours_{name}"] = row["engine_s"] / row["ours_engine_s"]
            found[f"packed_gpu_hours_over_ours_{name}"] = (
                row["engine_s"] / row["merged_copies_per_gpu"] / row["ours_engine_s"]
            )
            found[f"separate_cold_share_{name}"] = row["cold_requests"] / row["requests"]
    found |= compare(rows)
    return found


def compare(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Real against simulated, all seeds together."""
    found: dict[str, float] = {}
    for provider in ("real", "simulated"):
        mine = [row for row in rows if row["case"] == "small" and row["provider"] == provider]
        if not mine:
            return {}
        samples = [ms for row in mine for ms in row["ttft_ms"] if ms is not None]
        hits, loads = sum(row["slot_hits"] for row in mine), sum(row["loads"] for row in mine)
        host, disk = sum(row["host_hits"] for row in mine), sum(row["disk_reads"] for row in mine)
        found |= {
            f"{provider}_slot_hit_rate": hits / (hits + loads),
            f"{provider}_host_hit_rate": host / (host + disk),
            f"{provider}_ttft_p50_ms": percentile(samples, 50),
            f"{provider}_ttft_p99_ms": percentile(samples, 99),
        }
    for name in ("slot_hit_rate", "host_hit_rate", "ttft_p50_ms", "ttft_p99_ms"):
        found[f"simulated_over_real_{name}"] = found[f"simulated_{name}"] / found[f"real_{name}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    args = parser.parse_args()
    from benchmarks.quickstart_cpu import cpu_model

    run = {"commit": commit_id(), "date": time.strftime("%Y-%m-%d %H:%M")}
    cases = {"real": ("small", "calibration")}
    for part in args.parts:
        new = [{**row, **run, "load_1m": os.getloadavg()[0]} for row in globals()[part]()]
        kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        kept = [row for row in kept if row["case"] not in cases.get(part, (part,))] + new
        document = {
            "schema_version": 1,
            "command": " ".join(["python -m benchmarks.simulate", *sys.argv[1:]]),
            "commit": run["commit"],
            "gpu": "none; step times of an NVIDIA H200",
            "step_times": "benchmarks/results/kernels_h200.json",
            "assumed": ASSUMED,
            "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
            "versions": {name: version(name) for name in ("ray", "numpy")},
            "summary": summarise(kept),
        }
        write_results(RESULTS, document, kept)
        print(part, json.dumps(summarise(new), indent=1), flush=True)


if __name__ == "__main__":
    main()
