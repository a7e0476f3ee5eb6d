"""Run the tests in parts side by side and say what each part took; `make test` and `make test-full` are this.

    python scripts/run_tests.py [--slow] [--part NAME] [--record FILE] [pytest arguments]

Two lanes, one for what computes and one for what waits: jobs and actors wait a lot for clusters and engines to start. Parts are
processes of their own, because Triton's interpreter is switched on for a whole process. `--record` writes counts and seconds to
FILE, by part and by folder of tests, with the command, the commit and the machine. Exit status 1 if a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "kernels": ["tests/kernels", "tests/quant"],
    "jobs": ["tests/jobs"],
    "actors": ["tests/actors"],
    "main": ["tests/plugin", "tests/adapters", "tests/trainer", "tests/tasks", "tests/config"],
}
PARTS["rest"] = [f"--ignore={folder}" for folders in PARTS.values() for folder in folders]
# Lanes run side by side, a lane's parts one after another: both of the second start Ray clusters, whose nodes have 30 s to come up.
LANES = (("kernels", "main", "rest"), ("jobs", "actors"))
OUTCOMES = ("failure", "error", "skipped")


def run_part(name: str, where: list[str], marks: str, extra: list[str], reports: Path) -> tuple[int, float]:
    """(exit status, wall seconds) of one pytest process; its lines are printed with the part's name before them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        marks,
        "--durations=12",
        f"--junitxml={reports}/{name}.xml",
        *where,
    ]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, *extra], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name:>8} | {line}", end="", flush=True)
    return process.wait(), time.monotonic() - start


def counts(report: Path) -> dict[str, dict[str, float]]:
    """Folder below tests/ (or the file's name) -> tests, seconds and outcomes, from one JUnit report."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for case in ElementTree.parse(report).iter("testcase"):
        where = case.get("classname", "").removeprefix("tests.").split(".")[0] or "?"
        outcome = next((o for o in OUTCOMES if case.find(o) is not None), "passed")
        found[where]["tests"] += 1
        found[where][outcome] += 1
        found[where]["seconds"] = round(found[where]["seconds"] + float(case.get("time", 0)), 2)
    return {where: dict(values) for where, values in sorted(found.items())}


def record(
    results: dict[str, tuple[int, float]], wall_s: float, reports: Path, marks: str, command: str
) -> dict[str, Any]:
    """What `--record` writes. cpu_s: of the test processes and what they waited for; Ray's daemons are not in it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {name: counts(reports / f"{name}.xml") for name in results}
    used = os.times()
    parts = {}
    for name, (status, seconds) in results.items():
        total = {key: sum(f.get(key, 0) for f in folders[name].values()) for key in ("tests", "passed", *OUTCOMES)}
        parts[name] = {"exit_status": status, "wall_s": round(seconds, 1), **total, "folders": folders[name]}
    return {
        "command": command,
        "marks": marks,
        "commit": commit.stdout.strip(),
        "changed_files": len(changed.stdout.splitlines()),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": round(LOAD[0], 1)},
        "wall_s": round(wall_s, 1),
        "cpu_s": round(used.children_user + used.children_system, 1),
        "tests": sum(part["tests"] for part in parts.values()),
        "passed": sum(part["passed"] for part in parts.values()),
        "parts": parts,
    }  # fmt: skip


LOAD = os.getloadavg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given again")
    parser.add_argument("--record", type=Path, help="results file to write")
    args, extra = parser.parse_known_args()
    marks = "not gpu" if args.slow else "not slow and not gpu"
    reports = ROOT / "runs" / "tests"
    reports.mkdir(parents=True, exist_ok=True)
    results: dict[str, tuple[int, float]] = {}

    def in_turn(lane: tuple[str, ...]) -> None:
        for name in lane:
            if not args.part or name in args.part:
                results[name] = run_part(name, PARTS[name], marks, extra, reports)

    start = time.monotonic()
    threads = [threading.Thread(target=in_turn, args=(lane,)) for lane in LANES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.monotonic() - start
    for name, (status, seconds) in results.items():
        print(f"{name:>8} : {seconds:6.0f} s, {'passed' if status == 0 else f'FAILED (pytest exit status {status})'}")
    print(f"{'all':>8} : {wall_s:6.0f} s")
    if args.record:
        document = record(results, wall_s, reports, marks, " ".join(["python scripts/run_tests.py", *sys.argv[1:]]))
        args.record.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(status for status, _ in results.values()))


if __name__ == "__main__":
    main()
