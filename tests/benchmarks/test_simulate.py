"""The simulation against times worked out by hand, and its rules against the policies it stands for."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

from actors.scaling import EngineLoad, ScalingLimits, ScalingState, decide
from benchmarks.simulate import gpu_setup, requests, up_seconds
from benchmarks.simulate_engine import RESULTS, Clock, Engine, LinearSteps, MeasuredSteps, Sequence
from benchmarks.simulate_system import Request, Setup, Store, System
from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterNotFound, NoFreeSlot
from epilora.fairness.counters import jain

STEPS = LinearSteps(1.0, 0.1)
PROBE_S = (1 + 0.1 * 16) + 3 * (1 + 0.1)  # 16 prompt tokens, then three tokens more
SMALL = Setup(
    engines=1, slots=2, seats=4, load_s=2.0, adapter_bytes=100, host_bytes=250, disk_bytes_s=100.0, link_bytes_s=200.0,
    before_s=0.25, after_s=0.5,
)  # fmt: skip


def engine(clock: Clock, **changes: int) -> Engine:
    return Engine(clock, STEPS, SlotMap(2), changes.get("seats", 4), changes.get("prompt_tokens", 100), load_s=2.0)


class Told:
    """When things happened to a sequence."""

    def __init__(self, clock: Clock, prompt: int, tokens: int, digest: str | None = None) -> None:
        self.first_s = self.done_s = -1.0
        self.sequence = Sequence(prompt, tokens, digest, self._first, self._done)
        self._clock = clock

    def _first(self) -> None:
        self.first_s = self._clock.now_s

    def _done(self) -> None:
        self.done_s = self._clock.now_s


def test_measured_steps_are_the_measured_ones_where_there_are_any() -> None:
    rows = json.loads((RESULTS / "kernels_h200.json").read_text())["rows"]
    steps = MeasuredSteps()
    for case, tokens, adapters in (("a32/s32", 32, 32), ("a8/s32", 32, 8), ("a32/s32", 128, 32)):
        measured = [
            statistics.median(row["samples_us"])
            for row in rows
            if (row["case"], row["provider"], row["M"]) == (f"layer/qwen3-8b/r64/{case}", "epilora", tokens)
        ]
        assert steps.step_s(tokens, adapters) == pytest.approx(36e-6 * statistics.median(measured))
    assert steps.step_s(32, 1) < steps.step_s(32, 4) < steps.step_s(32, 8) < steps.step_s(32, 20)
    assert steps.step_s(512, 1) < steps.step_s(1000, 1) < steps.step_s(3000, 1)


def test_sequences_share_steps() -> None:
    clock = Clock()
    host = engine(clock)
    one, two = Told(clock, 10, 4), Told(clock, 20, 2)
    clock.at(0.0, host.submit, one.sequence)
    clock.at(2.5, host.submit, two.sequence)
    clock.run()
    # Steps: prompt of one 0 to 2; alone 2 to 3.1; with the prompt of two 3.1 to 6.2; both 6.2 to 7.4.
    assert (one.first_s, two.first_s) == pytest.approx((2.0, 6.2))
    assert (one.done_s, two.done_s) == pytest.approx((7.4, 7.4))
    assert host.idle


def test_prompts_wait_for_seats_and_for_room_in_a_step() -> None:
    clock = Clock()
    host = engine(clock, seats=2, prompt_tokens=15)
    told = [Told(clock, 10, 2) for _ in range(3)]
    for one in told:
        host.submit(one.sequence)
    clock.run()
    # 10 tokens 0 to 2; the second prompt does not fit beside it: 2 to 4.1, when the first is done; then the third.
    assert [one.first_s for one in told] == pytest.approx([2.0, 4.1, 6.2])
    assert told[2].done_s == pytest.approx(7.3)


def test_loads_run_between_steps_and_slots_are_the_real_ones() -> None:
    clock = Clock()
    host = engine(clock)
    loaded: list[tuple[float, NoFreeSlot | None]] = []
    for digest in ("a", "b"):
        host.load(digest, lambda error: loaded.append((clock.now_s, error)))
    clock.run()
    assert loaded == [(2.0, None), (4.0, None)]
    holder, other = Told(clock, 10, 3, "a"), Told(clock, 10, 3, "b")
    host.submit(holder.sequence)
    host.submit(other.sequence)
    clock.at(4.5, host.load, "c", lambda error: loaded.append((clock.now_s, error)))
    clock.run()
    assert isinstance(loaded[-1][1], NoFreeSlot)  # at 7.0, the end of the running step, both are used
    assert loaded[-1][0] == 7.0
    host.load("c", lambda error: loaded.append((clock.now_s, error)))
    clock.run()
    with pytest.raises(AdapterNotFound):
        host.submit(Told(clock, 1, 1, "a").sequence)  # the least recently used made room
    assert host.slots.loaded() == ("b", "c")


def test_a_miss_pays_for_the_store_the_slot_and_the_probe_and_a_hit_does_not() -> None:
    system = System(SMALL, STEPS)
    miss, hit = Request(0.0, "t", "a", 10, 1), Request(50.0, "t", "a", 10, 1)
    system.offer([miss, hit])
    system.run(1000.0)
    read_s = 100 / 100 + 100 / 200
    assert miss.ttft_s == pytest.approx(0.25 + read_s + 2.0 + 2 * PROBE_S + 2.0 + 0.5)  # the base is probed, too
    assert hit.ttft_s == pytest.approx(0.25 + 2.0 + 0.5)
    assert (miss.tier, hit.tier, system.stores[0].cache.reads) == ("disk", "slot", 1)


def test_what_was_put_out_is_found_in_the_stores_memory_and_loaded_again() -> None:
    system = System(replace(SMALL, slots=1, routers=2), STEPS)
    asked = [Request(100.0 * i, "t", digest, 10, 1) for i, digest in enumerate(("a", "b", "a"))]
    system.offer(asked)  # the first and the third go to one router, the second to another
    system.run(1000.0)
    first, second = system.routers
    assert (first.loads, first.stale, second.loads, asked[2].tier, asked[2].attempts) == (2, 1, 1, "host", 1)
    assert asked[2].ttft_s == pytest.approx(0.25 + 0.5 + 2.0 + PROBE_S + 2.0 + 0.5)


def test_requests_for_one_load_share_it_and_a_slot_that_stays_taken_is_an_error() -> None:
    system = System(replace(SMALL, slots=1), STEPS)
    long, beside, other = (Request(at, "t", digest, 10, 60) for at, digest in ((0, "a"), (1, "a"), (20, "b")))
    system.offer([long, beside, other])
    system.run(1000.0)
    assert (beside.tier, other.failed) == ("engine", "no_free_slot")
    assert other.ttft_s is None
    assert long.done_s is not None


def test_turns_share_places_among_tenants_and_first_come_first_served_does_not() -> None:
    def shares(fair: bool) -> list[float]:
        system = System(replace(SMALL, max_active=1, fair=fair), STEPS)
        asked = [Request(0.0, "heavy", None, 10, 2) for _ in range(90)]
        asked += [Request(0.001, "light", None, 10, 2) for _ in range(90)]
        system.offer(asked)
        system.run(150.0)
        done = [request.tenant for request in asked if request.done_s is not None]
        return [float(done.count("heavy")), float(done.count("light"))]

    assert jain(shares(True)) > 0.99
    assert shares(False)[1] == 0


def test_scaling_adds_engines_one_start_after_the_other_and_lets_them_go() -> None:
    setup = replace(SMALL, slots=1, seats=1, max_engines=3, start_s=10.0, adapter_bytes=1)
    system = System(setup, STEPS, ScalingLimits(max_engines=3, up_s=5.0, down_s=20.0))
    system.offer([Request(0.5 * i, "t", None, 10, 2) for i in range(120)])
    system.run(400.0)
    grown = [(at, count) for at, count in system.engines_over_time if at < 60]
    assert [count for _, count in grown] == [1, 2, 3]
    assert grown[1][0] == pytest.approx(3 + 2 + 5 + 10, abs=2)  # a request waits longer than 2 s, for 5 s; a start
    assert grown[2][0] - grown[1][0] >= 15
    assert [count for _, count in system.engines_over_time][-2:] == [2, 1]
    assert 400 < system.engine_s < 3 * 400


def test_placement_fills_nodes_and_a_store_a_node_serves_its_own() -> None:
    system = System(replace(SMALL, engines=5, gpus_per_node=2, stores=0), STEPS)
    assert [engine.node for engine in system.engines.values()] == [0, 0, 1, 1, 2]
    assert [system.stores.index(system.store_of(engine)) for engine in system.engines.values()] == [0, 0, 1, 1, 2]


def test_a_warm_system_holds_the_most_asked_for() -> None:
    system = System(replace(SMALL, engines=2), STEPS)
    system.warm([str(i) for i in range(10)])
    assert [engine.slots.loaded() for engine in system.engines.values()] == [("0", "2"), ("1", "3")]
    asked = [Request(0.0, "t", str(i), 10, 1) for i in range(4)]
    system.offer(asked)
    system.run(100.0)
    assert {request.tier for request in asked} == {"slot"}


def test_engines_of_one_adapter_are_up_as_long_as_the_scaling_policy_says() -> None:
    times, adapters = np.array([1.0, 3.0, 4.0, 30.0, 90.0]), np.array([0, 1, 0, 0, 1])
    up_s, cold = up_seconds(times, adapters, 10.0, 100.0)
    assert (up_s, cold) == (13.0 + 10.0 + 10.0 + 10.0, 4)
    state, counted, engines = ScalingState(), 0, 0
    limits = ScalingLimits(to_zero_s=10.0)
    for now in range(100):  # adapter 0 alone: a request lasts for its second
        asked = [1.0, 4.0, 30.0].count(now) > 0
        engines = engines or int(asked)
        loads = [EngineLoad("e", running=int(asked))] * engines
        decision = decide(loads, limits, state, float(now), leased=False)
        state, engines = decision.state, decision.engines
        counted += engines
    assert counted == 13 + 10


def test_the_offered_requests_follow_zipfs_law() -> None:
    offered = requests(seconds=50, rate=100, adapters=1000, exponent=1.0, seed=1)
    first = sum(1 for request in offered if int(request.digest or "", 16) == 0)
    assert 4500 < len(offered) < 5500
    assert first / len(offered) == pytest.approx(1 / 7.485, rel=0.15)
    assert gpu_setup(1000).max_active == 64_000


def test_reads_share_a_stores_disk_and_link() -> None:
    clock, came = Clock(), list[tuple[str, str, float]]()
    store = Store(clock, SMALL)
    for digest in ("a", "b"):
        store.read(digest, lambda tier, digest=digest: came.append((digest, tier, clock.now_s)))
    clock.run()
    assert came == [("a", "disk", 1.5), ("b", "disk", 2.5)]  # the disk takes a second each
    for digest in ("a", "b"):
        store.read(digest, lambda tier, digest=digest: came.append((digest, tier, clock.now_s)))
    clock.run()
    assert came[2:] == [("a", "host", 3.0), ("b", "host", 3.5)]
