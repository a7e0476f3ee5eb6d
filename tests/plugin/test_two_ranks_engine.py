"""The engine over two tensor-parallel ranks, each a CPU process: adapters, read-back, export of shards."""

import dataclasses

import pytest

from epilora.adapters.digest import adapter_digest
from epilora.errors import AdapterRejected
from epilora.types import GenerateRequest, Sampling

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
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return str(tiny.make_model(tmp_path / "even"))


def test_two_ranks_hold_an_adapters_shards_and_say_what_one_rank_says(even_model, new_engine):
    version, tensors = tiny.make_adapter(2, size=0.08)
    bad = {
        name: t[:-1].clone() if name.endswith("0.self_attn.k_proj.lora_B.weight") else t for name, t in tensors.items()
    }
    wrong = dataclasses.replace(version, digest=adapter_digest(version.spec, bad))

    async def say(engine):
        receipt = await engine.load_adapter(version, tensors)
        with pytest.raises(AdapterRejected, match=r"k_proj.*\(63, 8\).*\(64, 8\)"):
            await engine.load_adapter(wrong, bad)
        asked = [GenerateRequest(str(i), "12+3=", GREEDY, who) for i, who in enumerate((None, version.digest))]
        done = await engine.generate(asked)
        return receipt, done, await engine.export_weights(), await engine.base_checksum()

    one = run(say(new_engine(model_path=even_model)))
    two_ranks = new_engine(model_path=even_model, tensor_parallel=2)
    try:
        receipt, done, manifests, checksum = run(say(two_ranks))
    finally:
        two_ranks.close()
    assert receipt.readback_digest == receipt.expected_digest != one[0].readback_digest
    assert (receipt.modules, receipt.base_modules) == (14, 14)
    assert [c.token_ids for c in done] == [c.token_ids for c in one[1]]
    for ours, theirs in zip(done, one[1], strict=True):
        assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < 1e-4
    assert [(m.tp_rank, m.tp_size) for m in manifests] == [(0, 2), (1, 2)]
    assert manifests[0].base_digest == checksum != manifests[1].base_digest
    name = "model.layers.0.self_attn.qkv_proj"
    assert [m.entry(name).values.shape for m in manifests] == [(128, 96)] * 2
    assert manifests[1].entry(name).slices == (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
    assert [m.entry("model.layers.0.mlp.down_proj").values.shape for m in manifests] == [(96, 144)] * 2
    assert [m.entry("model.embed_tokens").values.shape[0] for m in manifests] == [tiny.VOCAB, 0]
