"""The engine over two tensor-parallel ranks, each a CPU process: adapters, read-back, export of shards, the trainer's ranks on
them, and what a killed rank does.
"""

import dataclasses
import multiprocessing
import time

import pytest

from epilora.adapters.digest import adapter_digest, ranks_digest
from epilora.errors import AdapterRejected, EngineDead
from epilora.trainer.sharded import ShardedTrainer
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec, AdapterVersion, GenerateRequest, Rollout, RolloutGroup, Sampling

from . import tiny
from .conftest import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
GREEDY = Sampling(max_tokens=10, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture
def even_model(monkeypatch, tmp_path):
    """The tiny model with heads that two ranks can share."""
    q, kv = 4 * tiny.HEAD_DIM, 2 * tiny.HEAD_DIM
    monkeypatch.setattr(tiny, "HEADS", 4)
    monkeypatch.setattr(tiny, "KV_HEADS", 2)
    for leaf, shape in {"q_proj": (q, 96), "k_proj": (kv, 96), "v_proj": (kv, 96), "o_proj": (96, q)}.items():
        monkeypatch.setitem(tiny.SHAPES, leaf, ("self_attn", *shape))
    return str(tiny.make_model(tmp_path / "even"))


def difference(ours, theirs):
    """Largest |difference| of two lists of log-probabilities."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def say(engine, version, tensors):
    """The base's greedy answer and the adapter's."""
    receipt = await engine.load_adapter(version, tensors)
    asked = [GenerateRequest(str(i), "12+3=", GREEDY, who) for i, who in enumerate((None, version.digest))]
    return receipt, await engine.generate(asked)


def ask_until(engine, deadline):
    while time.monotonic() < deadline:
        engine.stats()
        time.sleep(0.05)


def trained(trainer, manifests, done):
    """Two policy-gradient steps on what an engine said; the adapter as a version, and its log-probabilities of that."""
    trainer.attach(manifests)
    trainer.open_session("s", AdapterSpec(8, 16.0, ("all-linear",)), {"lr": 1e-2}, seed=5)
    rollouts = [Rollout("p", c.prompt_token_ids, c.token_ids, c.logprobs, float(i), ("v",)) for i, c in enumerate(done)]
    mismatch = trainer.train_rl("s", [RolloutGroup("p", tuple(rollouts))], {})["mismatch/max_abs_dlogp"]
    trainer.train_rl("s", [RolloutGroup("p", tuple(rollouts))], {})
    spec, tensors = trainer.adapter("s")
    version = AdapterVersion("policy", 1, adapter_digest(spec, tensors), spec)
    logprobs = trainer.logprobs("s", [(c.prompt_token_ids, c.token_ids) for c in done])
    return version, tensors, logprobs, mismatch


def test_two_ranks_hold_an_adapters_shards_say_what_one_says_and_train_like_one(even_model, new_engine):
    version, tensors = tiny.make_adapter(2, size=0.08)
    bad = {
        name: t[:-1].clone() if name.endswith("0.self_attn.k_proj.lora_B.weight") else t for name, t in tensors.items()
    }
    wrong = dataclasses.replace(version, digest=adapter_digest(version.spec, bad))
    one_rank = new_engine(model_path=even_model)
    one = run(say(one_rank, version, tensors))
    two_ranks = new_engine(model_path=even_model, tensor_parallel=2)
    ours = ShardedTrainer(2, timeout_s=120)
    try:
        receipt, done = run(say(two_ranks, version, tensors))
        with pytest.raises(AdapterRejected, match=r"k_proj.*\(63, 8\).*\(64, 8\)"):
            run(two_ranks.load_adapter(wrong, bad))
        assert receipt.readback_digest == receipt.expected_digest != one[0].readback_digest
        assert (receipt.modules, receipt.base_modules) == (14, 14)
        assert [c.token_ids for c in done] == [c.token_ids for c in one[1]]
        assert max(difference(a.logprobs, b.logprobs) for a, b in zip(done, one[1], strict=True)) < 1e-4

        manifests, checksum = run(two_ranks.export_weights()), run(two_ranks.base_checksum())
        assert [(m.tp_rank, m.tp_size) for m in manifests] == [(0, 2), (1, 2)]
        assert two_ranks.info().base_digest == checksum == ranks_digest([m.base_digest for m in manifests])
        assert manifests[0].base_digest != manifests[1].base_digest
        name = "model.layers.0.self_attn.qkv_proj"
        assert [m.entry(name).values.shape for m in manifests] == [(128, 96)] * 2
        assert manifests[1].entry(name).slices == (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
        assert [m.entry("model.layers.0.mlp.down_proj").values.shape for m in manifests] == [(96, 144)] * 2
        assert [m.entry("model.embed_tokens").values.shape[0] for m in manifests] == [tiny.VOCAB, 0]

        policy, its_tensors, logprobs, mismatch = trained(ours, manifests, done)
        _, expected_tensors, expected, alone = trained(LoraTrainer(), run(one_rank.export_weights()), done)
        # large: the second answer is the adapter's, and the session began without one
        assert abs(mismatch - alone) < 1e-4 < alone
        for found, wanted in zip(logprobs, expected, strict=True):
            assert difference(found, wanted) < 1e-3
        moved = max(float(abs(its_tensors[n] - v).max()) for n, v in expected_tensors.items())
        assert moved < 2e-3  # two steps of 0.01
        # One adapter from the ranks, in both engine ranks: the engine samples from what was trained.
        run(two_ranks.load_adapter(policy, its_tensors))
        asked = [(c.prompt_token_ids, c.token_ids) for c in done]
        for found, wanted in zip(run(two_ranks.score(asked, policy.digest)), logprobs, strict=True):
            assert difference(found, wanted) < 1e-4
        assert run(two_ranks.base_checksum()) == checksum == ours.base_checksum()

        workers = [p for p in multiprocessing.active_children() if "Worker" in p.name]
        assert len(workers) == 2
        began = time.monotonic()
        workers[1].kill()
        with pytest.raises(EngineDead, match="one of its tensor-parallel ranks ended"):
            ask_until(two_ranks, began + 60)
        print(f"a killed rank was noticed after {time.monotonic() - began:.2f} s without a request")
        with pytest.raises(EngineDead):
            run(say(two_ranks, version, tensors))
        workers[0].join(30)
        assert not workers[0].is_alive()  # it does not outlive the pair
    finally:
        two_ranks.close()
        ours.close()
