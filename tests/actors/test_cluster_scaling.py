"""The scaling policy as a function: signals, patience, bounds, zero, and no flapping."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from actors.scaling import EngineLoad, LoadWatch, ScalingLimits, ScalingState, decide

LIMITS = ScalingLimits(min_engines=1, max_engines=3, up_s=5.0, down_s=60.0)
IDLE = EngineLoad("e", slots=8)


def run(
    loads: list[EngineLoad], limits: ScalingLimits, seconds: int, *, state=None, leased: bool = True, start: int = 0
):
    """Ask once a second; (second, engines, reason) of the first change, or None."""
    state = state or ScalingState(last_used_s=float(start))
    for second in range(start, start + seconds):
        decision = decide(loads, limits, state, float(second), leased=leased)
        state = decision.state
        if decision.engines != len(loads):
            return second, decision.engines, decision.reason
    return None


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (replace(IDLE, adapters=frozenset("abcdefgh")), "8 adapters asked for, 8 slots"),
        (replace(IDLE, waiting_s=2.5, running=3), "a request waits for 2.5 s"),
        (replace(IDLE, kv_share=0.95, running=3), "KV cache 95 % full"),
    ],
)
def test_each_signal_adds_one_engine_after_its_patience(load: EngineLoad, reason: str) -> None:
    assert run([load], LIMITS, 60) == (5, 2, reason)
    assert run([load], replace(LIMITS, max_engines=1), 60) is None


def test_signals_below_their_thresholds_and_short_bursts_do_nothing() -> None:
    quiet = EngineLoad("e", frozenset("abcdefg"), 8, waiting_s=2.0, kv_share=0.9, running=5)
    assert run([quiet], LIMITS, 600) is None
    state = ScalingState()
    busy = replace(IDLE, kv_share=0.99, running=1)
    for second in range(300):
        decision = decide([busy if second % 5 else IDLE], LIMITS, state, float(second), leased=True)
        state = decision.state
        assert decision.engines == 1


def test_an_idle_engine_goes_after_down_s_and_never_below_the_minimum() -> None:
    assert run([IDLE, IDLE], LIMITS, 200) == (60, 1, "1 engines carry the load")
    assert run([IDLE, IDLE], replace(LIMITS, min_engines=2), 200) is None
    assert run([IDLE], LIMITS, 10_000) is None


def test_an_engine_stays_if_the_rest_could_not_carry_its_load() -> None:
    half = EngineLoad("e", frozenset("abcd"), 8, kv_share=0.4, running=4)
    other = replace(half, adapters=frozenset("efgh"))
    assert run([half, other], LIMITS, 600) is None  # 8 adapters on 8 slots: pressed at once
    light = replace(half, adapters=frozenset("ab"), kv_share=0.1)
    assert run([light, light], LIMITS, 600) == (60, 1, "1 engines carry the load")


def test_what_let_an_engine_go_would_not_bring_it_back() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        loads = [
            EngineLoad(str(i), frozenset(rng.sample("abcdefghijklmnop", rng.randrange(9))), 8, rng.choice([0, 0.5, 3]),
                       rng.random(), rng.randrange(4))
            for i in range(rng.choice([2, 3]))
        ]  # fmt: skip
        first = decide(loads, LIMITS, ScalingState(spare_since_s=-1000.0), 0.0, leased=True)
        if first.engines != len(loads) - 1:
            continue
        merged = frozenset().union(*(load.adapters for load in loads))
        kv = sum(load.kv_share for load in loads) / first.engines
        rest = [replace(load, adapters=merged, kv_share=kv) for load in loads[: first.engines]]
        again = decide(rest, LIMITS, ScalingState(pressed_since_s=-1000.0), 0.0, leased=True)
        assert again.engines <= first.engines, (loads, again.reason)


def test_zero_needs_no_lease_no_request_and_time() -> None:
    limits = replace(LIMITS, to_zero_s=30.0)
    assert run([IDLE], limits, 200, leased=False) == (30, 0, "nobody asked for 30 s")
    assert run([IDLE], limits, 200, leased=True) is None
    assert run([replace(IDLE, running=1)], limits, 200, leased=False) is None
    assert run([IDLE], LIMITS, 200, leased=False) is None  # to_zero_s not set


def test_from_zero_a_lease_brings_the_minimum_back_and_nothing_else_does() -> None:
    limits = replace(LIMITS, min_engines=2, to_zero_s=30.0)
    assert decide([], limits, ScalingState(), 9.0, leased=False).engines == 0
    back = decide([], limits, ScalingState(), 9.0, leased=True)
    assert (back.engines, back.reason) == (2, "fewer than min_engines=2")


def test_a_base_that_may_not_go_to_zero_comes_back_without_a_lease() -> None:
    assert decide([], LIMITS, ScalingState(), 9.0, leased=False).engines == 1


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="min_engines=3, max_engines=2"):
        ScalingLimits(min_engines=3, max_engines=2)
    with pytest.raises(ValueError, match="min_engines=0"):
        ScalingLimits(min_engines=0)
    with pytest.raises(ValueError, match="spare_share=1"):
        ScalingLimits(spare_share=1.0)
    with pytest.raises(ValueError, match="kv_share=0"):
        ScalingLimits(kv_share=0)


def test_reports_become_loads_by_what_was_asked_for_lately_and_how_long_someone_waits() -> None:
    watch = LoadWatch()

    def load(now_s: float, loaded: str, running: int = 0, waiting: int = 0) -> EngineLoad:
        return watch.load("e", list(loaded), slots=4, running=running, waiting=waiting, kv_share=0.5, now_s=now_s)

    assert load(0.0, "ab") == EngineLoad("e", frozenset(), 4, 0.0, 0.5, 0)
    assert load(1.0, "ab", running=2, waiting=1) == EngineLoad("e", frozenset("ab"), 4, 0.0, 0.5, 3)
    assert load(4.0, "bc", running=1, waiting=1).waiting_s == 3.0
    assert load(31.5, "abc") == EngineLoad("e", frozenset("bc"), 4, 0.0, 0.5, 0)  # a was asked for 30.5 s ago
    assert load(34.0, "abc").adapters == frozenset()
