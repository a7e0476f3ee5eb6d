"""A local Ray cluster with its dashboard, and jobs submitted to it as a user submits them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from benchmarks.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


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
        # every port of its own: Ray's fixed ones may be another cluster's, and then jobs find no agent
        ports = {"port": 0, "ray-client-server-port": free_port(), "dashboard-port": self._dashboard_port,
                 "dashboard-agent-listen-port": 0}  # fmt: skip
        self.head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=4", f"--temp-dir={ray_dir}",
             "--object-store-memory=150000000", *(f"--{name}={port}" for name, port in ports.items())],
            env=job_environment(), stdout=(out / "head.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.client = self._connect()
        self.address = self._read_address(ray_dir)

    def _read_address(self, ray_dir: str) -> str:
        """What RAY_ADDRESS takes. Ray writes it where a submitted job looks for its cluster."""
        path = Path(ray_dir, "ray_current_cluster")
        return self.wait_for(lambda: path.exists() and path.read_text().strip(), "the address")

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
