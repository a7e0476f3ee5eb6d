"""Intervals and tests for paired measurements. Plain Python and numpy; everything is seeded.

Percentile bootstrap (Efron 1979) for ratios of medians and percentiles; McNemar's exact test for paired right-or-wrong
answers; Newcombe's paired-difference interval (1998, method 10) for the difference of two paired proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BOOTSTRAP_DRAWS = 2000
Z95 = 1.959963984540054


def ratio_interval(
    ours: Sequence[float], others: Sequence[float], percentile: float, *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """(ratio, low, high): percentile of `ours` over that of `others`, with its bootstrap 95 % interval.

    ours, others: samples > 0, not paired. percentile: 0 to 100. Raises ValueError where a side has no samples.
    """
    if not len(ours) or not len(others):
        raise ValueError(f"ratio_interval: {len(ours)} and {len(others)} samples; both sides need at least one")
    a, b = np.asarray(ours, dtype=float), np.asarray(others, dtype=float)
    generator = np.random.default_rng(seed)
    tops = np.percentile(generator.choice(a, (draws, len(a))), percentile, axis=1)
    ratios = tops / np.percentile(generator.choice(b, (draws, len(b))), percentile, axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.percentile(a, percentile) / np.percentile(b, percentile)), float(low), float(high)


def mcnemar_exact_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test. only_first, only_second: pairs in which exactly that side was right."""
    discordant = only_first + only_second
    if not discordant:
        return 1.0
    tail = sum(math.comb(discordant, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2.0 * tail / 2.0**discordant)


def wilson(right: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion. Raises ValueError for no trials."""
    if of <= 0:
        raise ValueError("wilson: no trials")
    p, z2 = right / of, Z95 * Z95
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return middle - half, middle + half


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float, float]:
    """(difference, low, high) of the share right: second minus first over the same problems, with a 95 % interval.

    Raises ValueError where the two have different lengths or none.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"paired_difference: {len(first)} and {len(second)} answers; they are pairs")
    n = len(first)
    both = sum(a and b for a, b in zip(first, second, strict=True))
    one = sum(a and not b for a, b in zip(first, second, strict=True))
    two = sum(b and not a for a, b in zip(first, second, strict=True))
    neither = n - both - one - two
    p1, p2 = (both + one) / n, (both + two) / n
    (l1, u1), (l2, u2) = wilson(both + one, n), wilson(both + two, n)
    margin = (both + one) * (two + neither) * (both + two) * (one + neither)
    cross: float = both * neither - one * two
    if cross > n / 2:  # continuity correction of a positive correlation
        cross = cross - n / 2
    elif cross >= 0:
        cross = 0.0
    phi = cross / math.sqrt(margin) if margin else 0.0
    difference = p2 - p1
    low = difference - math.sqrt((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2)
    high = difference + math.sqrt((u2 - p2) ** 2 - 2 * phi * (u2 - p2) * (p1 - l1) + (p1 - l1) ** 2)
    return difference, low, high
