"""The engines behind a router: which are up, which versions each holds, and how a version gets into one.

A version is loaded into an engine once however many ask for it, and used only if the engine read back from the slot
what was to lie there and a probe shows that the engine computes with it (probe.py). Where a trainer is resident, it is
asked in the background what the version must change; one that does not is taken out of service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epilora.errors import AdapterNotFound, NoFreeSlot
from epilora.types import AdapterVersion, EngineInfo, LoadReceipt

from .messages import bounded
from .metrics import ServingMetrics
from .openai_api import ApiError
from .ports import EngineGone, EnginePort, StorePort
from .probe import PROMPT, Probe, confirm, difference, probe_from_dict, run_probe
from .routing import Member, Roster
from .settings import CoreConfig

logger = logging.getLogger(__name__)

MAX_REFUSED = 1000
STATS_S = 2.0
RETRY_SLOT_S = 0.02
RETRY_ENGINE_S = 0.25
PREDICT_S = 900.0  # a trainer first ends the step it is at
_T = TypeVar("_T")


@dataclass(kw_only=True)
class FleetEngine(Member):
    """What is tracked of one engine. loading: one task per digest, shared by all who wait for it."""

    port: EnginePort
    info: EngineInfo | None = None
    loading: dict[str, asyncio.Task[LoadReceipt]] = field(default_factory=dict)
    base_probe: Probe | None = None
    refused: dict[str, str] = field(default_factory=dict)  # digest -> why it is not served here


class Fleet(Roster[FleetEngine]):
    """See the module's docstring. One event loop owns it."""

    def __init__(
        self,
        ports: Sequence[EnginePort],
        store: StorePort,
        *,
        config: CoreConfig,
        metrics: ServingMetrics,
        clock: Callable[[], float],
    ) -> None:
        super().__init__([FleetEngine(port.name, port=port) for port in ports])
        self._store, self._config, self._metrics, self._clock = store, config, metrics, clock
        self._background: set[asyncio.Task[Any]] = set()

    # --- what the engines are -------------------------------------------------------------------------------------

    async def info(self, engine: FleetEngine) -> EngineInfo:
        if engine.info is None:
            engine.info = await bounded(
                engine.port.info(), f"engine {engine.port.name}", self._config.timeouts.control_s
            )
        return engine.info

    async def any_info(self) -> EngineInfo:
        """Of the first engine that answers. Raises the last one's error if none does."""
        error: Exception = EngineGone("no engine is configured")
        for engine in self.engines.values():
            try:
                return await self.info(engine)
            except (EngineGone, ApiError) as err:
                error = err
        raise error

    def base_names(self, info: EngineInfo) -> tuple[str, ...]:
        """Every name the base answers to, configured ones first."""
        return tuple(dict.fromkeys((*self._config.base_names, info.model_name)))

    async def count(self) -> None:
        """Bring the figures of every engine and of the store into the metrics."""
        for name, engine in self.engines.items():
            self._metrics.engine(name, await self._figures(name, engine))
        try:
            stats = await bounded(self._store.call("stats"), "store (stats)", STATS_S)
        except Exception as err:
            logger.info("no statistics from the store: %s", err)
            self._metrics.store({"up": 0.0})
            return
        self._metrics.store({"up": 1.0, **{what: float(value) for what, value in vars(stats).items()}})

    async def _figures(self, name: str, engine: FleetEngine) -> dict[str, float]:
        try:
            stats = await bounded(engine.port.stats(), f"engine {name} (stats)", STATS_S)
            sizes = await bounded(self._store.call("content_bytes", stats.loaded), "store (content_bytes)", STATS_S)
        except Exception as err:
            logger.info("no statistics from engine %s: %s", name, err)
            return {"up": 0.0}
        values: dict[str, float] = {
            "up": 1.0,
            "draining": float(name in self.draining),
            "slots_used": len(stats.loaded),
            "slot_bytes": float(sum(sizes.values())),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_usage,
            "steps": stats.steps,
            "mixed_steps": stats.mixed_steps,
            "tenant_rows": stats.tenant_rows,
            "rollout_rows": stats.rollout_rows,
            "rollout_seats": stats.rollout_seats,
            "seat_cuts": stats.seat_cuts,
        }
        return values | {f"path_{path}": float(count) for path, count in stats.paths.items()}

    def follow(self, starts: Mapping[str, str], make: Callable[[str], EnginePort]) -> None:
        """As `update`. make: name -> port. Raises ValueError for no engine at all."""
        if not starts:
            raise ValueError("Fleet.follow: no engine is named; an engine that does not run is named with the start ''")
        self.update(starts, lambda name, start: FleetEngine(name, start=start, port=make(name)))

    # --- choosing and loading -------------------------------------------------------------------------------------

    async def engine_with(self, version: AdapterVersion | None, keys: Sequence[int] = ()) -> FleetEngine:
        """An engine that holds the version, loading it if need be; another one if the first dies meanwhile.

        keys: the prompt's blocks, for engines that have met them. Raises EngineGone, NoFreeSlot, AdapterRejected ...
        """
        return await self.once_up(lambda: self._one_with(version, keys))

    async def once_up(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """What `ask` gives; asked again while no engine answers, for at most `timeouts.revival_s`. Raises as `ask`."""
        deadline, pause_s = self._clock() + self._config.timeouts.revival_s, 0.0
        while True:
            try:
                return await ask()
            except (EngineGone, ApiError) as err:
                starting = isinstance(err, ApiError) and err.code == "timeout"  # an engine answers once it is up
                if not (starting or isinstance(err, EngineGone)) or self._clock() >= deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = RETRY_ENGINE_S

    async def _one_with(self, version: AdapterVersion | None, keys: Sequence[int]) -> FleetEngine:
        engine = self.choose(version.digest if version else None, keys, self._clock())
        if engine is None:
            raise EngineGone("no engine is alive; try again in a few seconds")
        try:
            await self.info(engine)  # known, unless the engine is new or was gone
        except EngineGone as err:
            self.forget(engine, version, err)
            raise
        if version is None:
            return engine
        deadline = self._clock() + self._config.timeouts.slot_s
        while True:
            engine.running += 1  # or all requests that come meanwhile would choose it too
            try:
                await self.load(engine, version)
                return engine
            except EngineGone as err:
                self.forget(engine, version, err)
                raise
            except NoFreeSlot:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(RETRY_SLOT_S)
            finally:
                engine.running -= 1

    async def load(self, engine: FleetEngine, version: AdapterVersion) -> LoadReceipt:
        """Load once however many ask; the load goes on if one who asked gives up."""
        receipt = engine.resident.get(version.digest)
        if receipt is not None:
            self._metrics.slot_hit()
            return receipt
        if version.digest in engine.refused:
            raise _not_applied(version, engine.refused[version.digest])
        task = engine.loading.get(version.digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load_now(engine, version))
            engine.loading[version.digest] = task
            task.add_done_callback(lambda done: _finish(engine.loading, version.digest, done))
        return await asyncio.shield(task)

    async def _load_now(self, engine: FleetEngine, version: AdapterVersion) -> LoadReceipt:
        start, outcome = self._clock(), "ok"
        try:
            receipt = await self._load_checked(engine, version)
        except Exception as err:
            outcome = (err.code if isinstance(err, ApiError) else None) or type(err).__name__
            raise
        finally:
            self._metrics.loaded(outcome, self._clock() - start)
        engine.resident[version.digest] = receipt
        return receipt

    async def _load_checked(self, engine: FleetEngine, version: AdapterVersion) -> LoadReceipt:
        """Load, compare what was read back, probe, and write it into the store's audit."""
        timeouts = self._config.timeouts
        receipt: LoadReceipt = await bounded(
            engine.port.load_adapter(version, self._store.tensors(version.digest)),
            f"loading {version.ref}",
            timeouts.load_s,
        )
        if receipt.digest != version.digest or receipt.readback_digest != receipt.expected_digest:
            raise ApiError(
                500,
                f"{version.ref} did not arrive intact in slot {receipt.slot}: read back {receipt.readback_digest[:12]},"
                f" expected {receipt.expected_digest[:12]}",
                type="server_error",
                code="load_corrupt",
            )
        result = await bounded(self._probe(engine, version), f"probing {version.ref}", timeouts.load_s)
        detail = {
            "engine": engine.port.name,
            "slot": receipt.slot,
            "modules": receipt.modules,
            "readback_digest": receipt.readback_digest,
            "probe_difference": result["difference_from_base"],
        }
        note = self._store.call("note", "load", actor="router", ref=version, detail=detail)
        await bounded(note, "store (note)", timeouts.control_s)
        self._in_background(self._confirm(engine, version, result))
        return receipt

    async def _probe(self, engine: FleetEngine, version: AdapterVersion) -> dict[str, Any]:
        """What the fixed prompt showed, as recorded. Raises ApiError if the version changes nothing.

        Recorded per version and base; on another base than it was trained on, with the drift from what it does there.
        """
        info = await self.info(engine)
        base = engine.base_probe  # kept here: the engine may be forgotten while it is asked
        if base is None:
            base = engine.base_probe = await run_probe(engine.port, None)
        try:
            found = await run_probe(engine.port, version.digest)
        except AdapterNotFound as err:
            raise NoFreeSlot(f"{version.ref} was put out of its slot before it was probed") from err
        if found == base:
            why = f"the {len(found.tokens)} probed tokens and their log-probabilities equal the base's exactly"
            if len(engine.refused) < MAX_REFUSED:
                engine.refused[version.digest] = why
            await engine.port.unload_adapter(version.digest)
            raise _not_applied(version, why)
        changes = difference(found, base)
        result = {**found.as_dict(), "difference_from_base": changes, "engine": info.activations, "dtype": info.dtype}
        if version.base_digest and version.base_digest != info.base_digest:
            home = await self._store.call("probe", version.digest, version.base_digest)
            result["drift"] = difference(found, probe_from_dict(home)) if home else None
        await self._store.call("record_probe", version.digest, info.base_digest, result, actor="router")
        return result

    async def _confirm(self, engine: FleetEngine, version: AdapterVersion, result: dict[str, Any]) -> None:
        """Ask the resident trainer what the version changes and add it to the record; refuse a version that does not."""
        port, digest = engine.port, version.digest
        sequences = [(PROMPT, tuple(result["tokens"]))]
        try:
            asked = port.predict(version, lambda: self._store.tensors(digest), sequences)
            predicted = await bounded(asked, f"the trainer beside {port.name}", PREDICT_S)
            if predicted is None:
                return
            mine = [(await port.score(sequences, adapter))[0] for adapter in (None, digest)]
            found = confirm((mine[0], mine[1]), (predicted[0][0], predicted[1][0]))
        except Exception as err:
            # The trainer cannot hold this adapter, it or the engine went away, or the slot was needed.
            logger.info("%s on %s: nothing was predicted: %s: %s", version.ref, port.name, type(err).__name__, err)
            self._metrics.predicted("unknown")
            return
        self._metrics.predicted("held" if found.holds else "missed")
        record = {**result, "prediction": found.as_dict()}
        if not found.holds:
            why = (
                f"the trainer predicts changes of up to {found.predicted:.3g} nats on the probed tokens, the engine's differ"
                f" from them by {found.error:.3g}, more than {found.allowed:.3g}"
            )
            logger.error("%s on %s: %s", version.ref, port.name, why)
            if len(engine.refused) < MAX_REFUSED:
                engine.refused[digest] = why
            engine.resident.pop(digest, None)
        try:
            info = await self.info(engine)
            await self._store.call("record_probe", digest, info.base_digest, record, actor="router")
            if not found.holds:
                await self._store.call("note", "refuse", actor="router", ref=version, detail=found.as_dict())
                await port.unload_adapter(digest)
        except Exception as err:
            logger.warning("%s: what was predicted could not be recorded: %s: %s", version.ref, type(err).__name__, err)

    def forget(self, engine: FleetEngine, version: AdapterVersion | None, err: Exception) -> None:
        """The engine let a version go (it will be loaded again), or is gone itself."""
        if isinstance(err, EngineGone):
            logger.warning("engine %s is gone: %s", engine.port.name, err)
            self.lost(engine, self._clock())
            engine.refused.clear()
            engine.info = engine.base_probe = None
        elif version is not None and engine.resident.pop(version.digest, None) is not None:
            self._metrics.slot_stale()

    def abort(self, engine: FleetEngine, request_id: str, engine_requests: Sequence[str]) -> None:
        """Tell the engine in the background that nobody reads these any more. request_id: of the client's request."""

        async def abort() -> None:
            try:
                await asyncio.wait_for(engine.port.abort(engine_requests), 10.0)
            except Exception as err:
                logger.warning("could not abort %s in engine %s: %s", request_id, engine.port.name, err)

        self._in_background(abort())

    async def settle(self) -> None:
        """Wait for what runs in the background now: aborts, predictions."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _finish(loading: dict[str, asyncio.Task[LoadReceipt]], digest: str, task: asyncio.Task[LoadReceipt]) -> None:
    loading.pop(digest, None)
    if not task.cancelled():
        task.exception()  # retrieved here in case everyone who waited has gone


def _not_applied(version: AdapterVersion, why: str) -> ApiError:
    return ApiError(
        409,
        f"{version.ref} is not served: {why}. Either it changes nothing (is its lora_B zero?) or the engine does not"
        " apply it; ask for the base model, or publish another version",
        code="adapter_not_applied",
        param="model",
    )
