"""Start and stop one base: a placement group, an engine in it, and a trainer that maps the engine's weights.

On one GPU the two halve a bundle {GPU: 1}. A tensor-parallel pair is one bundle {GPU: 2} that the engine takes whole; the
trainer takes none of Ray's GPUs and gets the engine's devices by UUID, so it starts after the engine. All waits are bounded,
and whatever fails leaves no actor and no placement group behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.adapter_store import NAMESPACE
from actors.engine import EngineActor
from actors.placement import Choice, NodeView, explain, first_that_fits, waits
from actors.scaling import ScalingLimits
from actors.trainer import TrainerActor
from epilora.errors import PlacementInfeasible
from epilora.gpus import visible_device
from epilora.quant.manifest import WeightManifest
from epilora.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseRequest:
    """One base to run: an engine, the trainer beside it and the bundle both live in.

    engine_kwargs, trainer_kwargs: what must be equal for two jobs to share the base. bundle: resources of the one bundle,
    e.g. {"CPU": 1} or {"GPU": 1}. engine_options, trainer_options: Ray actor options (num_gpus, num_cpus). environment:
    variables of both processes. choices: kinds of node that may run it, best first. scaling: how many engines it may have;
    those beyond the first serve only and have no trainer.
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
    choices: tuple[Choice, ...] = (Choice(),)
    scaling: ScalingLimits = field(default_factory=ScalingLimits)

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError(f"base {self.name!r}: choices is empty; give at least Choice(), any node")


@dataclass
class RunningEngine:
    """An engine that runs, and where. trainer: None for an engine that only serves."""

    name: str
    group: PlacementGroup
    choice: Choice
    engine: Any
    trainer: Any
    info: EngineInfo
    started_s: float


def live_nodes() -> list[NodeView]:
    """Live nodes with what they have and what is free."""
    free = ray._private.state.available_resources_per_node()
    return [
        NodeView(node["NodeID"], node.get("Labels", {}), node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


async def start_engine(request: BaseRequest, name: str, timeout_s: float, *, with_trainer: bool) -> RunningEngine:
    """Place and start one engine of `request` under the actor name `name`.

    Raises PlacementInfeasible (demand and supply) or TimeoutError after `timeout_s`, or whatever engine or trainer raised.
    """
    start = time.monotonic()
    choice, group = await _place(request, name, timeout_s)
    started: list[Any] = []
    try:
        left = max(1.0, timeout_s - (time.monotonic() - start))
        engine, trainer, info = await asyncio.wait_for(_fill(request, name, choice, group, started, with_trainer), left)
    except TimeoutError:
        clear(started, group)
        raise TimeoutError(
            f"base {name!r}: engine and trainer were placed on {choice.name} but not ready within {timeout_s:g} s; "
            "raise ready_timeout_s, or look at the engine's log in Ray's session folder"
        ) from None
    except BaseException:
        clear(started, group)
        raise
    took = time.monotonic() - start
    logger.info("engine %s on %s: ready in %.1f s", name, choice.name, took)
    return RunningEngine(name, group, choice, engine, trainer, info, took)


async def _place(request: BaseRequest, name: str, timeout_s: float) -> tuple[Choice, PlacementGroup]:
    """A ready placement group on the best kind of node that can be had in time."""
    fits = first_that_fits(request.choices, request.bundle, live_nodes())
    order = [(fits, timeout_s)] if fits else waits(request.choices, timeout_s)
    for choice, seconds in order:
        group = placement_group(
            [dict(request.bundle)],
            strategy="STRICT_PACK",
            name=group_name(name),
            lifetime="detached",
            bundle_label_selector=[dict(choice.labels)] if choice.labels else None,
        )
        try:
            await asyncio.wait_for(as_future(group.ready()), seconds)
            return choice, group
        except TimeoutError:
            remove_placement_group(group)
            logger.info("base %s: no %s within %.0f s", name, choice.name, seconds)
        except BaseException:
            remove_placement_group(group)
            raise
    raise PlacementInfeasible(
        f"base {name!r} could not be placed within {timeout_s:g} s\n"
        f"{explain(request.choices, request.bundle, live_nodes())}\n"
        "Free a node, lower the demand, allow other accelerator types, or raise ready_timeout_s if nodes are still being added."
    )


def group_name(engine: str) -> str:
    """Name of an engine's placement group."""
    return f"base-{engine}"


async def _fill(
    request: BaseRequest, name: str, choice: Choice, group: PlacementGroup, started: list[Any], with_trainer: bool
) -> tuple[Any, Any, EngineInfo]:
    """Engine and trainer in `group`; every actor made is appended to `started` at once."""
    await _names_free(name, *([request.trainer_name] if with_trainer else []))
    engine = EngineActor.options(
        name=name, **_common(group), runtime_env={"env_vars": dict(request.environment)}, **request.engine_options
    ).remote(request.engine_factory, {**request.engine_kwargs, "name": name, **choice.engine_kwargs})
    started.append(engine)
    if not with_trainer:
        return engine, None, await engine.ready.remote()

    # Where the trainer takes no GPU of Ray's, it gets the engine's devices, known once the engine is up; elsewhere both import
    # their libraries at the same time.
    trainer = None if _needs_uuids(request) else _start_trainer(request, group, started, {})
    info = await engine.ready.remote()
    manifests = await engine.export_weights.remote()
    if trainer is None:
        trainer = _start_trainer(request, group, started, _devices(name, manifests))
    await trainer.attach.remote(manifests)
    return engine, trainer, info


async def replace_trainer(request: BaseRequest, running: RunningEngine, timeout_s: float) -> None:
    """Another trainer in the place of one that died, on the weights of its engine, which goes on serving meanwhile.

    What the dead one may have left released of the engine's KV cache is restored. Raises TimeoutError after `timeout_s`, or
    whatever engine or trainer raised; no trainer is left then.
    """
    kill(running.trainer)
    started: list[Any] = []

    async def start() -> Any:
        await _names_free(request.trainer_name)
        await running.engine.restore_kv.remote()
        manifests = await running.engine.export_weights.remote()
        devices = _devices(running.name, manifests) if _needs_uuids(request) else {}
        trainer = _start_trainer(request, running.group, started, devices)
        await trainer.attach.remote(manifests)
        return trainer

    try:
        running.trainer = await asyncio.wait_for(start(), timeout_s)
    except BaseException:
        kill(*started)
        raise


def _start_trainer(
    request: BaseRequest, group: PlacementGroup, started: list[Any], environment: Mapping[str, str]
) -> Any:
    """A trainer in the bundle, appended to `started`. environment: variables beside the request's own."""
    trainer = TrainerActor.options(
        name=request.trainer_name,
        **_common(group),
        runtime_env={"env_vars": {**request.environment, **environment}},
        **request.trainer_options,
    ).remote(request.trainer_factory, dict(request.trainer_kwargs))
    started.append(trainer)
    return trainer


def _common(group: PlacementGroup) -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }


def _needs_uuids(request: BaseRequest) -> bool:
    return request.bundle.get("GPU", 0) > 0 and not request.trainer_options.get("num_gpus", 0)


def _devices(name: str, manifests: Sequence[WeightManifest]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(_uuids(name, manifests))}


async def _names_free(*names: str, patience_s: float = 20.0) -> None:
    """Wait until no actor has these names: a killed one keeps its name for a moment."""
    deadline = time.monotonic() + patience_s
    for name in names:
        while True:
            try:
                ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"an actor {name!r} that this pool does not own runs in namespace {NAMESPACE!r}; stop it, or use another name"
                )
            await asyncio.sleep(0.1)


def _uuids(name: str, manifests: Sequence[WeightManifest]) -> list[str]:
    """UUIDs of the engine's devices by tensor-parallel rank, as CUDA_VISIBLE_DEVICES takes them."""
    uuids: list[str] = []
    for manifest in sorted(manifests, key=lambda manifest: manifest.tp_rank):
        found = {entry.values.location.gpu_uuid for entry in manifest.entries} - {""}
        if len(found) != 1:
            raise RuntimeError(
                f"engine {name!r}, rank {manifest.tp_rank}: its weights name the devices {sorted(found)}; a trainer that takes "
                "no GPU of Ray's needs exactly one GPU UUID a rank"
            )
        uuids += map(visible_device, found)
    return uuids


async def stop_engine(running: RunningEngine) -> None:
    """Close an engine, kill it and its trainer, and give its bundle back."""
    try:
        await asyncio.wait_for(as_future(running.engine.close.remote()), 10)
    except (TimeoutError, ray.exceptions.RayError) as err:
        logger.warning("engine %s did not close by itself (%s); killing it", running.name, type(err).__name__)
    clear([running.engine, running.trainer], running.group)


def clear(actors: list[Any], group: PlacementGroup) -> None:
    """Kill actors and give the bundle back."""
    kill(*actors)
    remove_placement_group(group)


def kill(*actors: Any) -> None:
    """Kill actors for good; None is skipped."""
    for actor in actors:
        if actor is not None:
            ray.kill(actor, no_restart=True)


async def as_future(ref: Any) -> Any:
    """An awaitable Ray reference as a coroutine."""
    return await ref
