"""The EnginePool: a detached actor that owns engines, trainers, the store and their placement groups.

Parts belong to no job. A job asks the pool for a base with certain settings (`ensure`); the first one pays for the start,
later ones find it running. A lease per job keeps the pool informed; parts live until `shutdown`.

All waits are bounded: what cannot be placed fails with what was asked against what is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.adapter_store import NAMESPACE, start_store
from actors.engine import EngineActor
from actors.trainer import TrainerActor
from epilora import log
from epilora.errors import PlacementInfeasible
from epilora.types import EngineInfo

POOL_NAME = "pool"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseRequest:
    """One base to run: an engine, the trainer beside it and the bundle both live in.

    settings: what must be equal for two jobs to share the base. bundle: resources of the one bundle, e.g. {"CPU": 1} or
    {"GPU": 1}. engine_options, trainer_options: Ray actor options (num_gpus, num_cpus). environment: variables of both processes.
    """

    name: str
    trainer_name: str
    engine_factory: str
    engine_kwargs: Mapping[str, Any]
    trainer_factory: str
    trainer_kwargs: Mapping[str, Any]
    bundle: Mapping[str, float]
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    trainer_options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    bundle_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Base:
    """A running base."""

    request: BaseRequest
    group: PlacementGroup
    engine: Any
    trainer: Any
    info: EngineInfo
    started_s: float


def describe_supply() -> str:
    """Free and total resources of every node, one line each."""
    available = ray._private.state.available_resources_per_node()
    lines = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        free = available.get(node["NodeID"], {})
        shown = {k: f"{free.get(k, 0):g} of {v:g}" for k, v in sorted(node["Resources"].items()) if k in ("CPU", "GPU")}
        lines.append(
            f"  node {node['NodeID'][:8]} labels={node.get('Labels', {}).get('ray.io/accelerator-type', 'none')}: {shown}"
        )
    return "\n".join(lines)


@ray.remote(num_cpus=0, max_restarts=0)
class EnginePool:
    """See the module's docstring. Its methods are async: a slow start of one base does not block the others."""

    def __init__(self, store_root: str) -> None:
        log.setup()
        self._store_root = store_root
        self._bases: dict[str, Base] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._leases: dict[str, tuple[str, ...]] = {}
        self._store = start_store(store_root)

    async def ready(self) -> str:
        """Wait for the store; its folder."""
        await self._store.ready.remote()
        return self._store_root

    async def ensure(self, request: BaseRequest, job: str, timeout_s: float) -> EngineInfo:
        """The running base called `request.name`, started if need be, leased to `job`.

        Raises PlacementInfeasible (with demand and supply) if it cannot be placed within `timeout_s`; ValueError if a base
        of that name runs with other settings.
        """
        lock = self._starting.setdefault(request.name, asyncio.Lock())
        async with lock:
            base = self._bases.get(request.name)
            if base is not None and not await self._alive(base):
                logger.warning("base %s lost its engine or trainer; starting it again", request.name)
                await self._drop(request.name)
                base = None
            if base is None:
                base = await self._start(request, timeout_s)
                self._bases[request.name] = base
            elif base.request != request:
                raise ValueError(_difference(base.request, request))
        self._leases[job] = (*self._leases.get(job, ()), request.name)
        return base.info

    async def _start(self, request: BaseRequest, timeout_s: float) -> Base:
        start = time.monotonic()
        group = placement_group(
            [dict(request.bundle)],
            strategy="STRICT_PACK",
            name=f"base-{request.name}",
            lifetime="detached",
            bundle_label_selector=[dict(request.bundle_labels)] if request.bundle_labels else None,
        )
        try:
            await asyncio.wait_for(_as_future(group.ready()), timeout_s)
        except TimeoutError:
            remove_placement_group(group)
            raise PlacementInfeasible(
                f"base {request.name!r}: no node can hold bundle {dict(request.bundle)} with labels "
                f"{dict(request.bundle_labels) or 'any'} within {timeout_s:g} s. Supply:\n{describe_supply()}\n"
                "Free a node, lower the demand, or raise ready_timeout_s if nodes are still being added."
            ) from None
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        common = {
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": dict(request.environment)},
        }
        engine = EngineActor.options(name=request.name, **common, **request.engine_options).remote(
            request.engine_factory, dict(request.engine_kwargs)
        )
        trainer = TrainerActor.options(name=request.trainer_name, **common, **request.trainer_options).remote(
            request.trainer_factory, dict(request.trainer_kwargs)
        )
        try:
            info = await self._prepare(engine, trainer, max(1.0, timeout_s - (time.monotonic() - start)))
        except TimeoutError:
            _kill(engine, trainer)
            remove_placement_group(group)
            raise TimeoutError(
                f"base {request.name!r}: engine and trainer were placed but not ready within {timeout_s:g} s; "
                "raise ready_timeout_s, or look at the engine's log in Ray's session folder"
            ) from None
        except BaseException:
            _kill(engine, trainer)
            remove_placement_group(group)
            raise
        took = time.monotonic() - start
        logger.info("base %s: engine and trainer ready in %.1f s", request.name, took)
        return Base(request, group, engine, trainer, info, took)

    async def _prepare(self, engine: Any, trainer: Any, timeout_s: float) -> EngineInfo:
        """Wait for both processes and let the trainer map the engine's weights."""

        async def steps() -> EngineInfo:
            info = await engine.ready.remote()
            await trainer.attach.remote(await engine.export_weights.remote())
            return info

        return await asyncio.wait_for(steps(), timeout_s)

    async def _alive(self, base: Base) -> bool:
        try:
            await asyncio.wait_for(_as_future(base.engine.pid.remote()), 10)
            await asyncio.wait_for(_as_future(base.trainer.ready.remote()), 60)
        except ray.exceptions.RayActorError:
            return False
        return True

    async def _drop(self, name: str) -> None:
        base = self._bases.pop(name)
        try:
            await asyncio.wait_for(_as_future(base.engine.close.remote()), 10)
        except (TimeoutError, ray.exceptions.RayActorError) as err:
            logger.warning("base %s did not close by itself (%s); killing it", name, type(err).__name__)
        _kill(base.engine, base.trainer)
        remove_placement_group(base.group)

    async def release(self, job: str) -> None:
        """End a job's lease. Bases stay."""
        self._leases.pop(job, None)

    async def status(self) -> dict[str, Any]:
        """Running bases and who leases them."""
        return {
            "bases": {name: {"start_s": base.started_s, "info": base.info} for name, base in self._bases.items()},
            "leases": {job: list(names) for job, names in self._leases.items()},
        }

    async def shutdown(self) -> None:
        """Stop every base and the store, and remove the placement groups. Adapter versions stay on disk."""
        for name in list(self._bases):
            await self._drop(name)
        _kill(self._store)


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


def _kill(*actors: Any) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


async def _as_future(ref: Any) -> Any:
    return await ref


def get_or_create_pool(store_root: str) -> Any:
    """Handle of the cluster's one pool."""
    return EnginePool.options(
        name=POOL_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0
    ).remote(store_root)
