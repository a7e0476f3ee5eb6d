"""Which faults are injected, in which order: a seeded shuffle, so that a run that is continued goes on in the same order.

Two settings share the list. "stand-in": the real pool, store, router and actors in front of an engine that answers with its
adapter's digest (tests/actors/serving_fake.py), many tenants, three nodes that declare a GPU. "vllm": the real engine and
trainer on the shipped tiny model, under one RL job that runs through all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STAND_IN, VLLM = "stand-in", "vllm"
KINDS = ("engine", "trainer", "store", "router replica", "pool", "controller", "node", "head")
# setting -> kind -> activity -> faults
COUNTS = {
    STAND_IN: {
        "engine": {"requests": 4, "stream": 8, "publish": 4},
        "trainer": {"requests": 6, "stream": 6},
        "store": {"requests": 4, "publish": 14},
        "router replica": {"requests": 14, "stream": 12},
        "pool": {"requests": 12, "stream": 6},
        "controller": {"requests": 12, "stream": 6, "publish": 2},
        "node": {"requests": 6, "stream": 6, "publish": 4},
        "head": {"requests": 6, "stream": 6, "publish": 4},
    },
    VLLM: {
        "engine": {"rl step": 14},
        "trainer": {"rl step": 14},
        "store": {"rl step": 12},
        "pool": {"rl step": 12},
        "head": {"rl step": 10},
    },
}


@dataclass(frozen=True)
class Fault:
    """activity: what must be in flight when the process is killed; tenants' whole requests always are in "stand-in"."""

    index: int
    setting: str
    kind: str
    activity: str


def plan(setting: str, seed: int = 0) -> list[Fault]:
    """The setting's faults in order. Raises KeyError for an unknown setting."""
    drawn = [
        (kind, activity)
        for kind, activities in COUNTS[setting].items()
        for activity, count in activities.items()
        for _ in range(count)
    ]
    random.Random(f"{seed}/{setting}").shuffle(drawn)
    return [Fault(index, setting, kind, activity) for index, (kind, activity) in enumerate(drawn)]
