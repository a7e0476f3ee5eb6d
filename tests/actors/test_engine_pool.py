"""The pool on a real local Ray: sharing, refusals, bounded waits, death of an engine, shutdown."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from epilora.errors import PlacementInfeasible

pytestmark = pytest.mark.ray
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def request(name: str = "base", **engine_kwargs) -> BaseRequest:
    return BaseRequest(
        name=name,
        trainer_name=f"{name}-trainer",
        engine_factory="fakes:Engine",
        engine_kwargs={"name": name, **engine_kwargs},
        trainer_factory="fakes:Trainer",
        trainer_kwargs={"dtype": "float32"},
        bundle={"CPU": 1.0},
        environment=ENVIRONMENT,
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory):
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    handle = get_or_create_pool(str(tmp_path_factory.mktemp("store")))
    ray.get(handle.ready.remote(), timeout=60)
    yield handle
    ray.shutdown()


def ensure(pool, wanted: BaseRequest, job: str, timeout_s: float = 60.0):
    return ray.get(pool.ensure.remote(wanted, job, timeout_s), timeout=timeout_s + 30)


def cause(err: ray.exceptions.RayTaskError) -> BaseException:
    return err.cause


def groups() -> dict[str, str]:
    return {g["name"]: g["state"] for g in ray.util.placement_group_table().values()}


def test_a_second_job_shares_the_running_base_and_outlives_the_first(pool) -> None:
    first = ensure(pool, request(), "job-a")
    again = ensure(pool, request(), "job-b")
    assert first == again  # the same object in the same process answered: nothing was started twice
    status = ray.get(pool.status.remote())
    assert status["leases"] == {"job-a": ["base"], "job-b": ["base"]}
    trainer = ray.get_actor("base-trainer", namespace=NAMESPACE)
    assert ray.get(trainer.memory.remote()) == {"attached": 1, "sessions": 0}
    ray.get(pool.release.remote("job-a"))
    assert ray.get(pool.status.remote())["leases"] == {"job-b": ["base"]}
    assert ray.get(ray.get_actor("base", namespace=NAMESPACE).info.remote()) == first


def test_other_settings_under_the_same_name_are_refused_with_the_difference(pool) -> None:
    ensure(pool, request(), "job-a")
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ensure(pool, request(start_s=0.5), "job-c")
    assert isinstance(cause(caught.value), ValueError)
    assert "engine_kwargs.start_s: runs with None, asked 0.5" in str(caught.value)


def test_what_cannot_be_placed_fails_in_time_with_demand_and_supply(pool) -> None:
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ensure(pool, replace(request("huge"), bundle={"CPU": 64.0, "GPU": 2.0}), "job-d", timeout_s=2.0)
    assert time.monotonic() - start < 20
    assert isinstance(cause(caught.value), PlacementInfeasible)
    assert "demand: one bundle {'CPU': 64.0, 'GPU': 2.0} on a node with any node" in str(caught.value)
    assert "too small even when idle (CPU 64 wanted, 2; GPU 2 wanted, 0 in all)" in str(caught.value)
    assert "base-huge" not in {name for name, state in groups().items() if state != "REMOVED"}


def test_an_engine_that_does_not_start_leaves_nothing_behind(pool) -> None:
    with pytest.raises(ray.exceptions.RayError, match="model file is damaged"):
        ensure(pool, request("broken", broken=True), "job-e")
    assert {name: state for name, state in groups().items() if name == "base-broken"} == {"base-broken": "REMOVED"}
    with pytest.raises(ValueError, match="broken-trainer"):
        ray.get_actor("broken-trainer", namespace=NAMESPACE)


def test_a_slow_start_is_cut_at_the_bound(pool) -> None:
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ensure(pool, request("slow", start_s=60), "job-f", timeout_s=4.0)
    assert time.monotonic() - start < 30
    assert isinstance(cause(caught.value), TimeoutError)
    assert "slow" in str(caught.value)


def test_a_killed_engine_is_started_again_for_the_next_job(pool) -> None:
    first = ensure(pool, request(), "job-a")
    pid = ray.get(ray.get_actor("base", namespace=NAMESPACE).pid.remote())
    os.kill(pid, signal.SIGKILL)
    again = ensure(pool, request(), "job-b")
    assert again.name == first.name
    assert ray.get(ray.get_actor("base", namespace=NAMESPACE).pid.remote()) != pid
    assert ray.get(ray.get_actor("base-trainer", namespace=NAMESPACE).memory.remote()) == {"attached": 1, "sessions": 0}


def test_a_trainer_that_lost_a_rank_is_replaced_beside_its_engine(pool) -> None:
    ensure(pool, request(), "job-a")
    engine = ray.get(ray.get_actor("base", namespace=NAMESPACE).pid.remote())
    trainer = ray.get_actor("base-trainer", namespace=NAMESPACE)
    pid = ray.get(trainer.pid.remote())
    ray.get(trainer.open_session.remote("lose a rank", None, {}, 0), timeout=30)
    deadline = time.monotonic() + 30  # nobody asks for the base meanwhile: the pool notices by itself
    while True:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # between the two there is none
            if ray.get(ray.get_actor("base-trainer", namespace=NAMESPACE).pid.remote(), timeout=10) != pid:
                break
        assert time.monotonic() < deadline, ray.get(pool.status.remote())
        time.sleep(0.2)
    ensure(pool, request(), "job-b")
    assert ray.get(ray.get_actor("base-trainer", namespace=NAMESPACE).memory.remote()) == {"attached": 1, "sessions": 0}
    assert ray.get(ray.get_actor("base", namespace=NAMESPACE).pid.remote()) == engine


def test_shutdown_stops_everything_the_pool_owns(pool) -> None:
    ensure(pool, request(), "job-a")
    ray.get(pool.shutdown.remote(), timeout=60)
    for name in ("base", "base-trainer", "store"):
        with pytest.raises(ValueError, match=name):
            ray.get_actor(name, namespace=NAMESPACE)
    assert set(groups().values()) == {"REMOVED"}
