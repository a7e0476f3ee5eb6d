"""The main job of the tests, and how it is cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, job_environment

from epilora.memory import descendants


@dataclass(frozen=True)
class MainJob:
    """The quickstart with `out` as its folder: the command, and how far it came."""

    out: Path
    port: int

    def command(self, *overrides: str) -> list[str]:
        settings = [
            f"out={self.out}/run",
            f"store.root={self.out}/store",
            f"router.port={self.port}",
            "rl.prompts_per_step=16",
            "rl.eval_problems=64",
            "tenant_baseline_s=1",
            "tenant_prompts=8",
        ]
        program = [sys.executable, "-m", "jobs.quickstart", "--config", "configs/quickstart_tiny.yaml"]
        return [*program, *settings, *overrides]

    def start(self, environment: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*overrides), cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def steps(self) -> int:
        path = self.out / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


@dataclass(frozen=True)
class Interrupted:
    """A main job after Ctrl-C. processes: how many there were; left: those still alive; files_left: in /dev/shm."""

    job: MainJob
    returncode: int
    output: str
    processes: int
    left: list[str]
    files_left: list[str]
    steps: int


def alive(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z":
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def interrupt(job: MainJob) -> Interrupted:
    """Start the job alone, send Ctrl-C after three steps, and look at what is left."""
    process = job.start(job_environment(), "rl.steps=1000")
    deadline = time.monotonic() + 300
    while job.steps() < 3:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tree = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    output, _ = process.communicate(timeout=90)
    deadline = time.monotonic() + 10  # what was told to stop may still be at it
    while (left := alive(tree)) and time.monotonic() < deadline:
        time.sleep(0.2)
    owned = {f"-{pid}-" for pid in tree}  # a base's file carries its engine's pid
    files_left = [f.name for f in Path("/dev/shm").glob("epilora*") if any(mark in f.name for mark in owned)]
    return Interrupted(job, process.returncode, output, len(tree), left, files_left, job.steps())
