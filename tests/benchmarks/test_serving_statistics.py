"""Intervals and paired tests against worked or published examples."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving.statistics import mcnemar_exact_p, paired_difference, ratio_interval, wilson


def test_ratio_interval_holds_the_ratio_and_repeats():
    generator = np.random.default_rng(0)
    ours, others = generator.normal(8, 0.4, 200), generator.normal(10, 0.5, 300)
    ratio, low, high = ratio_interval(ours, others, 50)
    assert ratio == pytest.approx(np.median(ours) / np.median(others))
    assert low < 0.8 < high
    assert high - low < 0.03
    assert (ratio, low, high) == ratio_interval(ours, others, 50)
    with pytest.raises(ValueError, match="0 and 300 samples"):
        ratio_interval([], others, 50)


def test_mcnemar_exact_p_of_binomial_tails():
    assert mcnemar_exact_p(0, 0) == 1.0
    assert mcnemar_exact_p(5, 5) == 1.0
    assert mcnemar_exact_p(0, 6) == pytest.approx(2 / 2**6)
    assert mcnemar_exact_p(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar_exact_p(9, 1) == mcnemar_exact_p(1, 9)


def test_wilson_interval_of_a_published_example():
    low, high = wilson(81, 263)  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    with pytest.raises(ValueError, match="no trials"):
        wilson(0, 0)


def pairs(both: int, one: int, two: int, neither: int) -> tuple[list[bool], list[bool]]:
    first = [True] * (both + one) + [False] * (two + neither)
    second = [True] * both + [False] * one + [True] * two + [False] * neither
    return first, second


def test_paired_difference_of_a_published_example():
    # Newcombe 1998, statistics in medicine 17:2635, table II, method 10: 36/12/2/0 gives 0.2000 with 0.0569 to 0.3404
    difference, low, high = paired_difference(*pairs(36, 2, 12, 0))
    assert difference == pytest.approx(0.2)
    assert (round(low, 4), round(high, 4)) == (0.0569, 0.3404)


def test_paired_difference_edges():
    difference, low, high = paired_difference(*pairs(30, 0, 0, 20))
    assert difference == 0.0
    assert low < 0.0 < high
    with pytest.raises(ValueError, match="they are pairs"):
        paired_difference([True], [True, False])
