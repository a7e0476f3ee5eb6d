"""The main job as its user runs it: cut by Ctrl-C in the middle, nothing left behind, then resumed to the end."""

from __future__ import annotations

import json

import pytest
from cluster import Cluster, job_environment
from main_job import Interrupted
from safetensors import safe_open

from epilora.store import AdapterStore
from jobs.recorder import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

MORE_STEPS = 12  # of about half a second each: in three, no tenant may happen to ask while rollouts run


def test_ctrl_c_stops_everything(interrupted: Interrupted) -> None:
    assert interrupted.returncode == 130, interrupted.output[-3000:]
    assert "go on with resume=true" in interrupted.output
    assert interrupted.processes > 5
    assert interrupted.left == []
    assert interrupted.files_left == []
    assert interrupted.steps >= 3


def test_the_run_goes_on_later_and_elsewhere(interrupted: Interrupted, cluster: Cluster, server) -> None:
    """It was started alone; it ends on a cluster whose base and router it finds running."""
    done = interrupted.steps
    environment = job_environment() | {"RAY_ADDRESS": cluster.address}
    process = interrupted.job.start(environment, "resume=true", f"rl.steps={done + MORE_STEPS}")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]
    run, store = interrupted.job.out / "run", AdapterStore(interrupted.job.out / "store")
    assert [r["step"] for r in read_metrics(run)] == list(range(1, done + MORE_STEPS + 1))  # no step lost
    published = store.versions("policy-quickstart", owner="job:quickstart")
    steps_published = [v.metadata["step"] for v in published]
    assert steps_published == sorted(steps_published)
    assert set(steps_published) == set(range(done + MORE_STEPS + 1))  # and no version
    kept = store.versions("acme-subtraction", owner="acme")
    assert [v.version for v in kept] == [1]  # the resumed run took up the tenant's adapter, it did not make another
    probed = store.probe(kept[0].digest, kept[0].base_digest)
    assert probed is not None
    assert probed["prediction"]["holds"]  # the trainer computed what the adapter changes in the engine
    assert probed["prediction"]["error"] < 1e-3 < probed["prediction"]["predicted"]
    result = json.loads((run / "result.json").read_text())
    assert result["checksum_equal"]
    assert result["base_read_only"]
    assert 0.99 <= result["base_copies"] <= 1.01
    assert all(tenant["rl_on"]["answers"] > 0 for tenant in result["tenants"])  # served while it trained
    assert result["mixed_steps"] > 0, f"none of {result['engine_steps']} engine steps"
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
