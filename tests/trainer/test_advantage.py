"""Hand-worked advantages."""

from __future__ import annotations

import math

import pytest

from epilora.trainer.advantage import group_advantages


def test_group_norm() -> None:
    # mean 1/4, std with n - 1 = 1/2
    found = group_advantages([[1.0, 0.0, 0.0, 0.0]], "group_norm")
    assert found.values[0] == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])
    assert found.zero_variance == [False]


def test_mean_has_no_division() -> None:
    assert group_advantages([[1.0, 0.0, 0.0, 0.0]], "mean").values == [[0.75, -0.25, -0.25, -0.25]]


def test_leave_one_out() -> None:
    # 1 - 0 = 1; 0 - 1/3
    assert group_advantages([[1.0, 0.0, 0.0, 0.0]], "leave_one_out").values[0] == pytest.approx([1.0, *[-1 / 3] * 3])


@pytest.mark.parametrize("kind", ["group_norm", "mean", "leave_one_out"])
def test_equal_rewards_teach_nothing_and_are_counted(kind: str) -> None:
    found = group_advantages([[0.3, 0.3, 0.3], [0.0, 1.0]], kind)
    assert found.values[0] == [0.0, 0.0, 0.0]
    assert found.zero_variance == [True, False]


def test_messages_name_the_place() -> None:
    with pytest.raises(ValueError, match=r"group 1 \(problem 'q7'\): reward 2 is nan"):
        group_advantages([[0.0, 1.0], [0.0, 1.0, math.nan]], "mean", ["q6", "q7"])
    with pytest.raises(ValueError, match="group 0 has 1 rewards"):
        group_advantages([[1.0]], "mean")
    with pytest.raises(ValueError, match="allowed"):
        group_advantages([[1.0, 0.0]], "median")
