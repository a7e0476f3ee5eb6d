"""What dies, what tenants and an RL job notice of it, and for how long: a seeded campaign of killed processes.

    python -m benchmarks.faults_cpu --work runs/faults --setting stand-in --seconds 420 [--resume]
    python -m benchmarks.faults_cpu --work runs/faults --setting vllm --seconds 420 [--resume]
    python -m benchmarks.faults_cpu --work runs/faults --reference --seconds 420      # the RL run without faults
    python -m benchmarks.faults_cpu --work runs/faults --finish                       # results file and docs/faults.md

A call with a setting starts a cluster with GCS fault tolerance on a Redis of its own, injects the setting's next faults
(benchmarks/faults/plan.py) until its time is up, and writes each row to WORK/SETTING.json as it is measured. `--resume` goes on where
the last call ended. Recovery is polled every 50 ms; the next fault follows at once. `--finish` puts the rows together, looks for every
version that the store ever confirmed, and compares the RL run with the one without faults.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors import proxy
from benchmarks.faults.plan import KINDS, STAND_IN, VLLM, plan
from benchmarks.harness import Results, command_line

RESULTS = Path(__file__).resolve().parent / "results" / "faults_cpu.json"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    **proxy.ENVIRONMENT,
    "PYTHONPATH": str(RESULTS.parents[2]),
}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The campaign's figures from its rows.

    leaks: faults after which a placement group, a GPU or an actor was held that should not be. files_left: those after which a dead
    engine's file was still in shared memory. resumed_bit_equal: 1, 0, or None if no RL run was compared.
    """
    faults = [row for row in rows if row["case"] == "fault"]
    kept = [row for row in rows if row["case"] == "versions"]
    compared = [row for row in rows if row["case"] == "resumed"]

    def total(key: str, among: Iterable[dict[str, Any]] = faults) -> int:
        return sum(row.get(key, 0) or 0 for row in among)

    by_kind = {}
    for kind in KINDS:
        for setting in (STAND_IN, VLLM):
            of_kind = [row for row in faults if (row["kind"], row["setting"]) == (kind, setting)]
            if not of_kind:
                continue
            seconds = sorted(row["recovery_s"] for row in of_kind)
            slowest = [row["slowest_request_s"] for row in of_kind if "slowest_request_s" in row]
            by_kind[f"{kind} ({setting})"] = {
                "faults": len(of_kind),
                "in_flight": sum(_in_flight(row) for row in of_kind),
                "not_recovered": sum(row["outcome"] != "recovered" for row in of_kind),
                "recovery_s_p50": statistics.median(seconds),
                "recovery_s_max": seconds[-1],
                **({"slowest_request_s_p50": statistics.median(slowest)} if slowest else {}),
                **({"slowest_request_s_max": max(slowest)} if slowest else {}),
                "requests": total("requests", of_kind),
                "asked_again": total("asked_again", of_kind),
                "failed_requests": total("failed_requests", of_kind),
                "cut_streams": total("cut_streams", of_kind),
                "steps_lost": total("steps_lost", of_kind),
            }
    return {
        "faults": len(faults),
        "in_flight": sum(_in_flight(row) for row in faults),
        "not_recovered": sum(row["outcome"] != "recovered" for row in faults),
        "requests": total("requests"),
        "asked_again": total("asked_again"),
        "failed_requests": total("failed_requests"),
        "wrong_answers": total("wrong_answers"),
        "cut_streams": total("cut_streams"),
        "cut_without_event": total("cut_without_event"),
        "publishes_failed": total("publishes_failed"),
        "acknowledged_versions": total("acknowledged", kept),
        "lost_versions": total("lost", kept),
        "leaks": sum(any(not _is_file(leak) for leak in row["leaks"]) for row in faults),
        "files_left": sum(any(map(_is_file, row["leaks"])) for row in faults),
        "steps_lost": total("steps_lost"),
        "resumed_bit_equal": int(all(row["steps"] and not row["differing"] for row in compared)) if compared else None,
        "by_kind": by_kind,
    }


def _is_file(leak: str) -> bool:
    return leak.startswith("shared files")


def _in_flight(row: dict[str, Any]) -> bool:
    """Whether an RL step, a publish or a stream was under way."""
    seen = row["in_flight"]
    return bool(seen.get("rl_steps") or seen.get("publishes") or seen.get("streams"))


class Campaign:
    """One setting. work: folder of what outlives a call (rows, acknowledged versions, the stores, the RL run).

    Raises SystemExit if the setting has rows already and `resume` is not set.
    """

    def __init__(self, work: Path, setting: str, *, resume: bool) -> None:
        work.mkdir(parents=True, exist_ok=True)
        path = rows_path(work, setting)
        if path.exists() and not resume:
            raise SystemExit(f"{path} exists; --resume goes on with it, or move it away")
        self.work, self.setting = work, setting
        self.results = Results(path, summarise, command_line("python -m benchmarks.faults_cpu", sys.argv[1:]))

    def done(self) -> set[int]:
        return {row["index"] for row in self.results.rows}

    def acknowledge(self, version: Any) -> None:
        """Keep what the store confirmed, outside of the store."""
        with acknowledged_path(self.work).open("a") as sink:
            sink.write(json.dumps({"ref": version.ref, "digest": version.digest}) + "\n")

    def run(self, inject: Callable[[Any], dict[str, Any]], until_s: float) -> None:
        """The setting's faults that are not done yet, until the time is up."""
        done, planned = self.done(), plan(self.setting)
        for fault in planned:
            if fault.index in done:
                continue
            if time.monotonic() > until_s:
                return
            row = inject(fault)
            row["load"] = round(os.getloadavg()[0], 2)
            self.results.rows.append({"case": "fault", **row, "run_id": self.results.run_id})
            self.results.write()
            print(f"{self.setting} {len(self.done())}/{len(planned)}: {brief(row)}", flush=True)
            if row["outcome"] != "recovered":
                raise SystemExit(
                    "not recovered: this call ends here; --resume goes on with the next fault on a new cluster"
                )


def rows_path(work: Path, setting: str) -> Path:
    return work / f"{setting}.json"


def acknowledged_path(work: Path) -> Path:
    return work / "acknowledged.jsonl"


def check_versions(work: Path) -> dict[str, Any]:
    """Look for every version that the store ever confirmed, with its tensors: a row."""
    from epilora.errors import AdapterNotFound, AdapterRejected
    from epilora.store import AdapterStore

    store = AdapterStore(work / "store")
    told = [json.loads(line) for line in acknowledged_path(work).read_text().splitlines()]
    lost = []
    for version in told:
        try:
            if store.resolve(version["ref"]).digest != version["digest"] or not store.tensors(version["digest"]):
                lost.append(version["ref"])
        except (AdapterNotFound, AdapterRejected, OSError):
            lost.append(version["ref"])
    return {"case": "versions", "acknowledged": len(told), "lost": len(lost), "lost_refs": lost[:20]}


def compare_runs(work: Path) -> dict[str, Any]:
    """Checkpoints of the RL run with faults and of the one without, byte by byte: a row."""
    from benchmarks.faults.rl_job import checkpoint_digests

    faulted, whole = (checkpoint_digests(work / name) for name in ("rl", "rl-whole"))
    shared = sorted(faulted.keys() & whole.keys())
    differing = [step for step in shared if faulted[step] != whole[step]]
    return {"case": "resumed", "steps": len(shared), "faulted_steps": max(faulted), "differing": differing[:20]}


def finish(work: Path, path: Path) -> None:
    """Write the results file and the page from what the calls left in `work`; a setting that was not run is left out."""
    from benchmarks.faults import report

    path.unlink(missing_ok=True)
    results = Results(path, summarise, command_line("python -m benchmarks.faults_cpu", sys.argv[1:]))
    for setting in (STAND_IN, VLLM):
        if not rows_path(work, setting).exists():
            continue
        kept = json.loads(rows_path(work, setting).read_text())
        results.rows += kept["rows"]
        results.runs += kept["runs"]
    whole = [compare_runs(work)] if (work / "rl-whole").exists() else []
    for row in (check_versions(work), *whole):
        results.rows.append({**row, "run_id": results.run_id})
        print(row)
    results.write()
    report.write(json.loads(path.read_text()))


def brief(row: dict[str, Any]) -> str:
    """One line for whoever watches."""
    keys = (
        "kind",
        "activity",
        "victim",
        "outcome",
        "recovery_s",
        "slowest_request_s",
        "failed_requests",
        "cut_streams",
    )
    return " ".join(f"{key}={row[key]}" for key in (*keys, "cut_without_event", "steps_lost", "leaks") if key in row)


@contextmanager
def short_folder() -> Iterator[Path]:
    """Ray's socket paths end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fa-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run_stand_in(campaign: Campaign, until_s: float) -> None:
    from benchmarks.faults.cluster import FaultCluster
    from benchmarks.faults.stand_in import API_KEY, NODES, StandIn
    from benchmarks.faults.tenants import Tenants

    with short_folder() as folder, FaultCluster(folder, nodes=NODES) as ray_cluster:
        system = StandIn(ray_cluster, campaign.work, campaign.acknowledge)
        with Tenants(system.url, API_KEY, system.adapters) as tenants:
            campaign.run(lambda fault: system.inject(fault, tenants), until_s)


def run_vllm(campaign: Campaign, until_s: float) -> None:
    from benchmarks.faults.cluster import FaultCluster
    from benchmarks.faults.rl_job import RLJob

    with short_folder() as folder, FaultCluster(folder, nodes=()) as ray_cluster:
        job = RLJob(ray_cluster, campaign.work)
        try:
            campaign.run(job.inject, until_s)
        finally:
            job.stop()


def run_reference(work: Path, seconds: float) -> None:
    """The RL run without faults, as far as the one with faults came (or as far as the time lasts; call again)."""
    from benchmarks.faults.rl_job import checkpoint_digests, command

    steps = max(checkpoint_digests(work / "rl"))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command(work / "rl-whole", work / "rl-whole-store", f"rl.steps={steps}"), env=environment
    )
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder kept from call to call")
    parser.add_argument("--setting", choices=(STAND_IN, VLLM))
    parser.add_argument("--seconds", type=float, default=420.0, help="no fault is begun after so long")
    parser.add_argument("--resume", action="store_true", help="go on after the setting's last row")
    parser.add_argument("--reference", action="store_true", help="run the RL job without faults")
    parser.add_argument("--finish", action="store_true", help="write the results file and the page")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    started_s = time.monotonic()
    os.environ.update(ENVIRONMENT)
    work = args.work.resolve()
    if args.finish:
        finish(work, args.results)
    elif args.reference:
        run_reference(work, args.seconds)
    elif args.setting is None:
        parser.error("one of --setting, --reference and --finish is needed")
    else:
        logging.getLogger("ray").setLevel(logging.ERROR)
        run = run_stand_in if args.setting == STAND_IN else run_vllm
        run(Campaign(work, args.setting, resume=args.resume), started_s + args.seconds)


if __name__ == "__main__":
    main()
