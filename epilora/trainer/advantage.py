"""Advantages of a group of answers to one question. Plain Python numbers: groups are small.

group_norm      A_i = (r_i - mean) / (std + 1e-4)      GRPO, arXiv 2402.03300 (std with n - 1)
mean            A_i = r_i - mean                        Dr.GRPO, arXiv 2503.20783
leave_one_out   A_i = r_i - mean of the others          RLOO, arXiv 2402.14740  ( = n / (n - 1) times `mean`)

A group whose rewards are all equal teaches nothing: its advantages are all zero and it is counted, so that callers can
skip it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("group_norm", "mean", "leave_one_out")
STD_EPS = 1e-4


@dataclass(frozen=True)
class Advantages:
    """values: one list per group, in order. zero_variance: which groups have all rewards equal."""

    values: list[list[float]]
    zero_variance: list[bool]


def group_advantages(rewards: Sequence[Sequence[float]], kind: str, names: Sequence[str] | None = None) -> Advantages:
    """Advantages of every group.

    rewards: one sequence per group, at least two rewards each. names: problem ids for messages.
    Raises ValueError for an unknown kind, a group with fewer than two rewards, or a reward that is not finite (with its
    place).
    """
    if kind not in KINDS:
        raise ValueError(f"advantage={kind!r}; allowed: {KINDS}")
    values, flat = [], []
    for g, group in enumerate(rewards):
        name = f"group {g}" if names is None else f"group {g} (problem {names[g]!r})"
        if len(group) < 2:
            raise ValueError(f"{name} has {len(group)} rewards; an advantage compares at least 2")
        for i, reward in enumerate(group):
            if not math.isfinite(reward):
                raise ValueError(f"{name}: reward {i} is {reward}; rewards must be finite")
        if all(reward == group[0] for reward in group):
            flat.append(True)
            values.append([0.0] * len(group))
            continue
        flat.append(False)
        mean = math.fsum(group) / len(group)
        centred = [reward - mean for reward in group]
        if kind == "group_norm":
            scale = 1.0 / (math.sqrt(math.fsum(c * c for c in centred) / (len(group) - 1)) + STD_EPS)
        else:
            scale = len(group) / (len(group) - 1) if kind == "leave_one_out" else 1.0
        values.append([c * scale for c in centred])
    return Advantages(values, flat)
