"""The EnginePool: a detached actor that owns engines, trainers, the store and their placement groups.

Parts belong to no job. A job asks the pool for a base with certain settings (`ensure`); the first one pays for the start,
later ones find it running. A lease per job keeps the pool informed; a lease whose driver died is taken back, with the pins
and the trainer session it left. Parts live until `shutdown`, or until scaling lets them go.

Once a second the pool looks at its engines: a dead one is started again (elsewhere, if its node died), and the scaling policy
(actors/scaling.py) decides how many there should be. What it knows is kept in Ray's own key-value store, so that a pool that
was killed comes back and takes up what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.experimental import internal_kv

from actors.adapter_store import NAMESPACE, start_store
from actors.launch import (
    BaseRequest,
    RunningEngine,
    as_future,
    clear,
    group_name,
    kill,
    replace_trainer,
    start_engine,
    stop_engine,
)
from actors.scaling import EngineLoad, LoadWatch, ScalingState, decide
from epilora import log
from epilora.errors import EngineDead, TrainerDead
from epilora.types import EngineInfo, EngineStats

__all__ = ["NAMESPACE", "POOL_NAME", "BaseRequest", "EnginePool", "get_or_create_pool"]

POOL_NAME = "pool"
TICK_S = 1.0
ANSWER_S = 10.0  # an engine that does not answer for so long is counted as silent, not as dead
RESTART_S = 300.0  # bound on starting an engine that nobody waits for
DRAIN_S = 60.0  # how long an engine that shall go may finish its requests
SAVED = b"epilora-pool"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A job's hold on bases. driver: Ray's id of the job's driver, "" if unknown. session: what it calls its trainer session
    and its pins, "" for none.
    """

    bases: tuple[str, ...]
    driver: str = ""
    session: str = ""


@dataclass
class Base:
    """A base the pool knows. engines: the first has the trainer; empty when scaled to zero. draining: names that take no new
    requests.
    """

    request: BaseRequest
    engines: list[RunningEngine] = field(default_factory=list)
    draining: set[str] = field(default_factory=set)
    state: ScalingState = field(default_factory=ScalingState)
    reason: str = "new"
    watch: LoadWatch = field(default_factory=LoadWatch)
    failure: str = ""  # why the last start failed; the next try waits until retry_at_s
    failures: int = 0
    retry_at_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    round: asyncio.Task[None] | None = None


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)
class EnginePool:
    """See the module's docstring. Its methods are async: a slow start of one base does not block the others."""

    def __init__(self, store_root: str) -> None:
        log.setup()
        self._store_root = store_root
        self._bases: dict[str, Base] = {}
        self._leases: dict[str, Lease] = {}
        self._store = start_store(store_root)
        self._background: set[asyncio.Task[Any]] = set()
        self._taken_up = asyncio.get_running_loop().create_task(self._take_up())
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> str:
        """Wait for the store; its folder."""
        await self._taken_up
        await self._store.ready.remote()
        return self._store_root

    # ---- what jobs and routers ask ---------------------------------------------------------------------------------

    async def ensure(
        self, request: BaseRequest, job: str, timeout_s: float, driver: str = "", session: str = ""
    ) -> EngineInfo:
        """The running base called `request.name`, started if need be, leased to `job`.

        driver, session: see Lease. Raises PlacementInfeasible (with demand and supply) if it cannot be placed within
        `timeout_s`; ValueError if a base of that name runs with other settings.
        """
        await self._taken_up
        base = self._bases.setdefault(request.name, Base(request))
        held = self._leases.get(job, Lease(()))
        # Before the start: the lease keeps the scaling policy from letting the engine go meanwhile.
        self._leases[job] = Lease(tuple(dict.fromkeys((*held.bases, request.name))), driver, session)
        try:
            async with self._alone(base, timeout_s):
                first = base.engines[0] if base.engines else None
                if first is not None and not await self._lives(first.engine.stats):
                    logger.warning("base %s lost its engine; starting it again", request.name)
                    await self._stop(base, first)
                elif first is not None and not await self._lives(first.trainer.ready):
                    await self._renew_trainer(base, first)
                if not base.engines:
                    base.request = request
                    await self._start_first(base, timeout_s)
                elif base.request != request:
                    raise ValueError(_difference(base.request, request))
        except BaseException:
            self._leases[job] = held
            if not base.engines and not self._leased(request.name):
                self._bases.pop(request.name, None)
            self._save()
            raise
        self._save()
        return base.engines[0].info

    async def engines(self, name: str) -> list[str]:
        """Actor names of the base's engines that take requests; empty if it is scaled to zero (`wake` brings it back).

        Raises ValueError for a base the pool does not know.
        """
        base = self._known(name)
        return [running.name for running in base.engines if running.name not in base.draining]

    async def starts(self, bases: Sequence[str]) -> dict[str, str]:
        """For routers: engine name -> which start of it, of the bases' engines that take requests.

        A base scaled to zero is named with the start "": a request for it brings it back. So is one the pool does not know,
        which may be an actor that somebody else runs.
        """
        found: dict[str, str] = {}
        for name in bases:
            base = self._bases.get(name)
            running = [e for e in base.engines if e.name not in base.draining] if base else []
            found |= {e.name: e.engine._actor_id.hex() for e in running} or {name: ""}
        return found

    async def wake(self, name: str, timeout_s: float = RESTART_S) -> list[str]:
        """As `engines`, after starting the base's first engine if there is none. Raises as `ensure`."""
        await self._taken_up
        base = self._known(name)
        async with self._alone(base, timeout_s):
            base.state = ScalingState(last_used_s=time.monotonic())
            if not base.engines:
                await self._start_first(base, timeout_s)
                self._save()
        return await self.engines(name)

    def _known(self, name: str) -> Base:
        if name not in self._bases:
            raise ValueError(f"no base {name!r}; the pool knows {sorted(self._bases)}; a job must ask for it first")
        return self._bases[name]

    async def release(self, job: str) -> None:
        """End a job's lease. Bases stay."""
        self._leases.pop(job, None)
        self._save()

    async def status(self) -> dict[str, Any]:
        """Bases (engines with where they run, what scaling thinks) and who leases them."""
        await self._taken_up
        return {
            "bases": {
                name: {
                    "engines": {
                        e.name: {"choice": e.choice.name, "start_s": e.started_s, "info": e.info} for e in base.engines
                    },
                    "draining": sorted(base.draining),
                    "scaling": base.reason,
                    "failure": base.failure,
                }
                for name, base in self._bases.items()
            },
            "leases": {job: list(lease.bases) for job, lease in self._leases.items()},
        }

    async def known(self, name: str) -> BaseRequest:
        """The request a base was started from. Raises ValueError for one the pool does not know."""
        return self._known(name).request

    async def drop(self, names: Sequence[str]) -> None:
        """Stop these bases and forget them, whoever leases them; unknown names are fine."""
        for name in names:
            base = self._bases.pop(name, None)
            if base is not None:
                async with self._alone(base, RESTART_S):
                    for running in list(base.engines):
                        await self._stop(base, running)
        self._save()

    async def pid(self) -> int:
        """Of the pool's process."""
        return os.getpid()

    async def shutdown(self) -> None:
        """Stop every base and the store, and remove the placement groups. Adapter versions stay on disk."""
        self._watching.cancel()
        await self.drop(list(self._bases))
        self._leases.clear()
        self._save()
        kill(self._store)

    # ---- starting and stopping -------------------------------------------------------------------------------------

    async def _start_first(self, base: Base, timeout_s: float) -> None:
        running = await start_engine(base.request, base.request.name, timeout_s, with_trainer=True)
        base.engines.insert(0, running)
        base.failure, base.failures = "", 0

    async def _stop(self, base: Base, running: RunningEngine) -> None:
        base.engines.remove(running)
        base.draining.discard(running.name)
        await stop_engine(running)

    @contextlib.asynccontextmanager
    async def _alone(self, base: Base, timeout_s: float) -> AsyncIterator[None]:
        """Hold the base's lock. A start that the pool itself is trying gives way: whoever asks has a bound of its own.

        Raises TimeoutError if another caller's start takes longer than `timeout_s`.
        """
        if base.round is not None and not base.engines:
            base.round.cancel()
        try:
            await asyncio.wait_for(base.lock.acquire(), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"base {base.request.name!r} is being started or stopped for another caller for more than {timeout_s:g} s; "
                "ask again, or raise ready_timeout_s"
            ) from None
        try:
            yield
        finally:
            base.lock.release()

    async def _renew_trainer(self, base: Base, running: RunningEngine) -> None:
        """Another trainer beside an engine that lives. If that fails, the engine goes too, and both start again."""
        logger.warning("base %s lost its trainer; starting another beside its engine", base.request.name)
        try:
            await replace_trainer(base.request, running, RESTART_S)
        except Exception:
            logger.exception(
                "base %s: no trainer beside engine %s; starting both again", base.request.name, running.name
            )
            await self._stop(base, running)

    async def _lives(self, call: Any) -> bool:
        """Whether the actor of this method answers; one that is merely busy lives."""
        try:
            await asyncio.wait_for(as_future(call.remote()), ANSWER_S)
        except (RayError, EngineDead, TrainerDead) as err:
            return not _means_death(err)
        except TimeoutError:
            logger.info("an actor that was asked whether it lives is busy")
        return True

    async def _trainer_lives(self, running: RunningEngine) -> bool:
        """Whether an engine's trainer runs and has all its ranks; so does one that was never wanted."""
        if running.trainer is None:
            return True
        return not _is_dead(running.trainer) and await self._lives(running.trainer.ready)

    def _leased(self, name: str) -> bool:
        return any(name in lease.bases for lease in self._leases.values())

    # ---- watching --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        await self._taken_up
        while True:
            await asyncio.sleep(TICK_S)
            await self._guarded(self._take_back_leases(), "leases")
            for name, base in list(self._bases.items()):
                if base.round is None or base.round.done():
                    base.round = self._spawn(self._guarded(self._look_at(base), name))

    async def _guarded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """The pool outlives what goes wrong with one base: it is logged, and tried again in the next round."""
        try:
            await work
        except Exception:
            logger.exception("the pool's round for %s failed; the next one is in %.0f s", what, TICK_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _look_at(self, base: Base) -> None:
        """Stop engines that died, start another trainer for one that died alone, then scale; the first engine comes back by
        the policy's lower bound.
        """
        if base.lock.locked():
            return  # it is being started or stopped
        loads, dead = await self._loads(base)
        alone = [running for running in base.engines if not await self._trainer_lives(running)]
        async with base.lock:
            for running in [e for e in dead if e in base.engines]:
                logger.warning("engine %s died", running.name)
                # The first one's trainer goes with it: it maps the dead engine's weights.
                await self._stop(base, running)
            for running in [e for e in base.engines if e in alone]:
                await self._renew_trainer(base, running)
            if any(running.name in base.draining for running in base.engines):
                return
            name, now = base.request.name, time.monotonic()
            loads = [load for load in loads if load.name in {running.name for running in base.engines}]
            decision = decide(loads, base.request.scaling, base.state, now, leased=self._leased(name))
            base.state, base.reason = decision.state, decision.reason
            if decision.engines > len(base.engines) and now >= base.retry_at_s:
                await self._add(base, decision.reason)
            elif decision.engines < len(base.engines):
                self._let_go(base, base.engines[-1], decision.reason)

    async def _loads(self, base: Base) -> tuple[list[EngineLoad], list[RunningEngine]]:
        """What each engine reports, and which ones are dead. One that does not answer counts as busy."""
        loads, dead = [], []
        for running in list(base.engines):
            try:
                stats = await asyncio.wait_for(as_future(running.engine.stats.remote()), ANSWER_S)
                loads.append(self._load(base, running, stats))
            except (RayError, EngineDead, TimeoutError) as err:
                if _means_death(err) or _is_dead(running.engine):
                    dead.append(running)
                    continue
                logger.warning("engine %s gives no statistics: %s", running.name, type(err).__name__)
                loads.append(EngineLoad(running.name, slots=running.info.max_loras, running=1))
        return loads, dead

    def _load(self, base: Base, running: RunningEngine, stats: EngineStats) -> EngineLoad:
        return base.watch.load(
            running.name,
            stats.loaded,
            slots=running.info.max_loras,
            running=stats.running,
            waiting=stats.waiting,
            kv_share=stats.kv_usage,
            now_s=time.monotonic(),
        )

    async def _add(self, base: Base, reason: str) -> None:
        """One engine more. What fails is kept for the status, and tried again after a pause that doubles."""
        name = base.request.name
        taken = {running.name for running in base.engines}
        logger.info("base %s: one engine more (%s)", name, reason)
        try:
            if name not in taken:
                await self._start_first(base, RESTART_S)
            else:
                free = next(f"{name}.{i}" for i in range(1, len(taken) + 2) if f"{name}.{i}" not in taken)
                base.engines.append(await start_engine(base.request, free, RESTART_S, with_trainer=False))
            base.failure, base.failures = "", 0
        except Exception as err:
            base.failure, base.failures = f"{type(err).__name__}: {err}", base.failures + 1
            pause_s = min(60.0, 2.0**base.failures)
            base.retry_at_s = time.monotonic() + pause_s
            logger.exception("base %s: no engine more; the next try is in %.0f s", name, pause_s)
        self._save()

    def _let_go(self, base: Base, running: RunningEngine, reason: str) -> None:
        """Take an engine out of service and stop it when its requests are done."""
        logger.info("base %s: engine %s goes (%s)", base.request.name, running.name, reason)
        base.draining.add(running.name)

        self._spawn(self._guarded(self._drain(base, running), running.name))

    async def _drain(self, base: Base, running: RunningEngine) -> None:
        deadline = time.monotonic() + DRAIN_S
        try:
            while time.monotonic() < deadline:
                stats = await asyncio.wait_for(as_future(running.engine.stats.remote()), ANSWER_S)
                if stats.running + stats.waiting == 0:
                    break
                await asyncio.sleep(0.2)
        except (RayError, TimeoutError) as err:
            logger.warning("engine %s did not drain: %s", running.name, type(err).__name__)
        async with base.lock:
            if running in base.engines:
                await self._stop(base, running)
        self._save()

    async def _take_back_leases(self) -> None:
        """End leases whose driver died, with the pins and the session it left behind."""
        if not any(lease.driver for lease in self._leases.values()):
            return
        dead = {job["JobID"] for job in ray._private.state.jobs() if job["IsDead"]}
        for job, lease in list(self._leases.items()):
            if lease.driver not in dead:
                continue
            logger.warning("job %s died without ending its lease; taking it back", job)
            self._leases.pop(job)
            self._save()
            for name in lease.bases:
                for running in self._bases[name].engines if name in self._bases else []:
                    await self._tidy(running, lease.session)

    async def _tidy(self, running: RunningEngine, session: str) -> None:
        if not session:
            return
        try:
            stats = await asyncio.wait_for(as_future(running.engine.stats.remote()), ANSWER_S)
            for digest in stats.loaded:
                await asyncio.wait_for(as_future(running.engine.unpin_adapter.remote(digest, session)), ANSWER_S)
            if running.trainer is not None:
                await asyncio.wait_for(as_future(running.trainer.close_session.remote(session)), 60)
        except (RayError, TimeoutError) as err:
            logger.warning("engine %s: session %s not tidied (%s)", running.name, session, type(err).__name__)

    # ---- surviving its own death -----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Requests, engines' names and leases, for a pool that takes over."""
        bases = {
            name: (base.request, [(e.name, e.choice, e.started_s) for e in base.engines])
            for name, base in self._bases.items()
        }
        internal_kv._internal_kv_put(SAVED, pickle.dumps((bases, self._leases)), namespace=NAMESPACE.encode())

    async def _take_up(self) -> None:
        """After a restart: adopt what still runs, give back the bundles of what does not."""
        saved = internal_kv._internal_kv_get(SAVED, namespace=NAMESPACE.encode())
        bases, self._leases = pickle.loads(saved) if saved else ({}, {})
        for name, (request, engines) in bases.items():
            base = self._bases[name] = Base(request)
            base.state = ScalingState(last_used_s=time.monotonic())
            for engine_name, choice, started_s in engines:
                await self._adopt(base, engine_name, choice, started_s)
        self._sweep()

    async def _adopt(self, base: Base, name: str, choice: Any, started_s: float) -> None:
        first = name == base.request.name
        try:
            engine = ray.get_actor(name, namespace=NAMESPACE)
            trainer = ray.get_actor(base.request.trainer_name, namespace=NAMESPACE) if first else None
            group = ray.util.get_placement_group(group_name(name))
            info = await asyncio.wait_for(as_future(engine.info.remote()), 60)
        except (ValueError, RayActorError, TimeoutError) as err:
            logger.warning("engine %s is gone (%s)", name, err)
            return
        base.engines.append(RunningEngine(name, group, choice, engine, trainer, info, started_s))
        logger.info("took up engine %s, which still runs", name)

    def _sweep(self) -> None:
        """Actors and placement groups of bases that nobody knows: left by a pool that died while it started or stopped one."""
        known = {running.name for base in self._bases.values() for running in base.engines}
        for row in ray.util.placement_group_table().values():
            name = row["name"].removeprefix(group_name(""))
            if row["state"] == "REMOVED" or not row["name"].startswith(group_name("")) or name in known:
                continue
            logger.warning("placement group %s belongs to no engine; removing it", row["name"])
            clear([], ray.util.get_placement_group(row["name"]))


def _is_dead(handle: Any) -> bool:
    """Whether Ray has given an actor up (one that cannot be reached for a moment is not dead)."""
    return ray._private.state.actors(handle._actor_id.hex()).get("State", "DEAD") == "DEAD"


def _means_death(err: Exception) -> bool:
    return isinstance(err, ActorDiedError | EngineDead | TrainerDead)


def _difference(running: BaseRequest, wanted: BaseRequest) -> str:
    have, want = vars(running), vars(wanted)
    parts = []
    for key in have:
        if have[key] == want[key]:
            continue
        if isinstance(have[key], Mapping):
            inner = sorted(k for k in {*have[key], *want[key]} if have[key].get(k) != want[key].get(k))
            parts += [f"{key}.{k}: runs with {have[key].get(k)!r}, asked {want[key].get(k)!r}" for k in inner]
        else:
            parts.append(f"{key}: runs with {have[key]!r}, asked {want[key]!r}")
    return f"base {wanted.name!r} runs with other settings ({'; '.join(parts)}); use them, or give engine.name another name"


def get_or_create_pool(store_root: str) -> Any:
    """Handle of the cluster's one pool."""
    return EnginePool.options(
        name=POOL_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0
    ).remote(store_root)
