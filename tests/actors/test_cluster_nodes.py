"""The pool on Ray's in-process multi-node cluster: nodes of unlike types, death of nodes, pool and drivers, scaling.

Nodes declare GPUs and labels they do not have; the engine behind them is the stand-in from fakes.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from actors.placement import Choice
from actors.scaling import ScalingLimits
from epilora.errors import PlacementInfeasible
from epilora.types import AdapterSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LABEL = "ray.io/accelerator-type"
ENVIRONMENT = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
HALF = {"num_gpus": 0.5, "num_cpus": 0}
FAST = ScalingLimits(max_engines=2, up_s=1.0, down_s=2.0)
SPEC = AdapterSpec(2, 4.0, ("q_proj",))


def on(*kinds: str) -> tuple[Choice, ...]:
    return tuple(Choice({LABEL: kind}) for kind in kinds)


def request(name: str, choices: tuple[Choice, ...], **changes: Any) -> BaseRequest:
    made = BaseRequest(
        name=name,
        trainer_name=f"{name}-trainer",
        engine_factory="fakes:Engine",
        engine_kwargs={"quantization": "fp8_per_channel"},
        trainer_factory="fakes:Trainer",
        trainer_kwargs={"dtype": "float32"},
        bundle={"GPU": 1.0},
        engine_options=HALF,
        trainer_options=HALF,
        environment=ENVIRONMENT,
        choices=choices,
    )
    return replace(made, **changes)


def start(cluster: Cluster, kind: str, gpus: int = 1, **resources: float) -> Any:
    return cluster.add_node(num_cpus=0, num_gpus=gpus, labels={LABEL: kind}, resources=resources or None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without GPUs and one node each of L40S, H100 and RTX-PRO-6000, and a pair of H200."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for kind in ("L40S", "H100", "RTX-PRO-6000"):
        start(made, kind)
    start(made, "H200", gpus=2, nvlink_pair=1)
    ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def running_pool(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    handle = get_or_create_pool(str(tmp_path_factory.mktemp("store")))
    ray.get(handle.ready.remote(), timeout=60)
    return handle


@pytest.fixture
def pool(running_pool: Any) -> Iterator[Any]:
    """At the test's end all leases and bases go, and no placement group may be left."""
    yield running_pool
    state = ray.get(running_pool.status.remote(), timeout=60)
    for job in state["leases"]:
        ray.get(running_pool.release.remote(job))
    ray.get(running_pool.drop.remote(list(state["bases"])), timeout=60)
    wait_for(lambda: set(groups().values()) <= {"REMOVED"}, "all placement groups to be gone")
    # A removed group's GPU is free a moment later; until then the next test's first choice would look taken.
    wait_for(lambda: ray.available_resources().get("GPU") == ray.cluster_resources().get("GPU"), "all GPUs to be free")


def ensure(pool: Any, wanted: BaseRequest, job: str = "job", timeout_s: float = 60.0, **more: str) -> Any:
    return ray.get(pool.ensure.remote(wanted, job, timeout_s, **more), timeout=timeout_s + 30)


def groups() -> dict[str, str]:
    """State of each name's placement group; of several of one name the one that is left."""
    rows = ray.util.placement_group_table().values()
    return {g["name"]: g["state"] for g in sorted(rows, key=lambda g: g["state"] != "REMOVED")}


def wait_for(holds: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen := holds():
            return seen
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def part(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def call(name: str, method: str, *args: Any) -> Any:
    return ray.get(getattr(part(name), method).remote(*args), timeout=30)


def label_of(name: str) -> str:
    """Label of the node an actor runs on."""
    node = ray._private.state.actors(part(name)._actor_id.hex())["Address"]["NodeID"]
    return next(n["Labels"].get(LABEL, "none") for n in ray.nodes() if n["NodeID"] == node)


def engines(pool: Any, name: str) -> list[str]:
    return ray.get(pool.engines.remote(name), timeout=30)


def test_the_preferred_kind_with_room_is_taken_and_told_its_own_format(pool: Any) -> None:
    blackwell = Choice({LABEL: "RTX-PRO-6000"}, {"quantization": "modelopt_fp4"})
    order = (*on("B200"), blackwell, *on("L40S"))
    info = ensure(pool, request("mixed", order))
    assert label_of("mixed") == label_of("mixed-trainer") == "RTX-PRO-6000"
    assert info.quantization == "modelopt_fp4"
    second = ensure(pool, request("second", order))
    assert label_of("second") == "L40S"  # the better one is full
    assert second.quantization == "fp8_per_channel"


def test_engine_and_trainer_halve_one_gpu_and_a_third_is_told_why_not(pool: Any) -> None:
    ensure(pool, request("one", on("H100")))
    assert label_of("one") == label_of("one-trainer") == "H100"
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ensure(pool, request("two", on("H100", "B200")), timeout_s=3.0)
    assert isinstance(caught.value.cause, PlacementInfeasible)
    text = str(caught.value)
    assert "on a node with ray.io/accelerator-type=H100 or else ray.io/accelerator-type=B200" in text
    assert "ray.io/accelerator-type=H100: GPU 0 of 1 free; busy (GPU 1 wanted, 0 free)" in text
    assert "ray.io/accelerator-type=none: CPU 2 of 2 free; its labels match no choice" in text
    assert groups()["base-two"] == "REMOVED"
    assert engines(pool, "one") == ["one"]


def test_a_pair_is_one_bundle_and_its_trainer_gets_the_devices_by_uuid(pool: Any) -> None:
    pair = request(
        "pair", on("L40S", "H100"), bundle={"GPU": 2.0, "nvlink_pair": 1.0}, engine_options={"num_gpus": 2, "num_cpus": 0},
        trainer_options={"num_gpus": 0, "num_cpus": 0}, engine_kwargs={"gpu_uuids": ("aa", "GPU-bb")},
    )  # fmt: skip
    with pytest.raises(ray.exceptions.RayTaskError, match="GPU 2 wanted, 1"):  # two nodes of one GPU are no pair
        ensure(pool, pair, timeout_s=3.0)
    ensure(pool, replace(pair, choices=on("L40S", "H200")))
    assert label_of("pair") == label_of("pair-trainer") == "H200"
    assert call("pair-trainer", "state", "") == b"GPU-aa,GPU-bb"


def test_an_engine_whose_node_dies_comes_back_on_another_kind(pool: Any, cluster: Cluster) -> None:
    best = start(cluster, "GH200")
    ensure(pool, request("base", on("GH200", "L40S")))
    assert label_of("base") == "GH200"
    cluster.remove_node(best, allow_graceful=False)
    wait_for(lambda: _alive_on("base", "L40S") and _alive_on("base-trainer", "L40S"), "engine and trainer on the L40S")
    wait_for(lambda: _answers("base-trainer", "memory") == {"attached": 1, "sessions": 0}, "a trainer on its weights")
    assert engines(pool, "base") == ["base"]


def _alive_on(name: str, kind: str) -> bool:
    try:
        return label_of(name) == kind and call(name, "pid") > 0
    except (ValueError, StopIteration, ray.exceptions.RayError):
        return False


def test_a_killed_engine_comes_back_with_its_trainer_without_a_job_asking(pool: Any) -> None:
    first = ensure(pool, request("base", on("H100")))
    os.kill(call("base", "pid"), signal.SIGKILL)
    wait_for(lambda: _answers("base") not in (None, first), "a new engine")
    wait_for(lambda: _answers("base-trainer", "memory") == {"attached": 1, "sessions": 0}, "a trainer on its weights")


@pytest.mark.parametrize("asked", ["by nobody", "by a job"])
def test_a_killed_trainer_comes_back_beside_its_engine_which_never_stopped(pool: Any, asked: str) -> None:
    first = ensure(pool, request("base", on("H100")))
    killed = call("base-trainer", "pid")
    os.kill(killed, signal.SIGKILL)
    if asked == "by a job":
        assert ensure(pool, request("base", on("H100")), "other") == first
        assert call("base-trainer", "memory") == {"attached": 1, "sessions": 0}
    wait_for(lambda: _answers("base-trainer", "pid") not in (None, killed), "another trainer")
    wait_for(lambda: _answers("base-trainer", "memory") == {"attached": 1, "sessions": 0}, "a trainer on its weights")
    assert call("base", "info") == first  # made at the same nanosecond
    assert [name for name, state in groups().items() if state != "REMOVED"] == ["base-base"]


def _answers(name: str, method: str = "info") -> Any:
    try:
        return call(name, method)
    except (ValueError, ray.exceptions.RayError):
        return None


def test_an_engine_whose_step_loop_failed_is_replaced(pool: Any) -> None:
    first = ensure(pool, request("base", on("H100")))
    call("base", "score", [], "stop")
    wait_for(lambda: _answers("base") not in (None, first), "a new engine")


def test_a_killed_pool_takes_up_what_runs(pool: Any) -> None:
    first = ensure(pool, request("base", on("H100")))
    pid = ray.get(pool.pid.remote())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _answers("pool", "pid") not in (None, pid), "the pool")
    status = ray.get(pool.status.remote(), timeout=60)
    assert list(status["bases"]["base"]["engines"]) == ["base"]
    assert status["leases"] == {"job": ["base"]}
    assert ensure(pool, request("base", on("H100")), "other") == first  # the same process, never stopped
    os.kill(call("base", "pid"), signal.SIGKILL)
    wait_for(lambda: _answers("base") not in (None, first), "the new pool to look after the old engine")


def test_a_pool_killed_while_it_starts_a_base_leaves_no_bundle(pool: Any) -> None:
    pending = pool.ensure.remote(request("slow", on("H100"), engine_kwargs={"start_s": 6.0}), "job", 60.0)
    wait_for(lambda: groups().get("base-slow") == "CREATED", "the bundle")
    os.kill(ray.get(pool.pid.remote()), signal.SIGKILL)
    assert ray.get(pending, timeout=90).name == "slow"  # the call is made again by Ray
    assert [name for name, state in groups().items() if state != "REMOVED"] == ["base-slow"]
    rows = [g for g in ray.util.placement_group_table().values() if g["name"] == "base-slow"]
    assert sorted(g["state"] for g in rows) == ["CREATED", "REMOVED"]


DRIVER = """
import sys, time, ray
sys.path.insert(0, sys.argv[2])
from actors.adapter_store import NAMESPACE
from epilora.types import AdapterSpec, AdapterVersion
ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False)
pool = ray.get_actor("pool", namespace=NAMESPACE)
base = ray.get(pool.known.remote("base"))
ray.get(pool.ensure.remote(base, "doomed", 60.0, ray.get_runtime_context().get_job_id(), "policy-doomed"))
engine, trainer = (ray.get_actor(n, namespace=NAMESPACE) for n in ("base", "base-trainer"))
spec = AdapterSpec(2, 4.0, ("q_proj",))
ray.get(trainer.open_session.remote("policy-doomed", spec, {}, 0))
ray.get(engine.load_adapter.remote(AdapterVersion("a", 1, "d" * 64, spec), {}))
ray.get(engine.pin_adapter.remote("d" * 64, "policy-doomed"))
print("up", flush=True)
time.sleep(300)
"""


def test_a_dead_drivers_lease_pins_and_session_are_taken_back(pool: Any, cluster: Cluster) -> None:
    ensure(pool, request("base", on("H100")), "other")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, str(ROOT)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    assert ray.get(pool.status.remote())["leases"] == {"other": ["base"], "doomed": ["base"]}
    assert call("base", "tokenize", "d" * 64) == (1,)
    assert call("base-trainer", "memory")["sessions"] == 1
    driver.kill()
    driver.wait()
    wait_for(lambda: ray.get(pool.status.remote())["leases"] == {"other": ["base"]}, "the lease to end")
    wait_for(lambda: call("base", "tokenize", "d" * 64) == (0,), "the pin to go")
    wait_for(lambda: call("base-trainer", "memory")["sessions"] == 0, "the session to close")


def test_pressure_adds_an_engine_of_another_kind_and_its_end_lets_it_drain(pool: Any) -> None:
    ensure(pool, request("base", on("H100", "L40S"), scaling=FAST))
    call("base", "score", [], "running=4,waiting=2,kv_usage=0.95")
    wait_for(lambda: engines(pool, "base") == ["base", "base.1"], "a second engine")
    assert (label_of("base"), label_of("base.1")) == ("H100", "L40S")
    call("base.1", "score", [], "running=1,waiting=0,kv_usage=0.0")
    call("base", "score", [], None)
    wait_for(lambda: engines(pool, "base") == ["base"], "the second engine to take no more requests")
    time.sleep(1.5)
    assert _answers("base.1") is not None  # its last request still runs
    assert ray.get(pool.status.remote())["bases"]["base"]["draining"] == ["base.1"]
    call("base.1", "score", [], None)
    wait_for(lambda: groups().get("base-base.1") == "REMOVED", "its bundle to be given back")


def test_to_zero_and_back_keeps_every_adapter(pool: Any) -> None:
    import numpy as np

    idle = replace(FAST, to_zero_s=2.0)
    ensure(pool, request("base", on("H100"), scaling=idle))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {key.format("A"): np.ones((2, 4), np.float32), key.format("B"): np.ones((4, 2), np.float32)}
    store = part("store")
    version = ray.get(store.publish.remote("tenant", SPEC, tensors, base_model="fake", base_digest="b" * 64))
    call("base", "load_adapter", version, tensors)
    ray.get(pool.release.remote("job"))
    wait_for(lambda: engines(pool, "base") == [] and groups()["base-base"] == "REMOVED", "zero engines")
    wait_for(lambda: ray.available_resources().get("GPU") == 5, "the GPU to be free")
    assert ray.get(pool.wake.remote("base"), timeout=60) == ["base"]
    ensure(pool, request("base", on("H100"), scaling=idle))  # a lease: it stays
    again = ray.get(store.resolve.remote("tenant"))
    assert again == version
    loaded = ray.get(store.tensors.remote(again.digest))
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    assert call("base", "load_adapter", again, loaded).digest == version.digest
    assert call("base-trainer", "memory")["attached"] == 1


def test_what_cannot_be_started_again_is_told_and_tried_when_a_node_comes(pool: Any, cluster: Cluster) -> None:
    only = start(cluster, "B200")
    ensure(pool, request("base", on("B200")))
    cluster.remove_node(only, allow_graceful=False)
    wait_for(lambda: engines(pool, "base") == [], "the engine to be given up")
    again = start(cluster, "B200")
    wait_for(lambda: engines(pool, "base") == ["base"], "the engine on the new node")
    ray.get(pool.drop.remote(["base"]), timeout=60)
    cluster.remove_node(again)
