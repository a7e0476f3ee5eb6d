"""Which engine answers a request: pure policy, no Ray.

First engines that already hold the adapter (a request for the base fits all), then the one with the fewest requests in
flight, then the first by name. An engine that holds the adapter but is much busier than the idlest one loses to it
(`spread` requests more), so that a popular adapter is replicated by demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineView:
    """What the router knows of an engine. resident: digests it holds; running: requests in flight there."""

    name: str
    resident: frozenset[str] = frozenset()
    running: int = 0
    alive: bool = True


def choose_engine(engines: Sequence[EngineView], digest: str | None, *, spread: int = 32) -> str | None:
    """Name of the engine to ask, None if none is alive. digest: the adapter's, None for the base."""
    alive = [engine for engine in engines if engine.alive]
    if not alive:
        return None
    idlest = min(alive, key=lambda engine: (engine.running, engine.name))
    if digest is None:
        return idlest.name
    holders = [engine for engine in alive if digest in engine.resident]
    if not holders:
        return idlest.name
    best = min(holders, key=lambda engine: (engine.running, engine.name))
    return idlest.name if best.running - idlest.running > spread else best.name
