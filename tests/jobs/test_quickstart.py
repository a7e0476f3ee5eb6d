"""The main job as its user runs it: cut by Ctrl-C in the middle, nothing left behind, then resumed to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from epilora.memory import descendants
from epilora.store import AdapterStore
from jobs.recorder import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PORT = 8129


def start(out: Path, *overrides: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment.pop("RAY_ADDRESS", None)
    settings = [
        f"out={out}/run",
        f"store.root={out}/store",
        f"router.port={PORT}",
        "rl.prompts_per_step=16",
        "rl.eval_problems=64",
        "tenant_baseline_s=1",
        "tenant_prompts=8",
    ]
    command = [sys.executable, "-m", "jobs.quickstart", "--config", "configs/quickstart_tiny.yaml"]
    return subprocess.Popen(
        [*command, *settings, *overrides],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps(out: Path) -> int:
    path = out / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


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


def test_ctrl_c_stops_everything_and_the_run_goes_on_later(tmp_path: Path) -> None:
    shared_before = set(Path("/dev/shm").glob("epilora*"))
    process = start(tmp_path, "rl.steps=1000")
    deadline = time.monotonic() + 300
    while steps(tmp_path) < 3:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tree = descendants(process.pid)
    assert len(tree) > 5
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output[-3000:]
    assert "go on with resume=true" in output
    time.sleep(2)
    assert alive(tree) == []
    assert set(Path("/dev/shm").glob("epilora*")) - shared_before == set()

    done = steps(tmp_path)
    process = start(tmp_path, "resume=true", f"rl.steps={done + 3}")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]
    run = tmp_path / "run"
    assert [r["step"] for r in read_metrics(run)] == list(range(1, done + 4))  # no step lost
    published = AdapterStore(tmp_path / "store").versions("policy-quickstart", owner="job:quickstart")
    steps_published = [v.metadata["step"] for v in published]
    assert steps_published == sorted(steps_published)
    assert set(steps_published) == set(range(done + 4))  # and no version
    kept = AdapterStore(tmp_path / "store").versions("acme-subtraction", owner="acme")
    assert [v.version for v in kept] == [1]  # the resumed run took up the tenant's adapter, it did not make another
    result = json.loads((run / "result.json").read_text())
    assert result["checksum_equal"]
    assert result["base_read_only"]
    assert 0.99 <= result["base_copies"] <= 1.01
    assert result["answers_wrong"] == 0
    assert result["tenant_errors"] == []
    assert result["eval_before"]["well_formed"] >= 0.9
    assert result["mismatch_mean"] < 1e-5
    assert (run / "plot.png").stat().st_size > 10_000
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["r"] == 16
    with safe_open(run / "adapter" / "adapter_model.safetensors", "np") as tensors:
        assert len(list(tensors.keys())) == 2 * 14
    assert "held-out accuracy after" in output
