"""The "vllm" setting: one deterministic RL job on the real engine and trainer that goes on through every fault.

The job's loop makes no pauses: a step (sampling, training, publishing or saving) is under way whenever something is killed. It keeps
every checkpoint, so that a run without faults can be compared with it step by step, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.adapter_store import NAMESPACE
from benchmarks.faults import cluster as c
from benchmarks.faults.plan import VLLM, Fault
from benchmarks.faults.stand_in import HEAD_AWAY_S, LEAK_S, holds

ROOT = Path(__file__).resolve().parents[2]
NAME, BASE, TRAINER = "faulted", "faulted-engine", "faulted-trainer"
START_S, RECOVER_S = 300.0, 180.0
STEPS = 100_000  # it is stopped, not finished


def command(out: Path, store: Path, *overrides: str) -> list[str]:
    """The job, or its counterpart without faults under another `out` and `store`."""
    settings = [
        f"out={out}",
        f"store.root={store}",
        f"name={NAME}",
        f"engine.name={BASE}",
        f"trainer.name={TRAINER}",
        "deterministic=true",
        "resume=true",
        "rl.prompts_per_step=16",
        "rl.group_size=4",
        "rl.eval_problems=16",
        f"rl.keep_checkpoints={STEPS}",
    ]
    return [sys.executable, "-m", "jobs.rl", "--config", str(ROOT / "configs/rl_small.yaml"), *settings, *overrides]


class RLJob:
    """The job on `ray_cluster`, its files in `folder` (kept from call to call: it goes on where an earlier one ended)."""

    def __init__(self, ray_cluster: c.FaultCluster, folder: Path) -> None:
        self.cluster, self.out, self._store = ray_cluster, folder / "rl", folder / "rl-store"
        self._log = (folder / "rl.log").open("ab")
        environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
        before = len(self.lines())
        self._process = subprocess.Popen(
            command(self.out, self._store, f"rl.steps={STEPS}"),
            cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._wait_for_step(before + 1, START_S)

    def stop(self) -> None:
        """End the job as Ctrl-C does; the last checkpoint stays."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(timeout=60)
        self._log.close()

    def lines(self) -> list[int]:
        """Steps the job recorded, in the order it did; a repeated one is there twice."""
        path = self.out / "metrics.jsonl"
        if not path.exists():
            return []
        whole = [line for line in path.read_text().split("\n")[:-1] if line]
        return [int(json.loads(line)["step"]) for line in whole]

    def _wait_for_step(self, lines: int, seconds: float) -> None:
        def there() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the RL job ended with status {self._process.returncode}; see its log")
            return len(self.lines()) >= lines

        c.wait_for(there, f"line {lines} of the RL job's metrics", seconds)

    def leaks(self) -> list[str]:
        """What is held beyond the one base's bundle, or missing of it; files of dead engines in shared memory."""
        found = []
        if c.bundles() != [f"base-{BASE}"]:
            found.append(f"placement groups {c.bundles()}")
        names = [row["Name"] for row in c.actors() if row["ActorClassName"] in ("EngineActor", "TrainerActor")]
        if sorted(names) != sorted([BASE, TRAINER]):
            found.append(f"engine and trainer actors {sorted(names)}")
        files = [path.name for path in Path("/dev/shm").glob(f"epilora-base-{BASE}-*")]
        if len(files) != 1:
            found.append(f"shared files {files}")
        return found

    def _kill(self, fault: Fault) -> tuple[str, int, Callable[[], bool]]:
        if fault.kind == "head":
            pid = self.cluster.kill_head(HEAD_AWAY_S)
            return "gcs_server", pid, lambda: bool(ray.get(_named("pool").status.remote(), timeout=10))
        name = {"engine": BASE, "trainer": TRAINER}.get(fault.kind, fault.kind)
        row = c.wait_for(lambda: (r := c.actor(name)) and r["State"] == "ALIVE" and r["Pid"] and r, f"actor {name}")
        pid = int(row["Pid"])
        os.kill(pid, signal.SIGKILL)
        return name, pid, lambda: bool(ray.get(_named(name).pid.remote(), timeout=10) != pid)

    def inject(self, fault: Fault) -> dict[str, Any]:
        """One fault while a step is under way, until the job has completed a step after it; its row."""
        rng = random.Random(f"{fault.setting}/{fault.index}")
        self._wait_for_step(len(self.lines()) + 1, RECOVER_S)
        time.sleep(rng.uniform(0.0, 0.7))
        lines = self.lines()
        killed_s = time.monotonic()
        victim, pid, back = self._kill(fault)
        outcome = "recovered"
        try:
            c.wait_for(lambda: holds(back), f"{victim} to be back", RECOVER_S)
            # The line after the next one: the step under way may have been complete already.
            self._wait_for_step(len(lines) + 2, RECOVER_S)
        except (TimeoutError, RuntimeError) as err:
            outcome = str(err)
        recovered_s = time.monotonic()
        after = self.lines()[len(lines) :]
        try:
            c.wait_for(lambda: holds(lambda: not self.leaks()), "nothing to be leaked", LEAK_S)
            leaked: list[str] = []
        except TimeoutError:
            leaked = self.leaks()
        done = lines[-1]
        return {
            "setting": VLLM,
            "index": fault.index,
            "kind": fault.kind,
            "engine": "vllm, tiny-arith",
            "activity": fault.activity,
            "in_flight": {"rl_steps": 1},
            "victim": victim,
            "pid": pid,
            "outcome": outcome,
            "recovery_s": round(recovered_s - killed_s, 3),
            "steps_done": done,
            "steps_after": after[:4],
            "steps_lost": max(0, done - min(after)) if after else None,
            "leaks": leaked,
        }


def _named(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def checkpoint_digests(out: Path) -> dict[int, str]:
    """Step -> sha256 of its checkpoint's files, for every step the run kept."""
    found = {}
    for folder in sorted(out.glob("checkpoints/step-*")):
        digest = hashlib.sha256()
        for name in ("loop.json", "trainer.bin"):
            digest.update((folder / name).read_bytes())
        found[int(folder.name.removeprefix("step-"))] = digest.hexdigest()
    return found
