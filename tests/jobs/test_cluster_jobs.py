"""Jobs on a real local cluster: `ray job submit`, the real engine and trainer, tenants over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from cluster import ROOT, Cluster
from ray.job_submission import JobStatus

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


class Asking(threading.Thread):
    """A tenant that asks the base again and again; every answer is kept."""

    def __init__(self, port: int, key: str) -> None:
        super().__init__(daemon=True)
        self.port, self.key, self.statuses, self.texts = port, key, [], []
        self.enough = threading.Event()

    def run(self) -> None:
        body = {"model": "tiny-arith", "prompt": "3+4=", "max_tokens": 5, "temperature": 0}
        while not self.enough.is_set():
            reply = httpx.post(
                f"http://127.0.0.1:{self.port}/v1/completions",
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


def test_the_operators_port_it_prints_is_theirs_alone(server: tuple[str, str, str]) -> None:
    _, tenant_key, log = server
    found = re.search(r"^epilora top --url (\S+) --key (\S+)$", log, re.MULTILINE)
    assert found is not None
    url, key = found.groups()
    command = [sys.executable, "-m", "epilora.cli", "top", "--once", "--url", url, "--key", key]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "dora" in shown
    assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
    assert "epilora_requests_total" in httpx.get(f"{url}/metrics").text
    for given, status in ((key, 200), (tenant_key, 403), ("wrong", 401)):
        audit = httpx.get(f"{url}/v1/audit", headers={"Authorization": f"Bearer {given}"})
        assert audit.status_code == status
    tenants_url = re.search(r"curl -s (\S+)/v1/completions", log)
    assert tenants_url is not None
    for path in ("/", "/metrics", "/v1/audit"):
        assert httpx.get(f"{tenants_url.group(1)}{path}", headers={"Authorization": f"Bearer {key}"}).status_code == 404


def test_one_job_ends_while_another_and_the_tenants_go_on(cluster: Cluster, server: tuple[str, str, str]) -> None:
    job, key, _ = server
    cluster.client.stop_job(job)  # the router belongs to no job
    assert cluster.wait(job) == JobStatus.STOPPED
    tenant = Asking(cluster.port, key)
    tenant.start()
    long_out, short_out = cluster.out / "long", cluster.out / "short"
    long = cluster.submit("jobs.rl", "name=long", f"out={long_out}", "rl.steps=100000", "rl.min_step_s=0.5")
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
