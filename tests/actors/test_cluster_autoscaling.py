"""Nodes come by label when a base asks and go when it is gone: Ray's own autoscaler (v2) over its fake node provider.

The head has no GPU; node types declare GPUs and labels. Ray's own `AutoscalingCluster` stops every Ray on the machine before it
starts, so the head is started here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from actors.placement import Choice
from actors.scaling import ScalingLimits
from benchmarks.ports import free_port
from epilora.errors import PlacementInfeasible

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
HERE = Path(__file__).resolve().parent
LABEL = "ray.io/accelerator-type"


def node_type(kind: str, gpus: int, most: int, **resources: float) -> dict[str, Any]:
    return {
        "resources": {"CPU": 0, "GPU": gpus, **resources}, "labels": {LABEL: kind}, "node_config": {},
        "min_workers": 0, "max_workers": most,
    }  # fmt: skip


class Head:
    """A Ray head with the fake provider, all of whose processes end with `stop`."""

    def __init__(self, folder: str) -> None:
        address = f"{ray.util.get_node_ip_address()}:{free_port('')}"
        types = {
            "l40s": node_type("L40S", 1, 2),
            "h200_pair": node_type("H200", 2, 1, nvlink_pair=1),
        }
        config = {
            "cluster_name": "fake",
            "max_workers": 4,
            "idle_timeout_minutes": 0.05,
            "upscaling_speed": 10,
            "auth": {}, "file_mounts": {}, "initialization_commands": [], "setup_commands": [],
            "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
            "worker_start_ray_commands": [], "cluster_synced_files": [],
            "provider": {
                "type": "external",  # by its name Ray looks for an example file that its wheel does not carry
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID, "gcs_address": address,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                **types, "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            },
        }  # fmt: skip
        path = Path(folder) / "autoscaling.json"
        path.write_text(json.dumps(config))
        environment = {
            **os.environ,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
        }  # fmt: skip
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={address.rsplit(':', 1)[1]}",
            f"--autoscaling-config={path}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false",
            f"--temp-dir={folder}/ray", "--object-store-memory=100000000",
        ]  # fmt: skip
        self._log = (Path(folder) / "head.log").open("w")
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + 90
        while True:
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
                return
            except (ConnectionError, RuntimeError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise RuntimeError((Path(folder) / "head.log").read_text()[-3000:]) from None
                time.sleep(1)

    def stop(self) -> None:
        """End exactly the processes that descend from the head."""
        ray.shutdown()
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=15)
        for process in left:
            process.kill()
        self._process.wait(timeout=30)
        self._log.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="as-", dir="/tmp") as folder:
        head = Head(folder)
        try:
            handle = get_or_create_pool(str(tmp_path_factory.mktemp("store")))
            ray.get(handle.ready.remote(), timeout=90)
            yield handle
        finally:
            head.stop()


def request(name: str, *kinds: str, **changes: Any) -> BaseRequest:
    half = {"num_gpus": 0.5, "num_cpus": 0}
    made = BaseRequest(
        name=name,
        trainer_name=f"{name}-trainer",
        engine_factory="fakes:Engine",
        engine_kwargs={},
        trainer_factory="fakes:Trainer",
        trainer_kwargs={"dtype": "float32"},
        bundle={"GPU": 1.0},
        engine_options=half,
        trainer_options=half,
        environment={"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        choices=tuple(Choice({LABEL: kind}) for kind in kinds),
    )
    return replace(made, **changes)


def kinds() -> list[str]:
    """Labels of the live GPU nodes."""
    return sorted(node["Labels"][LABEL] for node in ray.nodes() if node["Alive"] and LABEL in node["Labels"])


def wait_for(holds: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}; live GPU nodes: {kinds()}"
        time.sleep(0.5)


def ensure(pool: Any, wanted: BaseRequest, job: str, timeout_s: float = 120.0) -> Any:
    return ray.get(pool.ensure.remote(wanted, job, timeout_s), timeout=timeout_s + 60)


def test_nodes_of_the_right_kind_come_and_go(pool: Any) -> None:
    assert kinds() == []
    idle = ScalingLimits(max_engines=2, up_s=1.0, down_s=3.0, to_zero_s=3.0)
    ensure(pool, request("base", "L40S", scaling=idle), "job")
    assert kinds() == ["L40S"]  # not the pair, which would fit as well

    engine = ray.get_actor("base", namespace=NAMESPACE)
    ray.get(engine.score.remote([], "running=4,waiting=2,kv_usage=0.95"))
    wait_for(lambda: ray.get(pool.engines.remote("base")) == ["base", "base.1"], "a second engine")
    assert kinds() == ["L40S", "L40S"]
    ray.get(engine.score.remote([], None))
    wait_for(lambda: ray.get(pool.engines.remote("base")) == ["base"], "one engine less")
    wait_for(lambda: kinds() == ["L40S"], "its node to go")

    pair = request(
        "pair", "H200", bundle={"GPU": 2.0, "nvlink_pair": 1.0}, engine_options={"num_gpus": 2, "num_cpus": 0},
        trainer_options={"num_gpus": 0, "num_cpus": 0}, engine_kwargs={"gpu_uuids": ("GPU-aa", "GPU-bb")},
    )  # fmt: skip
    ensure(pool, pair, "big")
    assert kinds() == ["H200", "L40S"]

    ray.get(pool.release.remote("job"))
    wait_for(lambda: ray.get(pool.engines.remote("base")) == [], "scale to zero")
    wait_for(lambda: kinds() == ["H200"], "the last L40S to go")
    assert ray.get(pool.wake.remote("base", 120.0), timeout=180) == ["base"]
    assert kinds() == ["H200", "L40S"]

    ray.get(pool.drop.remote(["base", "pair"]), timeout=60)
    wait_for(lambda: kinds() == [], "all GPU nodes to go")


def test_a_kind_no_node_type_has_fails_in_time_and_the_next_choice_is_tried(pool: Any) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="demand: one bundle") as caught:
        ensure(pool, request("none", "B200"), "job", timeout_s=4.0)
    assert isinstance(caught.value.cause, PlacementInfeasible)
    ensure(pool, request("either", "B200", "L40S"), "job", timeout_s=40.0)
    assert kinds() == ["L40S"]
    ray.get(pool.drop.remote(["either"]), timeout=60)
