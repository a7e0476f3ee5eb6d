"""Jobs on a real local cluster: `ray job submit`, the real engine and trainer, tenants over HTTP.

One cluster and one base for the module: the first job starts them, the others find them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
HTTP_PORT, DASHBOARD_PORT = 8123, 8267
HEAD = f"""
import signal, sys, ray
ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port={DASHBOARD_PORT}, _temp_dir=sys.argv[1],
         object_store_memory=150_000_000)
signal.sigwait([signal.SIGTERM])
"""


class Cluster:
    def __init__(self, out: Path, ray_dir: str) -> None:
        self.out = out
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.head = subprocess.Popen(
            [sys.executable, "-c", HEAD, ray_dir],
            env=self.environment, stdout=(out / "head.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.client = self._connect()

    def _connect(self) -> JobSubmissionClient:
        deadline = time.monotonic() + 90
        while True:
            try:
                return JobSubmissionClient(f"http://127.0.0.1:{DASHBOARD_PORT}")
            except (ConnectionError, RuntimeError):
                if time.monotonic() > deadline or self.head.poll() is not None:
                    raise RuntimeError((self.out / "head.log").read_text()[-3000:]) from None
                time.sleep(0.5)

    def submit(self, module: str, *overrides: str) -> str:
        settings = [f"store.root={self.out}/store", f"router.port={HTTP_PORT}", "rl.prompts_per_step=8", "rl.group_size=4",
                    "rl.eval_problems=16", *overrides]  # fmt: skip
        command = f"{sys.executable} -m {module} --config {ROOT}/configs/rl_small.yaml {shlex.join(settings)}"
        runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}}
        return self.client.submit_job(entrypoint=command, runtime_env=runtime_env)

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

    def wait_for(self, found, what: str, timeout_s: float = 150):
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="epi-", dir="/tmp") as short:  # Ray's socket paths end at 107 characters
        running = Cluster(tmp_path_factory.mktemp("cluster"), short)
        yield running
        running.stop()


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> tuple[str, str, str]:
    """(job id, API key, log) of a serving job; the first use starts engine, trainer, store and router."""
    job = cluster.submit(
        "jobs.serve", "name=server", "tenants=[{name: acme, prompts_task: {path: 'epilora.tasks.arithmetic:addition'}}]"
    )
    logs = cluster.wait_for(
        lambda: ((text := cluster.client.get_job_logs(job)) and "curl" in text and text)
        or (cluster.client.get_job_status(job).is_terminal() and pytest.fail(text)), "the server"
    )  # fmt: skip
    return job, re.search(r"^  acme\s+(\S+)$", logs, re.MULTILINE).group(1), logs


class Asking(threading.Thread):
    """A tenant that asks the base again and again; every answer is kept."""

    def __init__(self, key: str) -> None:
        super().__init__(daemon=True)
        self.key, self.statuses, self.texts = key, [], []
        self.enough = threading.Event()

    def run(self) -> None:
        body = {"model": "tiny-arith", "prompt": "3+4=", "max_tokens": 5, "temperature": 0}
        while not self.enough.is_set():
            reply = httpx.post(
                f"http://127.0.0.1:{HTTP_PORT}/v1/completions",
                json=body,
                timeout=60,
                headers={"Authorization": f"Bearer {self.key}"},
            )
            self.statuses.append(reply.status_code)
            self.texts.append(reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.text)


def metrics(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_the_server_prints_works_as_it_is(server: tuple[str, str, str]) -> None:
    _, _, log = server
    curl = log[log.index("curl -s") : log.index("from openai")]
    answer = json.loads(subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout)
    assert re.fullmatch(r"\d+", answer["choices"][0]["text"])
    snippet = log[log.index("from openai") :].split("\n\n")[0]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True)
    models, text = done.stdout.splitlines()
    assert "tiny-arith" in models
    assert text == answer["choices"][0]["text"]


def test_one_job_ends_while_another_and_the_tenants_go_on(cluster: Cluster, server: tuple[str, str, str]) -> None:
    job, key, _ = server
    cluster.client.stop_job(job)  # the router belongs to no job
    assert cluster.wait(job) == JobStatus.STOPPED
    tenant = Asking(key)
    tenant.start()
    long_out, short_out = cluster.out / "long", cluster.out / "short"
    long = cluster.submit("jobs.rl", "name=long", f"out={long_out}", "rl.steps=100000")
    cluster.wait_for(lambda: len(metrics(long_out)) >= 3, "three steps of the long job")
    short = cluster.submit("jobs.rl", "name=short", f"out={short_out}", "rl.steps=6")
    cluster.wait_for(lambda: len(metrics(short_out)) >= 1, "a step of the short job")
    seen = len(tenant.statuses)
    cluster.client.stop_job(long)
    assert cluster.wait(long) == JobStatus.STOPPED
    assert "stopping (SIGTERM); the last checkpoint stays" in cluster.client.get_job_logs(long)
    cluster.succeed(short)
    cluster.wait_for(lambda: len(tenant.statuses) > seen + 5, "more answers")
    tenant.enough.set()
    tenant.join()
    assert set(tenant.statuses) == {200}
    assert set(tenant.texts) == {tenant.texts[0]}

    done = len(metrics(long_out))
    again = cluster.submit("jobs.rl", "name=long", f"out={long_out}", "resume=true", f"rl.steps={done + 2}")
    cluster.succeed(again)
    result = json.loads((long_out / "result.json").read_text())
    assert result["checksum_equal"]
    assert done - 1 <= result["resumed_at"] <= done
    assert result["steps"] == done + 2
    assert [m["step"] for m in metrics(long_out)][-2:] == [done + 1, done + 2]


def test_a_killed_deterministic_run_resumes_bit_for_bit(cluster: Cluster, server: tuple[str, str, str]) -> None:
    whole_out, cut_out = cluster.out / "whole", cluster.out / "cut"
    settings = ("deterministic=true", "rl.steps=8", "rl.keep_checkpoints=100")
    cluster.succeed(cluster.submit("jobs.rl", "name=whole", f"out={whole_out}", *settings))

    cut = cluster.submit("jobs.rl", "name=cut", f"out={cut_out}", *settings)
    cluster.wait_for(lambda: len(metrics(cut_out)) >= 3, "three steps of the run to kill")
    driver = re.compile(r"jobs\.rl.*name=cut\b")
    pids = [
        int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _command(p) and driver.search(_command(p))
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert cluster.wait(cut) == JobStatus.FAILED
    killed_at = len(list(cut_out.glob("checkpoints/step-*"))) - 1
    assert 3 <= killed_at < 8
    cluster.succeed(cluster.submit("jobs.rl", "name=cut", f"out={cut_out}", "resume=true", *settings))

    whole, resumed = (json.loads((out / "result.json").read_text()) for out in (whole_out, cut_out))
    assert resumed["resumed_at"] == killed_at
    assert resumed["policy_digest"] == whole["policy_digest"]
    for step in range(9):
        states = [(out / "checkpoints" / f"step-{step:06d}") for out in (whole_out, cut_out)]
        loops = [json.loads((state / "loop.json").read_text()) for state in states]
        assert loops[0] == loops[1], f"step {step}"
        assert (states[0] / "trainer.bin").read_bytes() == (states[1] / "trainer.bin").read_bytes(), f"step {step}"


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
