"""Percentiles and intervals against hand-worked and published numbers."""

import pytest

from jobs.statistics import percentile, wilson_interval


def test_percentile_interpolates() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([10], 99) == 10
    assert percentile(list(range(101)), 99) == 99
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_wilson_interval() -> None:
    low, high = wilson_interval(8, 10)  # Wilson (1927), z = 1.96: 0.490 to 0.943
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    low, high = wilson_interval(0, 10)
    assert low == 0.0
    assert round(high, 3) == 0.278
