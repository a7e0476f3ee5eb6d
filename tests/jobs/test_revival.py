"""A loop whose engine, trainer or store dies goes on at its last completed step, and ends where an undisturbed one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from test_loop import Engine, Store, Trainer, make

from actors.handles import LocalPart
from epilora.errors import EngineDead
from jobs.loop import RLLoop
from jobs.revival import MOST_FRUITLESS, means_death, train_through


class Mortal:
    """Stands before a part: the calls of `method` numbered in `at` raise `error` instead."""

    def __init__(self, part: Any, method: str, at: tuple[int, ...], error: Exception) -> None:
        self._part, self._method, self._at, self._error, self._calls = part, method, at, error, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name != self._method:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls in self._at:
                raise self._error
            return found(*args, **kwargs)

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

        return awaited if asyncio.iscoroutinefunction(found) else call


class System:
    """Revives by giving an empty engine and trainer in the place of what died; the store keeps what it had."""

    def __init__(self, store: Any, on_gpu: bool = False) -> None:
        self.store, self._on_gpu = LocalPart(store), on_gpu
        self.revived = 0
        self.engines: list[Engine] = []

    async def revive(self) -> None:
        self.revived += 1
        self.engines.append(Engine())
        trainer = Trainer()
        trainer.on_gpu = self._on_gpu
        self.engine, self.trainer = LocalPart(self.engines[-1]), LocalPart(trainer)


async def start_and_train(loop: RLLoop, system: System) -> int:
    await loop.start()
    return await train_through(loop, system)


def whole(folder: Path) -> tuple[str, list[bytes]]:
    """Digest of the policy and the checkpoints of a run nothing happened to."""
    loop, *_ = make(folder, "rl.keep_checkpoints=100")
    asyncio.run(start_and_train(loop, System(Store())))
    return loop.policy.version.digest, checkpoints(folder)


def checkpoints(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("checkpoints/step-*/*"))]


@pytest.mark.parametrize(
    ("part", "method", "at", "resumed"),
    [
        ("engine", "generate", (3,), 2),  # the third step's sampling: two are done
        ("trainer", "train_rl", (4,), 3),
        ("store", "publish", (3,), 1),  # the first version is the initial one, the third the second step's
        ("engine", "load_adapter", (3,), 1),
        ("trainer", "state", (4,), 2),  # the third step is recorded but not saved: it is repeated
    ],
)
def test_it_goes_on_at_the_last_completed_step(
    tmp_path: Path, part: str, method: str, at: tuple[int, ...], resumed: int
) -> None:
    parts = {"engine": Engine(), "trainer": Trainer(), "store": Store()}
    store = parts["store"]
    parts[part] = Mortal(parts[part], method, at, ActorDiedError())
    loop, *_, records = make(tmp_path / "cut", "rl.keep_checkpoints=100", parts=tuple(parts.values()))
    system = System(store)
    assert asyncio.run(start_and_train(loop, system)) == system.revived == 1
    steps = [step for step, _ in records]
    recorded = steps.index(resumed + 1)
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert steps[recorded:][0] == resumed + 1
    assert loop.policy is not None
    digest, kept = whole(tmp_path / "whole")
    assert loop.policy.version.digest == digest
    assert checkpoints(tmp_path / "cut") == kept
    assert set(system.engines[-1].loaded) == {digest}


@pytest.mark.parametrize(("method", "resumed"), [("load_draft", 1), ("seal_draft", 1), ("generate", 2)])
def test_on_a_gpu_what_is_not_durable_yet_is_made_again(tmp_path: Path, method: str, resumed: int) -> None:
    trainer, store = Trainer(), Store()
    trainer.on_gpu = True
    engine = Mortal(Engine(), method, (3,), ActorDiedError())
    loop, *_, records = make(tmp_path / "cut", "rl.keep_checkpoints=100", parts=(engine, trainer, store))
    system = System(store, on_gpu=True)
    assert asyncio.run(start_and_train(loop, system)) == 1
    steps = [step for step, _ in records]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert steps.count(resumed + 1) == 1 + (method == "seal_draft")  # recorded, then found not to be durable
    assert loop.policy is not None
    digest, kept = whole(tmp_path / "whole")
    assert loop.policy.version.digest == digest
    assert checkpoints(tmp_path / "cut") == kept


def test_a_step_that_kills_again_and_again_ends_the_job(tmp_path: Path) -> None:
    engine = Mortal(Engine(), "generate", (2,), EngineDead("the step loop failed"))
    loop, *_ = make(tmp_path, parts=(engine, Trainer(), Store()))
    system = System(Store())
    system.revive = lambda: _again(system, loop)  # type: ignore[method-assign]
    with pytest.raises(EngineDead):
        asyncio.run(start_and_train(loop, system))
    assert system.revived == MOST_FRUITLESS  # the first death came after a completed step
    assert loop.step == 1


async def _again(system: System, loop: RLLoop) -> None:
    """Every successor dies at its first batch too."""
    system.revived += 1
    system.engine = LocalPart(Mortal(Engine(), "generate", (1,), EngineDead("the step loop failed")))
    system.trainer, system.store = LocalPart(Trainer()), loop._store


def test_an_error_of_a_living_part_is_not_survived(tmp_path: Path) -> None:
    loop, *_ = make(
        tmp_path, parts=(Mortal(Engine(), "generate", (2,), ValueError("no such token")), Trainer(), Store())
    )
    system = System(Store())
    with pytest.raises(ValueError, match="no such token"):
        asyncio.run(start_and_train(loop, system))
    assert system.revived == 0
    task_error = RayTaskError("generate", "Traceback", ValueError("no such token"))
    assert [means_death(err) for err in (task_error, ActorDiedError(), EngineDead("x"))] == [False, True, True]
