"""May a low-precision copy of an adapter be served instead of the original? Decided from measurements, never assumed.

Two checks, both must pass:

  drift  mean |log p_stored - log p_original| over fixed texts is at most `max_relative_drift` of what the adapter itself does to
         them, mean |log p_original - log p_base|. A conversion that undoes or drowns the adapter fails, however small its
         error looks beside the base model's weights.
  task   on the same problems, answers that the original got right and the stored copy wrong do not outnumber the reverse by more
         than chance (exact one-sided McNemar test at `significance`), nor cost more than `max_accuracy_drop`.

A copy that fails stays out: the original is served and the report says why. Pure functions over numbers; who measures them (an
engine that holds both) is the caller's business.
Source: the paper, section 3.1 (6 of 24 accuracy checks of stored adapters failed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GateLimits:
    """max_relative_drift: share of the adapter's own effect. max_accuracy_drop, significance: 0..1."""

    max_relative_drift: float = 0.15
    max_accuracy_drop: float = 0.02
    significance: float = 0.05


@dataclass(frozen=True)
class Check:
    """One measured figure against its limit; `detail` says it in words."""

    name: str
    value: float
    limit: float
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """All checks of one conversion. `accepted` only if every check passed."""

    checks: tuple[Check, ...]

    @property
    def accepted(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What failed, in words; empty if accepted."""
        return tuple(check.detail for check in self.checks if not check.passed)


def drift_check(
    base: Sequence[float], original: Sequence[float], stored: Sequence[float], limits: GateLimits | None = None
) -> Check:
    """base, original, stored: log-probabilities (nats) of the same tokens under the base, the adapter and its copy.

    Raises ValueError for unequal or no lengths. An adapter without any effect passes only with a copy without any.
    """
    limits = limits or GateLimits()
    if not base or not len(base) == len(original) == len(stored):
        raise ValueError(
            f"drift_check: {len(base)} base, {len(original)} original, {len(stored)} stored log-probabilities; needed: the same "
            "tokens under all three, at least one"
        )
    effect = _mean_distance(original, base)
    drift = _mean_distance(stored, original)
    if effect > 0:
        relative = drift / effect
    else:
        relative = 0.0 if drift == 0 else math.inf
    passed = relative <= limits.max_relative_drift  # False for NaN
    return Check(
        "drift",
        relative,
        limits.max_relative_drift,
        passed,
        f"mean |d log p| {drift:.4g} is {relative:.3f} of the adapter's own effect {effect:.4g}; allowed: {limits.max_relative_drift}",
    )


def task_check(original: Sequence[bool], stored: Sequence[bool], limits: GateLimits | None = None) -> Check:
    """original, stored: whether each of the same problems was answered rightly. Raises ValueError for unequal or no lengths."""
    limits = limits or GateLimits()
    if not original or len(original) != len(stored):
        raise ValueError(
            f"task_check: {len(original)} original, {len(stored)} stored answers; needed: the same problems"
        )
    lost = sum(o and not s for o, s in zip(original, stored, strict=True))
    won = sum(s and not o for o, s in zip(original, stored, strict=True))
    drop = (lost - won) / len(original)
    p = one_sided_mcnemar(lost, won)
    passed = drop <= limits.max_accuracy_drop and p >= limits.significance
    return Check(
        "task",
        drop,
        limits.max_accuracy_drop,
        passed,
        f"{lost} answers lost, {won} won of {len(original)} (drop {100 * drop:+.2f} points, p = {p:.3g}); allowed: drop <= "
        f"{100 * limits.max_accuracy_drop:g} points and p >= {limits.significance}",
    )


def one_sided_mcnemar(lost: int, won: int) -> float:
    """P(at least `lost` losses among the pairs that differ), were both directions equally likely; 1.0 where none differ."""
    differing = lost + won
    return sum(math.comb(differing, k) for k in range(lost, differing + 1)) / 2**differing


def _mean_distance(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
