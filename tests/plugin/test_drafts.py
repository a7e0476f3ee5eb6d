"""Drafts: sampled from at once, versions later. The CPU engine reads them at home, where CUDA opens nothing."""

import asyncio
import dataclasses

import pytest
import torch

from epilora.adapters.device_tensors import share
from epilora.adapters.fold import fold, folded_digest
from epilora.adapters.peft_io import config_of
from epilora.errors import AdapterNotFound, AdapterRejected, BaseMismatch, NoFreeSlot
from epilora.types import AdapterDraft, GenerateRequest, Sampling

from .conftest import run
from .tiny import make_adapter

pytestmark = pytest.mark.vllm
GREEDY = Sampling(max_tokens=10, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def handles(monkeypatch):
    from epilora.quant import cuda_ipc

    made = []

    def give(storage):
        made.append(storage.data_ptr())
        return (0, b"handle", storage.nbytes(), 0, b"counter", 0, b"event", False)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", give, raising=False)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: "GPU-a")
    return made


def ask(adapter, name="x", sampling=GREEDY):
    return GenerateRequest(name, "12+34=", sampling, adapter)


def draft_of(version, draft_id):
    return AdapterDraft(draft_id, version.name, version.spec)


def test_a_draft_says_what_its_version_says(engine):
    async def both():
        version, tensors = make_adapter(2)
        receipt = await engine.load_draft(draft_of(version, "d1"), share("trainer", tensors))
        assert (engine.stats().loaded, engine.stats().drafts) == ((), ("d1",))  # no version that others could ask for
        (drafted,) = await engine.generate([ask("d1")])
        sealed = await engine.seal_draft("d1", version, folded_digest(fold(version.spec, tensors)))
        assert (engine.stats().loaded, engine.stats().drafts) == ((version.digest,), ())
        (by_digest, by_draft) = await engine.generate([ask(version.digest, "a"), ask("d1", "b")])
        again = await engine.load_adapter(version, tensors)
        await engine.unload_adapter(version.digest)
        loaded = await engine.load_adapter(version, tensors)
        (fresh,) = await engine.generate([ask(version.digest)])
        return receipt, sealed, again, loaded, [drafted, by_digest, by_draft, fresh]

    receipt, sealed, again, loaded, done = run(both())
    assert sealed.readback_digest == sealed.expected_digest == loaded.readback_digest
    assert (receipt.slot, receipt.modules, receipt.base_modules) == (sealed.slot, 14, 14)
    assert again == sealed
    assert dataclasses.replace(sealed, load_ms=0) == dataclasses.replace(loaded, load_ms=0)
    assert len({c.token_ids for c in done}) == 1
    for completion in done[1:]:
        assert max(abs(a - b) for a, b in zip(completion.logprobs, done[0].logprobs, strict=True)) < 2e-5


def test_the_trainer_updates_in_place_and_hands_the_same_handles_over(engine, handles):
    async def steps():
        version, tensors = make_adapter(2)
        shared = share("trainer", tensors)
        said = []
        for step in range(2):
            await engine.load_draft(draft_of(version, f"s{step}"), shared)
            for tensor in tensors.values():
                tensor.mul_(0.5)
            (done,) = await engine.generate([ask(f"s{step}", f"a{step}")])
            said.append(done.logprobs)
        (first,) = await engine.generate([ask("s0", "b")])
        return said, first

    said, first = run(steps())
    assert said[0] != said[1]
    assert first.logprobs == said[0]  # what is in a slot does not follow the trainer's memory
    assert len(handles) == len(make_adapter(2)[1])


def test_a_version_that_is_not_what_the_engine_read_puts_the_draft_out(engine):
    async def attempt():
        version, tensors = make_adapter(2)
        await engine.load_draft(draft_of(version, "d2"), share("trainer", tensors))
        with pytest.raises(AdapterRejected, match="changed while they were handed over"):
            await engine.seal_draft("d2", version, "0" * 64)
        with pytest.raises(AdapterNotFound):
            await engine.generate([ask("d2")])

    run(attempt())
    assert engine.stats().loaded == ()


def test_sealing_what_is_loaded_already_joins_the_two(engine):
    async def join():
        version, tensors = make_adapter(2)
        await engine.load_adapter(version, tensors)
        await engine.load_draft(draft_of(version, "d3"), share("trainer", tensors))
        await engine.seal_draft("d3", version, folded_digest(fold(version.spec, tensors)))
        assert engine.stats().loaded == (version.digest,)
        return await engine.generate([ask("d3", "a"), ask(version.digest, "b")])

    one, other = run(join())
    assert one.token_ids == other.token_ids


def test_requests_on_a_draft_outlive_its_sealing_and_unloading(engine):
    long = dataclasses.replace(GREEDY, max_tokens=80)

    async def leave():
        version, tensors = make_adapter(2)
        await engine.load_draft(draft_of(version, "d4"), share("trainer", tensors))
        (alone,) = await engine.generate([ask("d4", "alone", long)])
        running = asyncio.ensure_future(engine.generate([ask("d4", "long", long)]))
        await asyncio.sleep(0.05)
        await engine.seal_draft("d4", version, folded_digest(fold(version.spec, tensors)))
        await engine.unload_adapter(version.digest)
        assert not running.done()
        (done,) = await running
        assert await engine._call(lambda: engine._rpc("epilora_list_adapters")) == {}
        return alone, done

    alone, done = run(leave())
    assert alone.token_ids == done.token_ids


def test_what_cannot_be_a_draft_is_refused(engine):
    async def attempts():
        version, tensors = make_adapter(2)
        shared = share("trainer", tensors)
        draft = draft_of(version, "d5")
        with pytest.raises(BaseMismatch, match="draft d5"):
            await engine.load_draft(dataclasses.replace(draft, base_digest="1" * 64), shared)
        await engine.load_draft(draft, shared)
        with pytest.raises(ValueError, match="'d5' is loaded already"):
            await engine.load_draft(draft, shared)
        with pytest.raises(AdapterNotFound):
            await engine.seal_draft("other", version, "")
        bad = {name: tensor.clone() for name, tensor in tensors.items()}
        next(iter(bad.values()))[0, 0] = float("nan")
        with pytest.raises(AdapterRejected, match=r"draft d6.*not finite"):
            await engine.load_draft(draft_of(version, "d6"), share("other", bad))
        for name in ("d7", "d8"):
            await engine.load_draft(draft_of(version, name), shared)
        for draft_id in engine.stats().drafts:
            await engine.pin_adapter(draft_id, "test")
        with pytest.raises(NoFreeSlot):
            await engine.load_draft(draft_of(version, "d9"), shared)
        for draft_id in engine.stats().drafts:
            await engine.unpin_adapter(draft_id, "test")

    run(attempts())


def test_an_adapter_that_vllm_puts_out_is_an_error_not_the_base(engine):
    async def put_out():
        version, tensors = make_adapter(2)
        await engine.load_adapter(version, tensors)
        manager = engine._engine.collective_rpc("_epilora_manager")[0]
        ((int_id, _),) = engine._rpc("epilora_list_adapters").items()
        manager.deactivate_adapter(int_id)
        with pytest.raises(RuntimeError, match=f"adapter {int_id} was put out of its slot"):
            manager.activate_adapter(int_id)
        manager.remove_adapter(int_id)

    run(put_out())


def test_the_direct_way_fills_a_used_slot_as_vllms_way_fills_an_empty_one(engine):
    version, tensors = make_adapter(3, rank=8, targets=("q_proj", "down_proj"))
    receipt = run(engine.load_adapter(version, tensors))
    run(engine.unload_adapter(version.digest))
    run(engine.load_adapter(*make_adapter(4, rank=16)))

    def directly():
        worker = engine._engine.collective_rpc(lambda worker: getattr(worker, "worker", worker))[0]
        ((int_id, slot),) = worker.epilora_list_adapters().items()
        worker.epilora_unload_adapter(int_id, refill=True)
        worker.epilora_stage_adapter("x", config_of(version.spec, ""), tensors)
        _, renamed = worker.__dict__.pop("_epilora_staged")
        worker._epilora_write(99, renamed)
        found = worker.epilora_list_adapters(), worker.epilora_read_slot_digest(slot)
        worker.epilora_unload_adapter(99)
        return slot, found, worker.epilora_list_adapters()

    slot, found, after = run(engine._call(directly))
    assert found == ({99: slot}, receipt.readback_digest)
    assert after == {}
