"""The quality gate: hand-worked drifts and McNemar tails; what fails says why."""

from __future__ import annotations

import math

import pytest

from epilora.adapters.gate import GateLimits, Verdict, drift_check, one_sided_mcnemar, task_check


def test_drift_is_a_share_of_the_adapters_own_effect():
    check = drift_check([-2.0, -1.0], [-1.0, -2.0], [-1.1, -2.1])
    assert check.value == pytest.approx(0.1)
    assert check.passed
    worse = drift_check([-2.0, -1.0], [-1.0, -2.0], [-1.2, -2.2])
    assert not worse.passed
    assert "0.200 of the adapter's own effect 1" in worse.detail


def test_a_copy_that_is_the_base_again_fails():
    base, original = [-3.0, -2.0, -1.0], [-2.9, -2.1, -1.1]
    assert drift_check(base, original, base).value == pytest.approx(1.0)
    assert not drift_check(base, original, base).passed


def test_nothing_must_stay_nothing_and_nan_never_passes():
    assert drift_check([-1.0], [-1.0], [-1.0]).passed
    assert not drift_check([-1.0], [-1.0], [-1.001]).passed
    assert not drift_check([-1.0], [-2.0], [math.nan]).passed


def test_mcnemar_tail():
    assert one_sided_mcnemar(0, 0) == 1.0
    assert one_sided_mcnemar(5, 0) == pytest.approx(1 / 32)
    assert one_sided_mcnemar(3, 1) == pytest.approx(5 / 16)


def test_task_check_counts_losses_against_wins():
    original = [True] * 90 + [False] * 10
    assert task_check(original, original).passed
    lost_five = [False] * 5 + [True] * 85 + [False] * 10
    check = task_check(original, lost_five)
    assert check.value == pytest.approx(0.05)
    assert not check.passed
    assert "5 answers lost, 0 won of 100 (drop +5.00 points, p = 0.0312)" in check.detail
    assert task_check(original, [True] * 100).passed


def test_a_significant_small_drop_fails_too():
    original = [True] * 1000
    stored = [False] * 8 + [True] * 992
    assert not task_check(original, stored).passed
    assert task_check(original, stored, GateLimits(significance=0.001)).passed


def test_verdict_gives_the_reasons():
    good, bad = task_check([True], [True]), drift_check([-1.0], [-2.0], [-1.0])
    verdict = Verdict((good, bad))
    assert not verdict.accepted
    assert verdict.reasons == (bad.detail,)
    assert Verdict((good,)).accepted


def test_unequal_evidence_is_refused():
    with pytest.raises(ValueError, match="2 base, 1 original"):
        drift_check([-1.0, -1.0], [-1.0], [-1.0])
    with pytest.raises(ValueError, match="same problems"):
        task_check([], [])
