"""Which engine answers a request: policy and what it knows, in plain Python.

First engines that already hold the adapter (a request for the base fits all); among them those with few requests in
flight (within `slack` of the least); among those the one that has met most of the prompt, then the least busy, then the
first by name. An engine that holds the adapter but is much busier than the idlest one loses to it (`spread` requests
more), so that a popular adapter is replicated by demand.

A new copy goes to an engine near the idlest that holds fewest adapters. Idle engines are many on a large cluster: were the first of
them taken, it would get every load while the slots of the others stayed empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, Generic, TypeVar

from .prefixes import PrefixMap

DEAD_S = 5.0  # how long an engine that failed is left alone while there are others

_by_load = attrgetter("running", "name")


@dataclass
class Member:
    """An engine as a router sees it.

    resident: digests it is believed to hold -> what its load returned; running: this router's requests there, those that wait
    for a load included;
    start: which start of the engine this is, "" if nobody told.
    """

    name: str
    resident: dict[str, Any] = field(default_factory=dict)
    running: int = 0
    dead_until_s: float = 0.0
    start: str = ""


M = TypeVar("M", bound=Member)


def choose_engine(
    engines: Sequence[M],
    digest: str | None,
    matched: Callable[[M], int] = lambda engine: 0,
    *,
    spread: int = 32,
    slack: int = 4,
) -> M | None:
    """The engine to ask, None if there is none. digest: the adapter's, None for the base.

    engines: those that work; matched: how many blocks of the prompt one has met (asked of few).
    """
    if not engines:
        return None
    idlest = min(engines, key=_by_load)
    holders = engines if digest is None else [engine for engine in engines if digest in engine.resident]
    least = min((engine.running for engine in holders), default=inf)
    if least - idlest.running > spread:
        near = [engine for engine in engines if engine.running <= idlest.running + slack]
        return min(near, key=lambda engine: (len(engine.resident), engine.running, engine.name))
    near = [engine for engine in holders if engine.running <= least + slack]
    return min(near, key=lambda engine: (-matched(engine), engine.running, engine.name))


class Roster(Generic[M]):
    """The engines behind one router: which there are, which take requests, what each holds and has met."""

    def __init__(self, engines: Sequence[M]) -> None:
        self.engines: dict[str, M] = {engine.name: engine for engine in engines}
        self.draining: set[str] = set()
        self.leaving: set[str] = set()
        self._prefixes = PrefixMap()

    def working(self, now_s: float) -> list[M]:
        """Engines to choose from. Those that drain, leave or failed lately are not, unless that leaves none."""
        out = self.draining | self.leaving
        members = [engine for name, engine in self.engines.items() if name not in out] if out else []
        members = members or list(self.engines.values())
        return [engine for engine in members if now_s >= engine.dead_until_s] or members

    def choose(self, digest: str | None, keys: Sequence[int], now_s: float) -> M | None:
        """The engine to ask, which has met the prompt's blocks `keys` from now on; None if there is none."""
        prefixes = self._prefixes
        chosen = choose_engine(self.working(now_s), digest, lambda engine: prefixes.matched(engine.name, keys))
        if chosen is not None:
            prefixes.add(chosen.name, keys)
        return chosen

    def lost(self, engine: M, now_s: float) -> None:
        """It died or cannot be reached: what it held and had met is gone, and others are asked for a while."""
        engine.resident.clear()
        self._prefixes.forget(engine.name)
        if len(self.engines) > 1:
            engine.dead_until_s = now_s + DEAD_S

    def update(self, starts: Mapping[str, str], make: Callable[[str, str], M]) -> None:
        """The engines are these now: name -> which start of it, "" for one that does not run. New ones join, one started
        again is empty, others take nothing new and leave with their last request. make: (name, start) -> member.
        """
        for name, start in starts.items():
            known = self.engines.get(name)
            if known is None or known.start not in ("", start):
                self.engines[name] = make(name, start)
                self._prefixes.forget(name)
            else:
                known.start = start
        self.leaving = set(self.engines) - set(starts)
        for name in [name for name in self.leaving if not self.engines[name].running]:
            del self.engines[name]
            self.leaving.discard(name)
            self._prefixes.forget(name)
