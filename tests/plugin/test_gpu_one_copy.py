"""One copy between processes on a GPU: weights mapped, KV memory given away and back, drafts handed over."""

import asyncio
import dataclasses
import multiprocessing

import pytest
import torch

from epilora.adapters.device_tensors import share
from epilora.adapters.fold import fold, folded_digest
from epilora.errors import EngineDead
from epilora.types import AdapterDraft, GenerateRequest, Sampling

from .conftest import run
from .tiny import HIDDEN, make_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
LONG = Sampling(max_tokens=48, temperature=0.0, logprobs=0, ignore_eos=True)
KV_BYTES = 64 << 20


@pytest.fixture(scope="module")
def gpu_engine(new_engine):
    """bfloat16, W8A8, graphs for the smallest batches."""
    return new_engine(
        name="gpu",
        dtype="bfloat16",
        activations="w8a8",
        kv_cache_bytes=KV_BYTES,
        graph_sizes=[1, 2, 4],
        compilation={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )


def requests(adapter=None, kind="tenant", count=4):
    return [GenerateRequest(f"{kind}{i}", f"{i}+2=", LONG, adapter, kind) for i in range(count)]


async def answers(engine, *args):
    await engine.reset_prefix_cache()
    return [(c.token_ids, c.logprobs) for c in await engine.generate(requests(*args))]


def in_process(target, *args):
    """What `target(*args)` returns in a process of its own; its exception's text if it raises."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_report, args=(there, target, args), daemon=True)
    process.start()
    assert here.poll(120), "the other process said nothing"
    found = here.recv()
    process.join(20)
    return found


def _report(pipe, target, args):
    try:
        pipe.send(target(*args))
    except Exception as err:
        pipe.send(f"{type(err).__name__}: {err}")


def attach(manifest):
    from epilora.kernels.training import train_forward, train_forward_ref
    from epilora.trainer.attach import MappedBase

    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    base = MappedBase(manifest)
    torch.cuda.empty_cache()
    own = torch.cuda.memory_allocated() - before
    operand = base.operands["model.layers.0.mlp.down_proj"]
    x = torch.randn(64, operand.values.shape[1], device="cuda", dtype=torch.bfloat16)
    y, want = train_forward(x, operand)[0].float(), train_forward_ref(x, operand)
    return own, operand.values.shape, operand.values.stride(), ((y - want).norm() / want.norm()).item(), base.digest()


def test_another_process_computes_on_the_engines_bytes(gpu_engine):
    (manifest,) = run(gpu_engine.export_weights())
    want = run(answers(gpu_engine))
    own, shape, stride, error, digest = in_process(attach, manifest)
    assert own == 0
    assert (tuple(shape), tuple(stride)) == ((HIDDEN, 288), (288, 1))
    assert error < 5e-3
    assert digest == manifest.base_digest == run(gpu_engine.base_checksum()) == gpu_engine.info().base_digest
    assert run(answers(gpu_engine)) == want


def test_memory_leaves_the_device_and_comes_back_to_the_same_answers(gpu_engine):
    want = run(answers(gpu_engine))
    assert len(set(want)) == 4
    for keep in (0.0, 0.5):
        before = torch.cuda.mem_get_info()[0]
        released = run(gpu_engine.release_kv(keep))
        assert released > (1 - keep) * KV_BYTES - (64 << 20) * keep - (4 << 20)
        assert torch.cuda.mem_get_info()[0] - before >= released - (4 << 20)
        run(gpu_engine.restore_kv())
        assert run(answers(gpu_engine)) == want


def test_rollouts_wait_for_their_blocks_and_end_as_they_would_have(gpu_engine):
    async def cycle():
        alone = await answers(gpu_engine, None, "rollout")
        await gpu_engine.reset_prefix_cache()
        running = asyncio.ensure_future(gpu_engine.generate(requests(None, "rollout")))
        await asyncio.sleep(0.03)
        await gpu_engine.release_kv(0.5)
        tenants = await gpu_engine.generate(requests())
        waited = not running.done()
        await gpu_engine.restore_kv()
        return alone, tenants, waited, await running

    alone, tenants, waited, done = run(cycle())
    assert waited
    assert len(tenants) == 4
    assert [c.token_ids for c in done] == [tokens for tokens, _ in alone]


def train(pipe):
    version, tensors = make_adapter(2, rank=16)
    here = {name: tensor.cuda() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    pipe.send((version, share("trainer", here)))
    pipe.recv()


def test_a_draft_of_another_process_is_its_version(gpu_engine):
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=train, args=(there,), daemon=True)
    process.start()
    assert pipe.poll(120)
    version, shared = pipe.recv()
    tensors = make_adapter(2, rank=16)[1]

    async def publish():
        receipt = await gpu_engine.load_draft(AdapterDraft("d1", version.name, version.spec), shared)
        drafted = await answers(gpu_engine, "d1")
        sealed = await gpu_engine.seal_draft("d1", version, folded_digest(fold(version.spec, tensors)))
        await gpu_engine.unload_adapter(version.digest)
        loaded = await gpu_engine.load_adapter(version, tensors)
        return receipt, sealed, loaded, drafted, await answers(gpu_engine, version.digest), await answers(gpu_engine)

    receipt, sealed, loaded, drafted, again, base = run(publish())
    pipe.send("end")
    process.join(20)
    assert receipt.modules == 14
    assert sealed.readback_digest == sealed.expected_digest == loaded.readback_digest
    assert drafted == again != base


def test_a_slot_keeps_nothing_of_the_adapter_before(gpu_engine):
    async def reuse():
        for digest in gpu_engine.stats().loaded:
            await gpu_engine.unload_adapter(digest)
        for seed in (3, 4, 5):  # every slot is full
            await gpu_engine.load_adapter(*make_adapter(seed, rank=16))
        version, tensors = make_adapter(6, rank=8, targets=("q_proj",))
        receipt = await gpu_engine.load_adapter(version, tensors)
        return receipt, await gpu_engine.read_slot_digest(receipt.slot)

    receipt, found = run(reuse())
    assert receipt.readback_digest == receipt.expected_digest == found


def test_handles_die_with_the_engine(gpu_engine):
    (manifest,) = run(gpu_engine.export_weights())
    gone = dataclasses.replace(manifest, engine="gone")
    entry = gone.entries[0]
    process, number, handle, *rest = entry.values.location.handle
    broken = dataclasses.replace(entry.values.location, handle=(process, number, bytes(len(handle)), *rest))
    values = dataclasses.replace(entry.values, location=broken)
    gone = dataclasses.replace(gone, entries=(dataclasses.replace(entry, values=values),))
    said = in_process(attach, gone)
    assert said.startswith(EngineDead.__name__)
    assert "engine 'gone'" in said
