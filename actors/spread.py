"""Several engines of one base behind the face of one, for a job that has one trainer.

Rollouts are dealt out by prompt, so that the answers to one prompt share its cached keys and values. An adapter is loaded into
every engine before the call returns: whatever is sampled next may name it anywhere. An engine that is lost during a call is
left out, and its requests go to the others at once; one that has come (started again, or one more) takes part once it holds
every version that is in use. The first engine is the one the trainer shares a GPU with.

The parts are awaitable (actors/handles.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError

from epilora.errors import AdapterNotFound, BaseMismatch, EngineDead
from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt

logger = logging.getLogger(__name__)

LOST = (EngineDead, RayActorError)
Tensors = Mapping[str, Any]


class EngineSet:
    """See `actors.protocols.Engine`; drafts are not taken (their memory lies on one engine's GPU)."""

    def __init__(self, find: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """find: the engines that run now, the trainer's first: a key that is another after each start -> its part."""
        self._find = find
        self._parts: dict[str, Any] = {}
        self._held: dict[str, tuple[AdapterVersion, Tensors]] = {}  # digest -> what an engine that comes must hold
        self._pins: dict[str, set[str]] = {}  # digest -> holders
        self._joining = asyncio.Lock()

    async def join(self) -> int:
        """Take in engines that have come and forget those that are gone; how many take part.

        Raises BaseMismatch if an engine has another base than the rest.
        """
        async with self._joining:
            found = await self._find()
            kept = {key: part for key, part in self._parts.items() if key in found}
            for key, part in found.items():
                if key in kept:
                    continue
                try:
                    info = await part.info()
                    for other in kept.values():
                        _same_base(info, await other.info())
                    for version, tensors in list(self._held.values()):
                        await part.load_adapter(version, tensors)
                        for holder in self._pins.get(version.digest, ()):
                            await part.pin_adapter(version.digest, holder)
                except LOST as err:
                    logger.warning("engine %s went away while it joined: %s", key, err)
                    continue
                kept[key] = part
            self._parts = {key: kept[key] for key in found if key in kept}
            return len(self._parts)

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Until `count` engines take part. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (found := await self.join()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{found} of {count} engines run after {timeout_s:g} s; lower scaling.min_engines, or raise ready_timeout_s"
                )
            await asyncio.sleep(0.2)

    def _first(self) -> Any:
        if not self._parts:
            raise EngineDead(
                "none of the base's engines is left; the pool starts them again, `resume=true` goes on then"
            )
        return next(iter(self._parts.values()))

    def _drop(self, key: str, err: BaseException) -> None:
        if self._parts.pop(key, None) is not None:
            logger.warning("engine %s is lost (%s); its requests go to the others", key, err)

    async def _everywhere(self, method: str, *args: Any, ignore: tuple[type[Exception], ...] = ()) -> list[Any]:
        """A method's results on all engines, those of lost ones left out. Raises what an engine that lives raised."""
        self._first()
        parts = dict(self._parts)
        answers = await asyncio.gather(
            *(getattr(part, method)(*args) for part in parts.values()), return_exceptions=True
        )
        kept = []
        for key, answer in zip(parts, answers, strict=True):
            if isinstance(answer, LOST):
                self._drop(key, answer)
            elif isinstance(answer, BaseException) and not isinstance(answer, ignore):
                raise answer
            else:
                kept.append(answer)
        self._first()
        return kept

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            """Of the engine that the trainer sits beside."""
            return await getattr(self._first(), name)(*args, **kwargs)

        return call

    async def info(self) -> EngineInfo:
        """The first engine's, after `join`."""
        await self.join()
        return await self._first().info()

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All of `requests`, each share submitted together to one engine; order kept."""
        results: list[Any] = [None] * len(requests)
        await self._deal(list(enumerate(requests)), results)
        return results

    async def _deal(self, numbered: list[tuple[int, GenerateRequest]], results: list[Any]) -> None:
        self._first()
        keys = list(self._parts)
        prompts: dict[Any, list[tuple[int, GenerateRequest]]] = {}
        for number, request in numbered:
            prompts.setdefault((request.prompt, request.adapter), []).append((number, request))
        shares: list[list[tuple[int, GenerateRequest]]] = [[] for _ in keys]
        for group in prompts.values():
            min(shares, key=len).extend(group)
        failed = await asyncio.gather(
            *(self._share(key, share, results) for key, share in zip(keys, shares, strict=True) if share),
            return_exceptions=True,
        )
        for err in failed:
            if isinstance(err, BaseException):
                raise err

    async def _share(self, key: str, share: list[tuple[int, GenerateRequest]], results: list[Any]) -> None:
        part = self._parts.get(key)
        try:
            if part is None:
                raise EngineDead(f"engine {key} was lost")
            answers = await part.generate([request for _, request in share])
        except LOST as err:
            self._drop(key, err)
            await self._deal(share, results)
            return
        for (number, _), answer in zip(share, answers, strict=True):
            results[number] = answer

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._everywhere("abort", request_ids)

    # ---- adapters -------------------------------------------------------------------------------------------------

    async def load_adapter(self, version: AdapterVersion, tensors: Tensors) -> LoadReceipt:
        """Into every engine. The receipt of one whose slot reads back other bytes, if there is one; else the first's."""
        await self.join()
        receipts = await self._everywhere("load_adapter", version, tensors)
        self._held[version.digest] = (version, tensors)
        return next((r for r in receipts if r.readback_digest != r.expected_digest), receipts[0])

    async def pin_adapter(self, digest: str, holder: str) -> None:
        self._pins.setdefault(digest, set()).add(holder)
        await self._everywhere("pin_adapter", digest, holder)

    async def unpin_adapter(self, digest: str, holder: str) -> None:
        self._pins.get(digest, set()).discard(holder)
        await self._everywhere("unpin_adapter", digest, holder)

    async def unload_adapter(self, digest: str) -> None:
        self._held.pop(digest, None)
        self._pins.pop(digest, None)
        await self._everywhere("unload_adapter", digest, ignore=(AdapterNotFound,))

    # ---- state ----------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        await self._everywhere("reset_prefix_cache")

    async def base_checksum(self) -> str:
        """Of the first; raises BaseMismatch if another engine's memory has another."""
        found = await self._everywhere("base_checksum")
        if len(set(found)) > 1:
            raise BaseMismatch(f"the base's codes differ between engines: {[digest[:12] for digest in found]}")
        return found[0]

    async def stats(self) -> EngineStats:
        """Counts summed; kv_usage: the fullest; loaded, drafts: what any engine holds."""
        found: list[EngineStats] = await self._everywhere("stats")
        summed = {
            field: sum(getattr(stats, field) for stats in found)
            for field in (
                "steps",
                "mixed_steps",
                "tenant_rows",
                "rollout_rows",
                "running",
                "waiting",
                "rollout_seats",
                "seat_cuts",
            )
        }
        return dataclasses.replace(
            found[0],
            **summed,
            kv_usage=max(stats.kv_usage for stats in found),
            loaded=tuple(dict.fromkeys(digest for stats in found for digest in stats.loaded)),
            drafts=tuple(dict.fromkeys(draft for stats in found for draft in stats.drafts)),
        )


def _same_base(one: EngineInfo, other: EngineInfo) -> None:
    if one.base_digest != other.base_digest:
        raise BaseMismatch(
            f"engine {one.name} holds base {one.base_digest[:12]}, {other.name} {other.base_digest[:12]}: rollouts of one step "
            "would come from two models"
        )
