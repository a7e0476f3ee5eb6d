"""A KV release as the real scheduler sees it; only the workers' part (memory) is stood in for."""

import asyncio
import dataclasses

import pytest

from epilora.errors import MemoryInfeasible, UnsupportedKernel
from epilora.plugin.kv_blocks import KvRelease
from epilora.types import GenerateRequest, Sampling

from .conftest import run

pytestmark = pytest.mark.vllm
LONG = Sampling(max_tokens=120, temperature=0.0, logprobs=0, ignore_eos=True)
SHORT = dataclasses.replace(LONG, max_tokens=6)


class Workers:
    """Records calls; `fail` is raised by the next ones."""

    def __init__(self):
        self.calls, self.fail = [], None

    def __call__(self, method, *args):
        if self.fail is not None:
            raise self.fail
        self.calls.append((method, *args))
        return [1000]


@pytest.fixture
def released(engine):
    """(engine, its KvRelease, the workers), everything restored afterwards."""
    workers = Workers()
    kv = KvRelease(engine._steps, workers)
    yield engine, kv, workers
    workers.fail = None
    run(engine._call(kv.restore))


def rollouts(count, sampling=LONG):
    return [GenerateRequest(f"r{i}", f"{i}+2=", sampling, None, "rollout") for i in range(count)]


def tenant(name="t", sampling=SHORT):
    return GenerateRequest(name, "3+4=", sampling)


def free_ids(kv):
    return {block.block_id for block in kv._pool.free_block_queue.get_all_free_blocks()}


def test_nothing_runs_without_a_cache_and_everything_ends_as_it_would_have(released):
    engine, kv, workers = released

    async def cycle():
        alone = await engine.generate([*rollouts(3), tenant()])
        running = asyncio.ensure_future(engine.generate(rollouts(3)))
        await asyncio.sleep(0.1)
        assert await engine._call(kv.release) == 1000
        late = asyncio.ensure_future(engine.generate([tenant()]))
        steps = engine.stats().steps
        await asyncio.sleep(0.2)
        assert engine.stats().steps == steps
        assert not running.done()
        assert not late.done()
        await engine._call(kv.restore)
        done = [*(await running), *(await late)]
        return [c.token_ids for c in alone], [c.token_ids for c in done]

    alone, done = run(cycle())
    assert alone == done
    assert workers.calls == [("epilora_release_kv", 0, kv.num_blocks), ("epilora_restore_kv",)]


def test_with_a_share_tenants_go_on_in_its_blocks_and_rollouts_wait(released):
    engine, kv, workers = released
    total = kv.num_blocks
    everything = free_ids(kv)

    async def cycle():
        await engine.reset_prefix_cache()
        alone = await engine.generate([*rollouts(3), tenant("long", LONG)])
        running = asyncio.ensure_future(engine.generate([*rollouts(3), tenant("long", LONG)]))
        await asyncio.sleep(0.1)
        await engine._call(lambda: kv.release(0.5))
        kept = total // 2
        assert kv._pool.num_gpu_blocks == kept
        queued = asyncio.ensure_future(engine.generate(rollouts(5)[4:]))
        answers = [await engine.generate([tenant(f"t{i}")]) for i in range(3)]
        assert max(free_ids(kv)) < kept
        assert not running.done()
        assert not queued.done()
        await engine.reset_prefix_cache() if engine.stats().running == 0 else None
        await engine.abort(["r2"])  # a parked one
        await engine._call(kv.restore)
        done = await running
        await queued
        return alone, done, answers

    alone, done, answers = run(cycle())
    assert [c.token_ids for c in done][:2] == [c.token_ids for c in alone][:2]
    assert done[3].token_ids == alone[3].token_ids
    assert (done[2].finish_reason, len(done[2].token_ids) < 120) == ("abort", True)
    assert {a[0].token_ids for a in answers} == {answers[0][0].token_ids}
    assert workers.calls == [("epilora_release_kv", total // 2, total), ("epilora_restore_kv",)]
    assert (kv._pool.num_gpu_blocks, free_ids(kv)) == (total, everything)


def test_another_share_comes_by_way_of_the_whole(released):
    engine, kv, workers = released
    run(engine._call(lambda: kv.release(0.5)))
    assert run(engine._call(lambda: kv.release(0.5))) == 0
    run(engine._call(kv.release))
    assert [call[0] for call in workers.calls] == ["epilora_release_kv", "epilora_restore_kv", "epilora_release_kv"]


def test_a_share_must_hold_one_request(released):
    engine, kv, workers = released
    with pytest.raises(
        ValueError, match=r"keep_fraction=0\.001 keeps 0 of \d+ blocks; one request of 257 tokens may need"
    ):
        run(engine._call(lambda: kv.release(0.001)))
    with pytest.raises(ValueError, match="keep_fraction=1"):
        run(engine._call(lambda: kv.release(1.0)))
    assert workers.calls == []


def test_failures_leave_a_state_that_works(released):
    engine, kv, workers = released
    workers.fail = UnsupportedKernel("no pool")
    with pytest.raises(UnsupportedKernel, match="no pool"):
        run(engine._call(lambda: kv.release(0.5)))
    assert len(run(engine.generate([tenant()]))[0].token_ids) == 6  # nothing changed
    workers.fail = None
    run(engine._call(kv.release))
    workers.fail = RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(MemoryInfeasible, match=r"OUT_OF_MEMORY.*restore_kv again"):
        run(engine._call(kv.restore))
    workers.fail = None
    run(engine._call(kv.restore))
    assert len(run(engine.generate([tenant()]))[0].token_ids) == 6
