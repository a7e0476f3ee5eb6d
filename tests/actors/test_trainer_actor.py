"""The trainer's shell in a process of its own: jobs that call at once train in one step and get their own results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.trainer import TrainerActor
from epilora.models import TINY_ARITH
from epilora.trainer.local_base import make_local_base
from epilora.types import AdapterSpec, Rollout, RolloutGroup

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
SPEC = AdapterSpec(4, 8.0, ("all-linear",))


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(
        address="local",
        namespace="epilora",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
        _system_config={"prestart_worker_first_driver": False},
    )
    yield
    ray.shutdown()


def group(name: str, ids: tuple[int, ...], rewards: tuple[float, ...]) -> RolloutGroup:
    rollouts = [Rollout(name, ids, (3 + i, 4), (-2.0, -2.0), reward, ("v0",)) for i, reward in enumerate(rewards)]
    return RolloutGroup(name, tuple(rollouts))


def test_jobs_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = make_local_base(TINY_ARITH, tmp_path_factory.mktemp("base"))
    trainer = TrainerActor.remote("epilora.trainer.trainer:LoraTrainer", {})
    ray.get(trainer.attach.remote([base.manifest]), timeout=120)
    names = ["one", "two", "bad"]
    ray.get([trainer.open_session.remote(name, SPEC, {"lr": 1e-3}, 0) for name in names], timeout=60)
    rewards = {"one": (1.0, 0.0), "two": (0.0, 1.0, 1.0), "bad": (float("nan"), 0.0)}
    calls = {
        name: [trainer.train_rl.remote(name, [group(name, (5, 6), rewards[name])], {}) for _ in range(2)]
        for name in names
    }
    found = {name: ray.get(calls[name], timeout=60) for name in ("one", "two")}
    assert [m["sequences"] for m in found["one"]] == [2.0, 2.0]
    assert [m["sequences"] for m in found["two"]] == [3.0, 3.0]
    assert all(m["grad_norm"] > 0 for metrics in found.values() for m in metrics)
    with pytest.raises(ValueError, match=r"group 0 \(problem 'bad'\): reward 0 is nan"):
        ray.get(calls["bad"][0], timeout=60)
    assert ray.get(trainer.memory.remote(), timeout=60)["base_bytes"] == base.manifest.num_bytes
    ray.kill(trainer)
