"""Which engine answers a request: pure policy, no Ray.

First engines that already hold the adapter (a request for the base fits all); among them those with few requests in
flight (within `slack` of the least); among those the one that has met most of the prompt, then the least busy, then the
first by name. An engine that holds the adapter but is much busier than the idlest one loses to it (`spread` requests
more), so that a popular adapter is replicated by demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineView:
    """What the router knows of an engine.

    resident: digests it holds; running: requests in flight there; matched: blocks of the prompt it has met.
    """

    name: str
    resident: frozenset[str] = frozenset()
    running: int = 0
    alive: bool = True
    matched: int = 0


def choose_engine(engines: Sequence[EngineView], digest: str | None, *, spread: int = 32, slack: int = 4) -> str | None:
    """Name of the engine to ask, None if none is alive. digest: the adapter's, None for the base."""
    alive = [engine for engine in engines if engine.alive]
    if not alive:
        return None
    idlest = min(alive, key=lambda engine: (engine.running, engine.name))
    candidates = [engine for engine in alive if digest is None or digest in engine.resident]
    if not candidates:
        return idlest.name
    least = min(engine.running for engine in candidates)
    if least - idlest.running > spread:
        return idlest.name
    near = [engine for engine in candidates if engine.running <= least + slack]
    return min(near, key=lambda engine: (-engine.matched, engine.running, engine.name)).name
