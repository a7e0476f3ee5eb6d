"""The head's GCS server killed, with its tables in a real Redis that the test starts: what runs goes on, and the pool can act after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from benchmarks.faults.cluster import FaultCluster, bundles, free_gpus, wait_for
from benchmarks.faults.stand_in import holds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
HALF = {"num_gpus": 0.5, "num_cpus": 0}
REQUEST = BaseRequest(
    name="base",
    trainer_name="base-trainer",
    engine_factory="tests.actors.fakes:Engine",
    engine_kwargs={},
    trainer_factory="tests.actors.fakes:Trainer",
    trainer_kwargs={"dtype": "float32"},
    bundle={"GPU": 1.0},
    engine_options=HALF,
    trainer_options=HALF,
    environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with FaultCluster(tmp_path_factory.mktemp("redis"), nodes=("H100",)) as running:
        yield running


def ask(name: str, method: str) -> Any:
    return ray.get(getattr(ray.get_actor(name, namespace=NAMESPACE), method).remote(), timeout=10)


def test_the_pool_replaces_an_engine_that_died_with_the_head(cluster: FaultCluster, tmp_path: Path) -> None:
    pool = get_or_create_pool(str(tmp_path / "store"))
    first = ray.get(pool.ensure.remote(REQUEST, "job", 60.0), timeout=90)
    pids = {name: ask(name, "pid") for name in ("base", "pool", "store")}
    cluster.kill_head(away_s=0.5)
    assert {name: ask(name, "pid") for name in pids} == pids  # nothing else stopped
    assert ask("base", "info") == first

    cluster.kill_head(away_s=0.0)
    os.kill(pids["base"], signal.SIGKILL)
    wait_for(lambda: holds(lambda: ask("base", "info") != first), "a new engine")
    wait_for(lambda: holds(lambda: ask("base-trainer", "memory")["attached"] == 1), "a trainer on its weights")
    assert ask("pool", "status")["leases"] == {"job": ["base"]}
    assert bundles() == ["base-base"]
    wait_for(lambda: free_gpus() == 0, "the bundle to hold the GPU")
    ray.get(pool.drop.remote(["base"]), timeout=60)
    wait_for(lambda: not bundles() and free_gpus() == 1, "the GPU to be free")
