"""Virtual token counters: shares follow weights, idleness earns nothing, nobody waits below the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epilora.fairness.counters import TokenCounters, jain, service
from epilora.fairness.turns import TurnQueue
from epilora.serving.gate import FairGate


def run(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), 20))


async def contend(gate: FairGate, clients: dict[str, tuple[int, float, float]], turns: int) -> list[str]:
    """Order of service of `turns` requests. clients: name -> (requests waiting, cost of each, weight)."""
    blocker = await gate.enter("blocker", 0.0)
    order: list[str] = []

    async def ask(name: str, cost: float, weight: float) -> None:
        turn = await gate.enter(name, cost, weight)
        order.append(name)
        await asyncio.sleep(0)
        turn.finish(cost)

    tasks = [
        asyncio.create_task(ask(name, cost, weight))
        for name, (count, cost, weight) in clients.items()
        for _ in range(count)
    ]
    await asyncio.sleep(0)
    blocker.finish(0.0)
    while len(order) < turns:
        await asyncio.sleep(0)
    served = order[:turns]
    await asyncio.gather(*tasks)
    assert (gate.running, gate.waiting) == (0, 0)
    return served


def test_a_noisy_neighbour_gets_no_more_than_its_share() -> None:
    async def scenario() -> None:
        served = await contend(FairGate(1), {"noisy": (200, 10.0, 1.0), "quiet": (20, 10.0, 1.0)}, 40)
        assert (served.count("noisy"), served.count("quiet")) == (20, 20)
        assert jain([served.count("noisy"), served.count("quiet")]) >= 0.95

    run(scenario)


def test_shares_follow_weights_and_costs() -> None:
    async def scenario() -> None:
        served = await contend(FairGate(1), {"a": (99, 10.0, 3.0), "b": (99, 10.0, 1.0)}, 80)
        assert served.count("a") == pytest.approx(60, abs=1)
        served = await contend(FairGate(1), {"long": (99, 40.0, 1.0), "short": (99, 10.0, 1.0)}, 50)
        assert served.count("short") == pytest.approx(4 * served.count("long"), abs=4)

    run(scenario)


def test_within_a_client_first_come_first_served() -> None:
    async def scenario() -> list[int]:
        gate, order = FairGate(1), []
        blocker = await gate.enter("x", 1.0)

        async def ask(index: int) -> None:
            turn = await gate.enter("a", 1.0)
            order.append(index)
            turn.finish(1.0)

        tasks = [asyncio.create_task(ask(index)) for index in range(5)]
        await asyncio.sleep(0)
        blocker.finish(1.0)
        await asyncio.gather(*tasks)
        return order

    assert run(scenario) == [0, 1, 2, 3, 4]


def test_idleness_earns_no_credit() -> None:
    counters = TokenCounters()
    counters.arrive("busy")
    for _ in range(100):
        counters.charge("busy", 10.0)
    counters.arrive("late")
    assert counters.counter("late") == counters.counter("busy") == 1000.0
    counters.charge("late", 5.0)
    assert counters.smallest(["late", "busy"]) == "busy"


def test_leaving_and_coming_back_does_not_wipe_a_debt() -> None:
    counters = TokenCounters()
    counters.arrive("other")
    counters.arrive("greedy")
    counters.charge("greedy", 500.0)
    counters.leave("greedy")
    counters.arrive("greedy")
    assert counters.counter("greedy") == 500.0
    assert counters.smallest(["greedy", "other"]) == "other"


def test_counters_of_clients_long_gone_are_forgotten() -> None:
    counters = TokenCounters()
    for index in range(1000):
        counters.arrive(f"c{index}")
        counters.charge(f"c{index}", 1.0)
        counters.leave(f"c{index}")
    assert len(counters._clients) <= 2


def test_nobody_waits_below_the_bound_and_the_bound_holds() -> None:
    async def scenario() -> None:
        gate = FairGate(3)
        turns = [await asyncio.wait_for(gate.enter("a", 1.0), 1) for _ in range(3)]
        fourth = asyncio.create_task(gate.enter("a", 1.0))
        await asyncio.sleep(0.01)
        assert not fourth.done()
        assert (gate.running, gate.waiting_of("a")) == (3, 1)
        turns[0].finish(1.0)
        turns[0].finish(1.0)
        assert (await fourth).client == "a"
        assert gate.running == 3

    run(scenario)


def test_cancelled_waiters_leave_no_trace() -> None:
    async def scenario() -> None:
        gate = FairGate(1)
        turn = await gate.enter("a", 1.0)
        waiter = asyncio.create_task(gate.enter("b", 1.0))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert gate.waiting == 0
        granted = asyncio.create_task(gate.enter("b", 1.0))
        await asyncio.sleep(0)
        turn.finish(1.0)  # hands the place to `granted`, which is cancelled before it can take it
        granted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await granted
        assert (gate.running, gate.waiting) == (0, 0)
        assert (await asyncio.wait_for(gate.enter("c", 1.0), 1)).open

    run(scenario)


def test_a_clients_queue_is_bounded() -> None:
    async def scenario() -> None:
        gate = FairGate(1, queue_limit=1)
        await gate.enter("a", 1.0)
        task = asyncio.create_task(gate.enter("a", 1.0))
        await asyncio.sleep(0)
        with pytest.raises(asyncio.QueueFull, match="has 1 requests waiting"):
            await gate.enter("a", 1.0)
        task.cancel()

    run(scenario)


def test_the_estimate_is_corrected_by_the_real_cost() -> None:
    async def scenario() -> None:
        gate = FairGate(2)
        other = await gate.enter("other", 0.0)
        turn = await gate.enter("a", 100.0, weight=2.0)
        assert gate.counters.counter("a") == 50.0
        turn.finish(service(10, 5))
        assert gate.counters.counter("a") == 10.0
        other.finish(0.0)

    run(scenario)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="places=0"):
        FairGate(0)
    with pytest.raises(ValueError, match="above 0"):
        TokenCounters().arrive("a", 0.0)
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_turns_without_an_event_loop() -> None:
    turns: TurnQueue[str] = TurnQueue(1)
    assert turns.enter("a", "a1", 10.0)
    assert [turns.enter("a", "a2", 10.0), turns.enter("b", "b1", 4.0), turns.enter("b", "b2", 4.0)] == [False] * 3
    assert (turns.leave("a", 2.0), turns.running) == (["b1"], 1)  # a has had 12; b began at the 10 it had then
    turns.give_up("b", "b2")
    assert (turns.leave("b", 0.0), turns.waiting, turns.counters.counter("a")) == (["a2"], 0, 22.0)
    assert (turns.leave("a", 0.0), turns.running) == ([], 0)


def test_a_client_below_its_share_takes_a_spare_place_and_no_more_than_its_share() -> None:
    turns: TurnQueue[str] = TurnQueue(4, spare=2)
    assert [turns.enter("noisy", f"n{index}", 1.0) for index in range(6)] == [True] * 4 + [False] * 2
    assert turns.enter("quiet", "q0", 1.0)  # 0 running of a share of 2
    assert turns.enter("quiet", "q1", 1.0)
    assert not turns.enter("quiet", "q2", 1.0)  # no spare place is left, and it has its share
    assert turns.running == 6
    assert turns.leave("noisy", 0.0) == []  # 5 still run, more than the 4 ordinary places
    assert turns.enter("third", "t0", 1.0)  # 0 running of a share of 4/3
    assert turns.leave("quiet", 0.0) == ["q2"]  # a spare place again, and 1 of its share of 4/3 runs
    for _ in range(3):
        turns.leave("noisy", 0.0)
    turns.leave("quiet", 0.0)
    assert turns.running + turns.waiting == 4
    assert turns.counters.share("third") == pytest.approx(1 / 3)


def test_without_spare_places_the_bound_is_hard() -> None:
    turns: TurnQueue[str] = TurnQueue(1)
    assert turns.enter("noisy", "n", 1.0)
    assert not turns.enter("quiet", "q", 1.0)
    with pytest.raises(ValueError, match="spare=-1"):
        TurnQueue(1, -1)


def test_shares_are_of_the_weights_of_those_who_ask() -> None:
    counters = TokenCounters()
    counters.arrive("a", 3.0)
    counters.arrive("b", 1.0)
    assert (counters.share("a"), counters.share("b")) == (0.75, 0.25)
    counters.arrive("b", 2.0)  # its weight was configured anew
    assert counters.share("b") == pytest.approx(0.4)
    counters.leave("b")
    counters.leave("b")
    assert counters.share("a") == 1.0
