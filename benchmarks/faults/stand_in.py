"""The "stand-in" setting: kill parts of the real serving system in front of engines that only pretend to compute."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from actors.placement import Choice
from actors.router import build_app
from actors.scaling import ScalingLimits
from benchmarks.faults import cluster as c
from benchmarks.faults.plan import STAND_IN, Fault
from benchmarks.faults.tenants import Publisher, Tenants, publish
from epilora.serving.tenants import hash_key
from tests.actors.fake_engine import BASE_DIGEST

ROOT = Path(__file__).resolve().parents[2]
API_KEY = "sk-acme-faults"
NODES = ("H100", "L40S", "H200")
ENGINES = ("base", "base.1")
APP, ROUTER, CONTROLLER = "router", "CoServingRouter", "SERVE_CONTROLLER_ACTOR"
REPLICAS = 2
HEAD_AWAY_S = 1.0
RECOVER_S = 90.0
LEAK_S = 20.0


def base_request() -> BaseRequest:
    """Two engines, one GPU each, on any of the three kinds of node; one node is spare."""
    half = {"num_gpus": 0.5, "num_cpus": 0}
    return BaseRequest(
        name="base",
        trainer_name="base-trainer",
        engine_factory="tests.actors.serving_fake:ServingEngine",
        engine_kwargs={},
        trainer_factory="tests.actors.fakes:Trainer",
        trainer_kwargs={"dtype": "float32"},
        bundle={"GPU": 1.0},
        engine_options=half,
        trainer_options=half,
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        choices=tuple(Choice({c.LABEL: kind}) for kind in NODES),
        scaling=ScalingLimits(min_engines=2, max_engines=2, down_s=1e9),
    )


class StandIn:
    """The running system, and what can be killed in it. acknowledged: called with each version the store confirmed."""

    def __init__(self, ray_cluster: c.FaultCluster, folder: Path, acknowledged: Callable[[Any], None]) -> None:
        self.cluster, self._acknowledged = ray_cluster, acknowledged
        self.pool = get_or_create_pool(str(folder / "store"))
        ray.get(self.pool.ensure.remote(base_request(), "campaign", 120.0), timeout=150)
        c.wait_for(lambda: self.engines() == list(ENGINES), "both engines")
        port, admin_port = c.free_port(), c.free_port()
        self.url = f"http://127.0.0.1:{port}"
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        tenants = [{"name": "acme", "key_hashes": [hash_key(API_KEY, salt="ab" * 8)]}]
        app = {"engines": ["base"], "base_names": ["tiny"], "tenants": tenants}
        serve.run(build_app({**app, "replicas": REPLICAS, "admin_port": admin_port}), name=APP, route_prefix="/")
        self.adapters = {}
        for index in range(3):
            version = publish(f"tenant{index}", index, BASE_DIGEST, "acme")
            acknowledged(version)
            self.adapters[f"tenant{index}"] = version.digest
        self._next_seed = 1000 * int(time.time())

    # ---- what runs -------------------------------------------------------------------------------------------------

    def engines(self) -> list[str]:
        found = ray.get(self.pool.status.remote(), timeout=30)["bases"]["base"]["engines"]
        return sorted(found)

    def replicas(self) -> list[dict[str, Any]]:
        mark = f"{APP}#{ROUTER}#"
        return sorted((r for r in c.actors() if mark in r["Name"] and r["State"] == "ALIVE"), key=lambda r: r["Name"])

    def leaks(self) -> list[str]:
        """What is held beyond the two engines' bundles, or missing of them."""
        found = []
        if c.bundles() != [f"base-{name}" for name in ENGINES]:
            found.append(f"placement groups {c.bundles()}")
        free = c.free_gpus()
        if free != len(NODES) - len(ENGINES):
            found.append(f"{free:g} GPUs free of {c.all_gpus():g}")
        names = [row["Name"] for row in c.actors() if row["ActorClassName"] in ("EngineActor", "TrainerActor")]
        if sorted(names) != ["base", "base-trainer", "base.1"]:
            found.append(f"engine and trainer actors {sorted(names)}")
        return found

    # ---- killing ---------------------------------------------------------------------------------------------------

    def kill(self, fault: Fault, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        """Kill the fault's process. Returns what it was, its process id, and whether it is back."""
        return getattr(self, "_kill_" + fault.kind.replace(" ", "_"))(rng)  # type: ignore[no-any-return]

    def _kill_actor(self, name: str) -> tuple[str, int, str]:
        row = c.wait_for(lambda: (r := c.actor(name)) and r["State"] == "ALIVE" and r["Pid"] and r, f"actor {name}")
        os.kill(row["Pid"], signal.SIGKILL)
        return name, row["Pid"], row["ActorID"]

    def _kill_engine(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        name, pid, _ = self._kill_actor(rng.choice(ENGINES))
        return name, pid, lambda: self._engines_up({name: pid})

    def _kill_trainer(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        name, pid, _ = self._kill_actor("base-trainer")
        return name, pid, lambda: self._engines_up({name: pid})

    def _kill_store(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        name, pid, _ = self._kill_actor("store")
        return name, pid, lambda: self._other_pid(name, pid)

    def _kill_pool(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        name, pid, _ = self._kill_actor("pool")
        return name, pid, lambda: self._other_pid(name, pid) and self._engines_up({})

    def _kill_controller(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        name, pid, _ = self._kill_actor(CONTROLLER)
        return "Serve controller", pid, lambda: self._row_pid(name) not in (0, pid) and self._app_runs()

    def _kill_router_replica(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        row = rng.choice(c.wait_for(lambda: len(r := self.replicas()) == REPLICAS and r, "the router's replicas"))
        os.kill(row["Pid"], signal.SIGKILL)
        killed = row["ActorID"]

        def back() -> bool:
            rows = self.replicas()
            return len(rows) == REPLICAS and killed not in {r["ActorID"] for r in rows} and self._app_runs()

        return row["Name"].split("#")[1], row["Pid"], back

    def _kill_node(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        homes = {c.node_kind(c.actor(name)["Address"]["NodeID"]) for name in ENGINES}  # type: ignore[index]
        kind = rng.choice(sorted(homes))
        with_it = [r["Name"] for r in c.actors() if c.node_kind(r["Address"]["NodeID"]) == kind]
        pid = self.cluster.kill_node(kind)

        added: list[str] = []

        def back() -> bool:
            """Puts a new node in the dead one's place as soon as its death is declared, as an autoscaler does."""
            if not added and c.all_gpus() == len(NODES) - 1:
                self.cluster.add_node(kind)
                added.append(kind)
            return bool(added) and c.all_gpus() == len(NODES) and self._engines_up({}) and self._app_runs()

        return f"raylet with {', '.join(sorted(n.split('#')[1] if '#' in n else n for n in with_it))}", pid, back

    def _kill_head(self, rng: random.Random) -> tuple[str, int, Callable[[], bool]]:
        pid = self.cluster.kill_head(HEAD_AWAY_S)
        return "gcs_server", pid, lambda: len(c.bundles()) == 2 and self._engines_up({}) and self._app_runs()

    def _row_pid(self, name: str) -> int:
        row = c.actor(name)
        return int(row["Pid"]) if row is not None and row["State"] == "ALIVE" else 0

    def _other_pid(self, name: str, pid: int) -> bool:
        """Whether another process than `pid` answers for the actor."""
        return bool(ray.get(ray.get_actor(name, namespace=NAMESPACE).pid.remote(), timeout=10) != pid)

    def _engines_up(self, killed: dict[str, int]) -> bool:
        """Whether the pool has both engines and they and the trainer answer, from other processes than those killed."""
        if self.engines() != list(ENGINES):
            return False
        return all(self._other_pid(name, killed.get(name, 0)) for name in (*ENGINES, "base-trainer"))

    def _app_runs(self) -> bool:
        app = serve.status().applications[APP]
        return app.status == "RUNNING"

    # ---- one fault -------------------------------------------------------------------------------------------------

    @contextmanager
    def _activity(self, fault: Fault, tenants: Tenants) -> Iterator[Publisher | None]:
        """What shall be in flight, at a moment when it is."""
        with ExitStack() as stack:
            publisher = None
            if fault.activity == "stream":
                tenants.open_streams()
            if fault.activity == "publish":
                self._next_seed += 1000
                publisher = Publisher("published", BASE_DIGEST, self._next_seed, self._acknowledged)
                stack.enter_context(publisher)
                c.wait_for(lambda: publisher.published, "a publish")
                c.wait_for(lambda: publisher.in_flight, "a publish in flight", every_s=0.0005)
            yield publisher

    def inject(self, fault: Fault, tenants: Tenants) -> dict[str, Any]:
        """One fault from the kill to the end of everything it touched; its row."""
        rng = random.Random(f"{fault.setting}/{fault.index}")
        time.sleep(rng.uniform(0.0, 0.5))
        with self._activity(fault, tenants) as publisher:
            requests, streams = tenants.running()
            publishes = int(publisher is not None and publisher.in_flight)
            killed_s = time.monotonic()
            victim, pid, back = self.kill(fault, rng)
            try:
                c.wait_for(lambda: holds(back), f"{victim} to be back", RECOVER_S)
                outcome = "recovered"
            except TimeoutError as err:
                outcome = str(err)
            recovered_s = time.monotonic()
        met = tenants.touched(killed_s, recovered_s)
        try:
            c.wait_for(lambda: holds(lambda: not self.leaks()), "nothing to be leaked", LEAK_S)
            leaked: list[str] = []
        except TimeoutError:
            leaked = self.leaks()
        cut = [asked for asked in met if asked.outcome == "cut"]
        failed = [asked for asked in met if asked.outcome not in ("ok", "cut")]
        return {
            "setting": STAND_IN,
            "index": fault.index,
            "kind": fault.kind,
            "engine": "stand-in",
            "activity": fault.activity,
            "in_flight": {"requests": requests, "streams": streams, "publishes": publishes},
            "victim": victim,
            "pid": pid,
            "outcome": outcome,
            "recovery_s": round(recovered_s - killed_s, 3),
            "slowest_request_s": round(max((a.ended_s - a.started_s for a in met if not a.streamed), default=0.0), 3),
            "requests": len(met),
            "asked_again": sum(asked.attempts > 1 for asked in met),
            "failed_requests": len(failed),
            "failures": sorted({asked.why for asked in failed}),
            "cut_streams": len(cut),
            "cut_without_event": sum(not asked.event for asked in cut),
            "wrong_answers": sum(not asked.right for asked in met),
            "publishes": publisher.published if publisher else 0,
            "publishes_asked_again": publisher.asked_again if publisher else 0,
            "publishes_failed": publisher.failed if publisher else 0,
            "leaks": leaked,
        }


def holds(check: Callable[[], bool]) -> bool:
    """Whether the check says so; a part that cannot be asked just now does not hold."""
    try:
        return check()
    except (ray.exceptions.RayError, ValueError, KeyError, TypeError, TimeoutError):
        return False
