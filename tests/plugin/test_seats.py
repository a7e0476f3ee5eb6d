"""Seats: rollouts leave some of the batch to tenants, and wait for theirs in order."""

import asyncio
import dataclasses

import pytest

from epilora.types import GenerateRequest, Sampling

from .conftest import run

pytestmark = pytest.mark.vllm
LONG = Sampling(max_tokens=40, temperature=1.0, logprobs=0, ignore_eos=True)


def rollouts(count):
    return [GenerateRequest(f"r{i}", "1+2=", dataclasses.replace(LONG, seed=i), None, "rollout") for i in range(count)]


async def crowded(engine):
    """A tenant asks while three times as many rollouts as seats are under way."""
    busy = asyncio.ensure_future(engine.generate(rollouts(18)))
    seen = []
    while engine.stats().waiting == 0:
        await asyncio.sleep(0.005)
    seen.append(engine.stats())
    tenant = GenerateRequest("t", "3+4=", dataclasses.replace(LONG, max_tokens=4, temperature=0.0), None, "tenant")
    (answer,) = await engine.generate([tenant])
    seen.append(engine.stats())
    return answer, seen, await busy


def test_a_tenant_never_waits_for_a_rollout_to_end(new_engine):
    engine = new_engine(max_num_seqs=8, tenant_seats=2)
    answer, seen, done = run(crowded(engine))
    assert len(answer.token_ids) == 4
    assert seen[0].running == 6  # rollouts alone never fill more than their seats
    assert seen[1].running in (6, 7)  # the tenant's row may still be in the last count
    assert seen[1].waiting >= 6  # the tenant was answered while the later rollouts had not even begun
    assert [len(c.token_ids) for c in done] == [40] * 18
    roomy = new_engine(max_num_seqs=32)
    free = run(roomy.generate(rollouts(18)))
    assert [c.token_ids for c in free] == [c.token_ids for c in done]  # waiting changes nothing in an answer


def test_a_queued_rollout_can_be_aborted(new_engine):
    engine = new_engine(max_num_seqs=4, tenant_seats=2)

    async def cut():
        busy = asyncio.ensure_future(engine.generate(rollouts(6)))
        while engine.stats().waiting < 4:
            await asyncio.sleep(0.005)
        await engine.abort(["r5", "r0"])
        return await busy

    done = run(cut())
    assert [c.finish_reason for c in done] == ["abort", "length", "length", "length", "length", "abort"]
    assert done[5].token_ids == ()
    assert engine.stats().waiting == 0


def test_seats_must_leave_one_to_rollouts(new_engine):
    with pytest.raises(ValueError, match="tenant_seats=8; allowed are 0 to max_num_seqs - 1 = 7"):
        new_engine(max_num_seqs=8, tenant_seats=8)
