"""A real engine keeps a promised time to first token by letting rollouts have fewer seats, and a trainer wait."""

import asyncio
import dataclasses
import time

import pytest

from epilora.types import GenerateRequest, Sampling

from .conftest import run

pytestmark = pytest.mark.vllm
LONG = Sampling(max_tokens=40, temperature=1.0, logprobs=0, ignore_eos=True)
SHORT = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)


def rollouts(count, client="job:a", weight=1.0):
    return [
        GenerateRequest(f"{client}{i}", "1+2=", dataclasses.replace(LONG, seed=i), None, "rollout", client, weight)
        for i in range(count)
    ]


def tenant(index, budget_ms):
    return GenerateRequest(f"t{index}", "3+4=", SHORT, None, "tenant", "acme", ttft_budget_ms=budget_ms)


async def beside_rollouts(engine, budget_ms):
    busy = asyncio.ensure_future(engine.generate(rollouts(150)))
    while engine.stats().waiting == 0:
        await asyncio.sleep(0.005)
    free = engine.stats().rollout_seats
    waited = []
    for index in range(8):
        await engine.generate([tenant(index, budget_ms)])
        waited.append(await engine.trainer_turn(0.05))
    seen = engine.stats()
    return free, seen, waited, await busy


def test_a_promise_in_danger_takes_seats_from_rollouts(new_engine):
    engine = new_engine(max_num_seqs=32, tenant_seats=2)
    free, seen, waited, done = run(beside_rollouts(engine, 0.01))  # nothing can keep that: every token is tight
    assert free == 30
    assert seen.seat_cuts >= 1
    assert seen.rollout_seats < 30
    assert min(waited) >= 0.05  # the trainer lets the tenants go first, as long as it may be asked to
    assert [len(c.token_ids) for c in done] == [40] * 150  # rollouts end all the same
    start = time.perf_counter()
    easy = new_engine(max_num_seqs=32, tenant_seats=2)
    free, seen, waited, again = run(beside_rollouts(easy, 60_000.0))
    assert (free, seen.seat_cuts, seen.rollout_seats, max(waited) < 0.02) == (30, 0, 30, True)
    assert [c.token_ids for c in again] == [c.token_ids for c in done]
    assert time.perf_counter() - start < 60


def test_two_jobs_share_an_engines_seats_by_weight(new_engine):
    engine = new_engine(max_num_seqs=8, tenant_seats=0)

    async def both():
        ends = []

        async def one(client, count, weight):
            await engine.generate(rollouts(count, client, weight))
            ends.append(client)

        first = asyncio.ensure_future(one("job:a", 64, 1.0))
        while engine.stats().waiting == 0:
            await asyncio.sleep(0.005)
        await asyncio.gather(first, one("job:b", 24, 1.0))
        return ends

    assert run(both()) == ["job:b", "job:a"]  # first in, first out would end the other way round


def test_a_weight_must_be_above_zero(new_engine, main_engine):
    bad = dataclasses.replace(rollouts(1)[0], weight=0.0)
    with pytest.raises(ValueError, match=r"weight=0\.0; it must be above 0"):
        run(main_engine.generate([bad]))
