"""The engine as its callers see it: rows under their own adapters, versions, streams, aborts, failures."""

import asyncio
import dataclasses
import json
import time
import types

import pytest
import torch

from epilora.adapters.digest import adapter_digest
from epilora.errors import AdapterNotFound, AdapterRejected, BaseMismatch, EngineDead, NoFreeSlot, PromptTooLong
from epilora.plugin import register
from epilora.plugin.tools import ToolCalls
from epilora.types import AdapterVersion, GenerateRequest, Sampling

from .conftest import run
from .tiny import make_adapter, module_names

pytestmark = pytest.mark.vllm

GREEDY = Sampling(max_tokens=10, temperature=0.0, logprobs=0, ignore_eos=True)
PROMPT = "12+34="


def request(name, adapter=None, sampling=GREEDY, prompt=PROMPT, kind="tenant"):
    return GenerateRequest(name, prompt, sampling, adapter, kind)


async def load(engine, *adapters):
    for version, tensors in adapters:
        await engine.load_adapter(version, tensors)
    return [version.digest for version, _ in adapters]


def tokens_of(completions):
    return [c.token_ids for c in completions]


def close(a, b, tolerance=2e-5):
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) < tolerance


# ---- rows ---------------------------------------------------------------------------------------------------------


async def mixed_and_alone(engine):
    a0, a1 = await load(engine, make_adapter(1), make_adapter(2))
    who = {"none": None, "a0": a0, "a1": a1, "none again": None, "a0 again": a0}
    mixed = await engine.generate([request(name, digest) for name, digest in who.items()])
    await engine.reset_prefix_cache()
    alone = [(await engine.generate([request(name, digest)]))[0] for name, digest in who.items()]
    return mixed, alone


def test_mixed_rows_equal_isolated_rows(engine):
    mixed, alone = run(mixed_and_alone(engine))
    assert tokens_of(mixed) == tokens_of(alone)
    for one, other in zip(mixed, alone, strict=True):
        assert close(one.logprobs, other.logprobs)
    assert len(set(tokens_of(mixed))) == 3  # base, a0 and a1 really say different things
    assert [c.adapter is None for c in mixed] == [True, False, False, True, False]


def test_stock_gives_base_rows_an_adapter(new_engine, monkeypatch):
    """The bug that grouping rows fixes, shown on vLLM's own classes; if this fails, vLLM repaired it."""
    import vllm.lora.utils as lora_utils

    stock = tuple(c.__mro__[2] if c.__name__.startswith("Epilora") else c for c in lora_utils._all_lora_classes)
    assert not any(c.__name__.startswith("Epilora") for c in stock)
    monkeypatch.setattr(lora_utils, "_all_lora_classes", stock)
    engine = new_engine(activations="w8a8", max_loras=2)
    mixed, alone = run(mixed_and_alone(engine))
    assert tokens_of(mixed)[1:3] == tokens_of(alone)[1:3]
    assert tokens_of(mixed)[0] != tokens_of(alone)[0]
    engine.close()


def test_steps_and_rows_are_counted(engine):
    before = engine.stats()

    async def both():
        await engine.generate([request("t"), request("r", kind="rollout"), request("r2", kind="rollout")])
        await engine.generate([request("t")])

    run(both())
    time.sleep(0.05)
    after = engine.stats()
    assert after.steps - before.steps == 20
    assert after.mixed_steps - before.mixed_steps == 10
    assert after.tenant_rows - before.tenant_rows == 20
    assert after.rollout_rows - before.rollout_rows == 20
    assert after.paths["lora_cpu"] - before.paths.get("lora_cpu", 0) == 20 * 8  # 2 layers of 4 linear layers a step
    assert after.paths["base_w8a16"] - before.paths.get("base_w8a16", 0) == 20 * 8
    assert (after.running, after.waiting) == (0, 0)


# ---- what a completion says ---------------------------------------------------------------------------------------


def test_completion_fields(engine):
    sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=3, ignore_eos=True)
    (done,) = run(engine.generate([request("x", sampling=sampling)]))
    assert done.prompt_token_ids == engine.tokenize(PROMPT)
    assert len(done.token_ids) == len(done.logprobs) == len(done.top_logprobs) == 5
    assert done.text == engine.detokenize(done.token_ids)
    assert done.finish_reason == "length"
    assert done.ttft_ms > 0
    assert done.tpot_ms > 0
    for token, logprob, top in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[0] == (token, logprob)  # greedy: the likeliest is what was sampled
        assert top[0][1] >= top[1][1] >= top[2][1]


def test_stop_strings_and_eos(engine):
    (plain,) = run(engine.generate([request("x")]))
    stop = plain.text[4]
    (done,) = run(engine.generate([request("x", sampling=dataclasses.replace(GREEDY, stop=(stop,)))]))
    assert done.finish_reason == "stop"
    assert done.text == plain.text[: plain.text.index(stop)]
    (version, tensors) = make_adapter(1)  # says end-of-sequence at once
    run(engine.load_adapter(version, tensors))
    (done,) = run(engine.generate([request("x", version.digest, dataclasses.replace(GREEDY, ignore_eos=False))]))
    assert (done.finish_reason, done.token_ids, done.text) == ("stop", (engine.info().eos_token_id,), "")


def test_stream_says_what_generate_says(engine):
    async def both():
        (whole,) = await engine.generate([request("x")])
        chunks = [chunk async for chunk in engine.stream(request("y"))]
        return whole, chunks

    whole, chunks = run(both())
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids
    assert "".join(c.text for c in chunks) == whole.text
    assert close([p for c in chunks for p in c.logprobs], whole.logprobs)
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) == 10
    assert (chunks[-1].prompt_tokens, chunks[-1].completion_tokens) == (6, 10)


def test_logprobs_are_of_the_distribution_sampled(engine):
    async def measure():
        hot = Sampling(max_tokens=4, temperature=2.0, seed=1, logprobs=20, ignore_eos=True)
        flat = dataclasses.replace(hot, temperature=1.0)
        cut = dataclasses.replace(hot, top_k=1, temperature=1.0)
        return await engine.generate([request(n, sampling=s) for n, s in (("hot", hot), ("flat", flat), ("cut", cut))])

    hot, flat, cut = run(measure())
    halved = {token: logprob / 2 for token, logprob in flat.top_logprobs[0]}
    offsets = [
        logprob - halved[token] for token, logprob in hot.top_logprobs[0]
    ]  # log-sum-exp: the same for all tokens
    assert max(offsets) - min(offsets) < 1e-5
    assert abs(offsets[0]) > 0.1
    assert cut.logprobs == (0.0,) * 4  # one token left: its probability is 1
    plain = run(engine.score([(flat.prompt_token_ids, flat.token_ids), (cut.prompt_token_ids, cut.token_ids)], None))
    assert close(plain[0], flat.logprobs)
    assert max(plain[1]) < -0.1  # scores are plain log-softmax


def test_score_equals_sampled_logprobs(engine):
    async def both():
        (a0,) = await load(engine, make_adapter(2))
        sampling = Sampling(max_tokens=12, seed=3, logprobs=0, ignore_eos=True)
        done = await engine.generate([request("b", None, sampling), request("a", a0, sampling)])
        pairs = [(c.prompt_token_ids, c.token_ids) for c in done]
        return done, await engine.score(pairs, a0), await engine.score(pairs, None)

    done, under_a0, under_base = run(both())
    assert close(under_base[0], done[0].logprobs)
    assert close(under_a0[1], done[1].logprobs)
    assert not close(under_a0[0], done[0].logprobs, 0.1)


def test_a_full_context_can_be_scored(engine):
    prompt, completion = (5,) * 200, (6,) * 56
    (scores,) = run(engine.score([(prompt, completion)], None))
    assert len(scores) == 56
    with pytest.raises(PromptTooLong, match="257"):
        run(engine.score([(prompt, (*completion, 6))], None))


# ---- determinism --------------------------------------------------------------------------------------------------


def test_same_requests_together_give_the_same_bits(engine):
    async def twice():
        digests = await load(engine, make_adapter(1), make_adapter(2))
        sampling = [Sampling(max_tokens=12, seed=i, logprobs=0, ignore_eos=True) for i in range(24)]
        batch = [request(str(i), [None, *digests][i % 3], sampling[i], kind="rollout") for i in range(24)]
        await engine.reset_prefix_cache()
        first = await engine.generate(batch)
        await engine.generate([request("between")])
        await engine.reset_prefix_cache()
        return first, await engine.generate(batch)

    first, second = run(twice())
    assert tokens_of(first) == tokens_of(second)
    assert [c.logprobs for c in first] == [c.logprobs for c in second]
    assert len(set(tokens_of(first))) > 12


def test_a_seed_holds_beside_rows_without_one(engine):
    """Stock 0.28 on the CPU ignores all seeds of a batch in which any row has none."""
    seeded = request("s", sampling=Sampling(max_tokens=12, seed=7, ignore_eos=True))
    unseeded = Sampling(max_tokens=12, ignore_eos=True)

    async def alone_and_mixed():
        alone = (await engine.generate([seeded]))[0].token_ids
        beside_greedy = (await engine.generate([request("g"), seeded]))[1].token_ids
        first = await engine.generate([seeded, request("u", sampling=unseeded)])
        second = await engine.generate([seeded, request("u", sampling=unseeded)])
        return alone, beside_greedy, first, second

    alone, beside_greedy, first, second = run(alone_and_mixed())
    assert alone == beside_greedy == first[0].token_ids == second[0].token_ids
    assert first[1].token_ids != second[1].token_ids


# ---- adapters -----------------------------------------------------------------------------------------------------


def test_receipt_proves_what_lies_in_the_slot(engine):
    version, tensors = make_adapter(5, targets=("q_proj", "down_proj"))
    receipt = run(engine.load_adapter(version, tensors))
    assert receipt.readback_digest == receipt.expected_digest
    assert (receipt.digest, receipt.modules, receipt.base_modules) == (version.digest, 4, 14)
    assert run(engine.load_adapter(version, tensors)) == receipt  # idempotent
    assert run(engine.read_slot_digest(receipt.slot)) == receipt.readback_digest
    layer = engine._engine.collective_rpc("_epilora_lora_layers")[0]["model.layers.0.self_attn.qkv_proj"]
    layer.lora_b_stacked[0][receipt.slot, 0, 0, 0] += 1e-6
    assert run(engine.read_slot_digest(receipt.slot)) != receipt.readback_digest


def test_scaling_is_folded_once_and_tensors_are_not_written_to(engine):
    version, tensors = make_adapter(5, alpha=24.0)  # scaling 3
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    receipt = run(engine.load_adapter(version, tensors))
    assert all(torch.equal(tensors[name], kept[name]) for name in tensors)
    layer = engine._engine.collective_rpc("_epilora_lora_layers")[0]["model.layers.1.mlp.down_proj"]
    b = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert torch.equal(layer.lora_b_stacked[0][receipt.slot, 0, :, :8], b * 3)
    assert not layer.lora_b_stacked[0][receipt.slot, 0, :, 8:].any()


def test_patterns_rslora_and_small_ranks_reach_the_slot(engine):
    """One adapter written two ways: per-module ranks and rsLoRA against plain scaling and zero padding."""
    plain, tensors = make_adapter(6, rank=8, alpha=16.0, targets=("q_proj", "o_proj"))
    small = {}
    for name, tensor in tensors.items():
        cut = tensor.clone()
        if "q_proj" in name:
            cut = cut[:4] if "lora_A" in name else cut[:, :4]
        small[name] = cut
    padded = {n: t.clone() for n, t in tensors.items()}
    for name, tensor in padded.items():
        if "q_proj" in name and "lora_B" in name:
            tensor[:, 4:] = 0
    # q_proj: rank 4, alpha 4 -> rsLoRA scaling 4 / sqrt(4) = 2; o_proj: 2 * sqrt(8) / sqrt(8) = 2; plain: 16 / 8 = 2
    spec = dataclasses.replace(
        plain.spec, alpha=2 * 8**0.5, use_rslora=True, rank_pattern=(("q_proj", 4),), alpha_pattern=(("q_proj", 4.0),)
    )
    one = AdapterVersion("one", 1, adapter_digest(plain.spec, padded), plain.spec)
    two = AdapterVersion("two", 1, adapter_digest(spec, small), spec)

    async def both():
        await load(engine, (one, padded), (two, small))
        return await engine.generate([request("one", one.digest), request("two", two.digest), request("none")])

    first, second, base = run(both())
    assert first.token_ids == second.token_ids != base.token_ids
    assert close(first.logprobs, second.logprobs)


def wrong_shape():
    version, tensors = make_adapter(3)
    name = f"base_model.model.{module_names()[0]}.lora_B.weight"
    return version, {**tensors, name: tensors[name][:-1].clone()}, [module_names()[0], "(95, 8)", "(96, 8)"]


def unknown_module():
    version, tensors = make_adapter(3)
    old = "model.layers.1.mlp.up_proj"
    return (
        version,
        {n.replace(old, "model.layers.9.mlp.up_proj"): t for n, t in tensors.items()},
        ["layers.9", "14 modules"],
    )


def no_tensors():
    version, _ = make_adapter(3)
    return version, {}, ["no LoRA tensors"]


def not_finite():
    version, tensors = make_adapter(3)
    name = f"base_model.model.{module_names()[0]}.lora_A.weight"
    bad = tensors[name].clone()
    bad[0, 0] = float("nan")
    return version, {**tensors, name: bad}, [module_names()[0], "not finite"]


def too_large_a_rank():
    version, tensors = make_adapter(3, rank=17)
    return version, tensors, ["rank 17", "<= 16"]


@pytest.mark.parametrize("case", [wrong_shape, unknown_module, no_tensors, not_finite, too_large_a_rank])
def test_what_does_not_fit_is_refused(engine, case):
    version, tensors, words = case()
    version = dataclasses.replace(version, digest=adapter_digest(version.spec, tensors))

    async def attempt():
        (good,) = await load(engine, make_adapter(1))
        before = await engine.generate([request("x", good)])
        with pytest.raises(AdapterRejected) as caught:
            await engine.load_adapter(version, tensors)
        for word in words:
            assert word in str(caught.value)
        assert engine.stats().loaded == (good,)
        with pytest.raises(AdapterNotFound):
            await engine.generate([request("y", version.digest)])
        return before, await engine.generate([request("x", good)])

    before, after = run(attempt())
    assert tokens_of(before) == tokens_of(after)


def test_a_refused_adapter_puts_nobody_out(engine):
    version, tensors, _ = wrong_shape()
    version = dataclasses.replace(version, digest=adapter_digest(version.spec, tensors))

    async def attempt():
        digests = await load(engine, make_adapter(1), make_adapter(2), make_adapter(3))  # all slots, all idle
        with pytest.raises(AdapterRejected):
            await engine.load_adapter(version, tensors)
        assert set(engine.stats().loaded) == set(digests)

    run(attempt())


def test_content_that_is_not_the_digests_is_refused(engine):
    version, tensors = make_adapter(3)
    _, others = make_adapter(4)
    with pytest.raises(AdapterRejected, match="digest"):
        run(engine.load_adapter(version, others))
    with pytest.raises(BaseMismatch, match="0000"):
        run(engine.load_adapter(dataclasses.replace(version, base_digest="0" * 64), tensors))
    same = dataclasses.replace(version, base_digest=engine.info().base_digest)
    assert run(engine.load_adapter(same, tensors)).modules == 14


def test_slots_in_use_or_pinned_are_kept(engine):
    async def fill():
        a, b, c = await load(engine, make_adapter(1), make_adapter(2), make_adapter(3))
        for digest in (a, b, c):
            await engine.pin_adapter(digest, "test")
        with pytest.raises(NoFreeSlot, match="test"):
            await load(engine, make_adapter(4))
        await engine.unpin_adapter(b, "test")
        (d,) = await load(engine, make_adapter(4))
        assert set(engine.stats().loaded) == {a, c, d}
        with pytest.raises(AdapterNotFound, match=b[:12]):
            await engine.generate([request("x", b)])
        await engine.unload_adapter(a)
        assert a in engine.stats().loaded, "somebody has it pinned"
        for digest in (a, c):
            await engine.unpin_adapter(digest, "test")
        await engine.unload_adapter(a)
        assert set(engine.stats().loaded) == {c, d}

    run(fill())


def test_unload_waits_for_the_running_request(engine):
    long = dataclasses.replace(GREEDY, max_tokens=60)

    async def leave():
        (a,) = await load(engine, make_adapter(2))
        alone = await engine.generate([request("alone", a, long)])
        running = asyncio.ensure_future(engine.generate([request("long", a, long)]))
        await asyncio.sleep(0.05)
        await engine.unload_adapter(a)
        assert not running.done()
        with pytest.raises(AdapterNotFound):
            await engine.generate([request("late", a)])
        assert len(engine._rpc("epilora_list_adapters")) == 1
        done = await running
        assert await engine._call(lambda: engine._rpc("epilora_list_adapters")) == {}
        with pytest.raises(AdapterNotFound):
            await engine.unload_adapter(a)
        return alone, done

    alone, done = run(leave())
    assert tokens_of(alone) == tokens_of(done)


def test_a_freed_slot_is_empty(engine):
    async def cycle():
        version, tensors = make_adapter(1)
        receipt = await engine.load_adapter(version, tensors)
        empty = await engine.read_slot_digest((receipt.slot + 1) % 3)
        await engine.unload_adapter(version.digest)
        return empty, await engine.read_slot_digest(receipt.slot)

    empty, freed = run(cycle())
    assert empty == freed


# ---- versions and the prefix cache --------------------------------------------------------------------------------

LONG_PROMPT = "12+34=46 56-7=49 " * 9  # 153 tokens: more than one cache block


class SameName(AdapterVersion):
    """Versions that share one cache namespace, as an in-place reload under one name would."""

    @property
    def kv_namespace(self) -> str:
        return "policy"


async def replace_version(engine, make):
    """(log-probs under version 2 just after version 1 was used, the same without any cache)."""
    (v1, t1), (v2, t2) = (make_adapter(seed, name="policy", version=seed) for seed in (1, 2))
    v1, v2 = make(v1), make(v2)
    await engine.reset_prefix_cache()
    await engine.load_adapter(v1, t1)
    await engine.generate([request("1", v1.digest, prompt=LONG_PROMPT)])
    await engine.unload_adapter(v1.digest)
    await engine.load_adapter(v2, t2)
    (warm,) = await engine.generate([request("2", v2.digest, prompt=LONG_PROMPT)])
    await engine.reset_prefix_cache()
    (cold,) = await engine.generate([request("3", v2.digest, prompt=LONG_PROMPT)])
    return warm, cold


def test_a_new_version_reads_no_old_keys_and_values(engine):
    warm, cold = run(replace_version(engine, lambda version: version))
    assert warm.token_ids == cold.token_ids
    assert close(warm.logprobs, cold.logprobs)


def test_one_name_for_two_versions_would_read_stale_keys_and_values(engine):
    """What versions' own namespaces prevent: without them, version 2 continues on version 1's keys and values."""
    warm, cold = run(replace_version(engine, lambda v: SameName(**vars(v))))
    assert abs(warm.logprobs[0] - cold.logprobs[0]) > 1e-3


def test_a_version_reuses_its_own_prefix(engine):
    async def twice():
        (a,) = await load(engine, make_adapter(1))
        await engine.reset_prefix_cache()
        first = await engine.generate([request("1", a, prompt=LONG_PROMPT)])
        return first, await engine.generate([request("2", a, prompt=LONG_PROMPT)])

    first, second = run(twice())
    assert tokens_of(first) == tokens_of(second)
    assert close(first[0].logprobs, second[0].logprobs)


# ---- ends ---------------------------------------------------------------------------------------------------------


def refused_requests(engine):
    size = 256
    return [
        (request("x", sampling=dataclasses.replace(GREEDY, max_tokens=size)), PromptTooLong, "6 prompt tokens"),
        (request("x", prompt=(5,) * (size + 1)), PromptTooLong, "257"),
        (request("x", prompt=""), ValueError, "no tokens"),
        (request("x", prompt=(5, 64)), ValueError, "token id 64"),
        (request("x", kind="guest"), ValueError, "guest"),
        (request("x", sampling=dataclasses.replace(GREEDY, max_tokens=0)), ValueError, "max_tokens=0"),
        (request("x", sampling=dataclasses.replace(GREEDY, top_p=2.0)), ValueError, "top_p"),
        (request("x", "f" * 64), AdapterNotFound, "ffffffffffff"),
    ]


@pytest.mark.parametrize("index", range(8))
def test_bad_requests_are_refused_before_anything_runs(engine, index):
    bad, error, words = refused_requests(engine)[index]
    before = engine.stats().steps

    async def attempt():
        with pytest.raises(error, match=words):
            await engine.generate([request("good"), bad])
        with pytest.raises(error, match=words):
            async for _ in engine.stream(bad):
                pass

    run(attempt())
    assert engine.stats().steps == before
    assert engine._steps.names == set()


def test_the_longest_request_fits(engine):
    (done,) = run(
        engine.generate([request("x", prompt=(5,) * 250, sampling=dataclasses.replace(GREEDY, max_tokens=6))])
    )
    assert len(done.token_ids) == 6


def test_an_id_in_use_is_refused(engine):
    async def twice():
        with pytest.raises(ValueError, match="'x' is in use"):
            await engine.generate([request("x"), request("x")])
        return await engine.generate([request("x"), request("x", kind="rollout")])

    assert len(run(twice())) == 2


async def idle(engine):
    for _ in range(100):
        await asyncio.sleep(0.02)
        stats = engine.stats()
        if not stats.running and not stats.waiting and not engine._steps.names:
            return
    raise AssertionError(f"still busy: {stats}, {engine._steps.names}")


LONG = dataclasses.replace(GREEDY, max_tokens=150)


def test_closing_a_stream_frees_its_rows(engine):
    async def leave():
        (a,) = await load(engine, make_adapter(2))
        stream = engine.stream(request("x", a, LONG))
        before = engine.stats().steps
        first = await anext(stream)
        assert first.completion_tokens == 1
        await stream.aclose()
        await idle(engine)
        assert engine.stats().steps - before < 100  # it did not simply run to its end
        await engine.unload_adapter(a)
        assert engine._rpc("epilora_list_adapters") == {}

    run(leave())


def test_cancelling_generate_frees_its_rows(engine):
    async def leave():
        before = engine.stats().steps
        task = asyncio.ensure_future(engine.generate([request(str(i), sampling=LONG) for i in range(4)]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert engine.stats().steps - before < 100

    run(leave())


def test_abort_returns_what_there_is(engine):
    async def end():
        (whole,) = await engine.generate([request("w", sampling=LONG)])
        running = asyncio.ensure_future(engine.generate([request("x", sampling=LONG), request("y")]))
        chunks = []

        async def read():
            async for chunk in engine.stream(request("z", sampling=LONG)):
                chunks.append(chunk)

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.15)
        await engine.abort(["x", "z", "unknown"])
        await reader
        return whole, await running, chunks

    whole, (aborted, finished), chunks = run(end())
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 150
    assert aborted.token_ids == whole.token_ids[: len(aborted.token_ids)]
    assert len(aborted.logprobs) == len(aborted.token_ids)
    assert finished.finish_reason == "length"
    assert chunks[-1].finish_reason == "abort"


def test_two_event_loops_share_one_engine(engine):
    import threading

    results = {}

    def work(name):
        results[name] = run(engine.generate([request(name)]))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 3
    assert len({tokens_of(done)[0] for done in results.values()}) == 1


def test_a_failing_step_fails_everything_and_hangs_nothing(new_engine):
    engine = new_engine(max_loras=1)

    async def fail():
        running = asyncio.ensure_future(engine.generate([request("x", sampling=LONG)]))
        stream = engine.stream(request("s", sampling=LONG))
        await anext(stream)

        def step():
            raise RuntimeError("worker lost")

        engine._engine.step = step
        with pytest.raises(EngineDead, match="worker lost"):
            await asyncio.wait_for(running, 5)
        with pytest.raises(EngineDead, match="worker lost"):
            await asyncio.wait_for(anext_until_end(stream), 5)
        with pytest.raises(EngineDead, match="worker lost"):
            await engine.generate([request("late")])
        with pytest.raises(EngineDead, match="worker lost"):
            await engine.export_weights()
        with pytest.raises(EngineDead, match="worker lost"):
            engine.stats()

    async def anext_until_end(stream):
        async for _ in stream:
            pass

    run(fail())
    engine.close()
    engine.close()


def test_an_engine_without_the_plugin_does_not_start(new_engine, monkeypatch):
    monkeypatch.setattr(register, "_status", register.Status((), {"all": "EPILORA_DISABLE=1"}))
    with pytest.raises(RuntimeError, match="EPILORA_DISABLE=1"):
        new_engine(activations="w8a8")


def test_close_fails_what_runs(new_engine):
    engine = new_engine(max_loras=1)

    async def end():
        running = asyncio.ensure_future(engine.generate([request("x", sampling=LONG)]))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        with pytest.raises(EngineDead, match="closed"):
            await asyncio.wait_for(running, 5)

    run(end())


# ---- KV release, text ---------------------------------------------------------------------------------------------


def test_released_kv_comes_back_right(engine):
    async def release():
        (a,) = await load(engine, make_adapter(2))
        long = dataclasses.replace(GREEDY, max_tokens=40)
        batch = [request("a", a, long), request("b", None, long)]
        want = await engine.generate(batch)
        running = asyncio.ensure_future(engine.generate(batch))
        await asyncio.sleep(0.1)
        released = await engine.release_kv()
        half = await engine.release_kv(0.5)
        got = await running
        await engine.restore_kv()
        return want, got, await engine.generate(batch), released, half

    want, got, again, released, half = run(release())
    assert tokens_of(want) == tokens_of(got) == tokens_of(again)
    assert (32 << 20) >= released > (31 << 20)
    assert released // 2 + 8192 > half > released // 2 - 8192
    with pytest.raises(ValueError, match=r"keep_fraction=1\.5"):
        run(engine.release_kv(1.5))


def test_text_and_tokens(engine):
    assert engine.detokenize(engine.tokenize("1+2=3")) == "1+2=3"
    assert engine.detokenize((*engine.tokenize("1+2"), engine.info().eos_token_id)) == "1+2"
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    assert engine.render_chat(messages) == engine.tokenize("(1+2)(3)=")


def test_a_model_without_a_template_says_so(engine, monkeypatch):
    monkeypatch.setattr(engine, "_tokenizer", types.SimpleNamespace(chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        engine.render_chat([{"role": "user", "content": "1"}])


def test_info(engine):
    info = engine.info()
    assert (info.activations, info.dtype, info.quantization) == ("w8a16", "float32", "fp8_per_channel")
    assert info.linear_modules == tuple(module_names())
    assert (info.max_model_len, info.max_loras, info.max_lora_rank, info.eos_token_id) == (256, 3, 16, 1)
    assert len(info.base_digest) == 64


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def test_tool_calls_are_vllms_parsers_reading(engine):
    assert engine.tool_call_start() == "<tool_call>"
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00fc"}}\n</tool_call>'
    text, calls = engine.parse_tools(f"Let me see. {one}{one}", TOOLS)
    assert text == "Let me see. "
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "f")] * 2
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": "\u00fc"}
    assert calls[0]["id"] != calls[1]["id"]
    for broken in ("plain", "<tool_call>", "<tool_call>{</tool_call>", "<tool_call>" + "[" * 50_000):
        assert engine.parse_tools(broken, TOOLS) == (broken, [])


def test_an_unknown_tool_parser_is_named_with_those_there_are(engine):
    with pytest.raises(ValueError, match=r"tool_parser='nothing': this vLLM has .*hermes"):
        ToolCalls("nothing", engine._tokenizer).start  # noqa: B018
    llama = ToolCalls("llama3_json", engine._tokenizer)
    assert llama.start == ""  # it looks for JSON anywhere, so streams wait for the end
