"""A local Ray cluster with its dashboard, and jobs submitted to it as a user submits them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

ROOT = Path(__file__).resolve().parents[2]
# ray_current_cluster is what `ray start` leaves: without it a submitted job joins any cluster of the machine.
HEAD = """
import pathlib, signal, sys, ray
context = ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port=int(sys.argv[2]), _temp_dir=sys.argv[1],
                   object_store_memory=150_000_000)
pathlib.Path(sys.argv[1], "ray_current_cluster").write_text(context.address_info["address"])
print("address", context.address_info["address"], flush=True)
signal.sigwait([signal.SIGTERM])
"""


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def job_environment() -> dict[str, str]:
    """Variables of a process that starts its own Ray."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "RAY_worker_niceness": "0",  # Ray's 15 starves its workers where other things run
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # as a job sets it that starts Ray itself
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


class Cluster:
    """out: where its jobs write. Jobs share the store at out/store and the router at `port`."""

    def __init__(self, out: Path, ray_dir: str, port: int) -> None:
        self.out = out
        self.port = port
        self._dashboard_port = free_port()
        self.head = subprocess.Popen(
            [sys.executable, "-c", HEAD, ray_dir, str(self._dashboard_port)],
            env=job_environment(), stdout=(out / "head.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.client = self._connect()
        self.address = self._read_address()

    def _read_address(self) -> str:
        """What RAY_ADDRESS takes."""
        log = self.out / "head.log"
        return self.wait_for(lambda: re.search(r"^address (\S+)$", log.read_text(), re.MULTILINE), "the address").group(
            1
        )

    def _connect(self) -> JobSubmissionClient:
        deadline = time.monotonic() + 90
        while True:
            try:
                return JobSubmissionClient(f"http://127.0.0.1:{self._dashboard_port}")
            except (ConnectionError, RuntimeError):
                if time.monotonic() > deadline or self.head.poll() is not None:
                    raise RuntimeError((self.out / "head.log").read_text()[-3000:]) from None
                time.sleep(0.5)

    def submit(self, module: str, *overrides: str) -> str:
        settings = [f"store.root={self.out}/store", f"router.port={self.port}", "rl.prompts_per_step=8", "rl.group_size=4",
                    "rl.eval_problems=16", *overrides]  # fmt: skip
        command = f"{sys.executable} -m {module} --config {ROOT}/configs/rl_small.yaml {shlex.join(settings)}"
        runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}}
        return self.wait_for(lambda: self._submitted(command, runtime_env), "an agent that takes jobs")

    def _submitted(self, command: str, runtime_env: dict[str, Any]) -> str | None:
        """The job's id; None while the node's agent, which starts after the dashboard, is not there yet."""
        try:
            return self.client.submit_job(entrypoint=command, runtime_env=runtime_env)
        except RuntimeError as err:
            if "No available agent" in str(err):
                return None
            raise

    def wait(self, job: str, timeout_s: float = 180) -> JobStatus:
        deadline = time.monotonic() + timeout_s
        while not (status := self.client.get_job_status(job)).is_terminal():
            assert time.monotonic() < deadline, f"{job} still {status}:\n{self.client.get_job_logs(job)[-3000:]}"
            time.sleep(0.3)
        return status

    def succeed(self, job: str) -> str:
        status, logs = self.wait(job), self.client.get_job_logs(job)
        assert status == JobStatus.SUCCEEDED, logs[-4000:]
        return logs

    def wait_for(self, found: Callable[[], Any], what: str, timeout_s: float = 150) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            value = found()
            if value:
                return value
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
            time.sleep(0.2)

    def stop(self) -> None:
        os.killpg(self.head.pid, signal.SIGTERM)
        self.head.wait(timeout=60)
