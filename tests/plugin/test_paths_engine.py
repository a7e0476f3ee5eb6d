"""The GPU's code in a real engine, in plain torch (path=op): against vLLM's own classes in the same process.

Stock vLLM 0.28 gives base rows that are batched with adapter rows the last slot's adapter on a CPU; where it runs here, such
rows come from batches of their own.
"""

import pytest
import torch

from epilora.plugin.counters import CALLS
from epilora.types import GenerateRequest, Sampling

from .conftest import run
from .test_base import Reference
from .tiny import make_adapter

pytestmark = pytest.mark.vllm
DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def environment():
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()


def engine_with(new_engine, environment, path, **more):
    """An engine whose layers take `path`; EPILORA_PATH is read while its layers are made."""
    environment.setenv("EPILORA_PATH", path)
    for name, value in more.pop("variables", {}).items():
        environment.setenv(name, value)
    engine = new_engine(dtype=DTYPE, activations=more.pop("activations", "w8a8"), **more)
    environment.delenv("EPILORA_PATH")
    return engine


@pytest.fixture(scope="module")
def op_engine(new_engine, environment):
    return engine_with(new_engine, environment, "op")


@pytest.fixture(scope="module")
def stock_engine(new_engine, environment):
    return engine_with(new_engine, environment, "stock")


ADAPTERS = [make_adapter(seed, rank=rank, size=0.08) for seed, rank in ((1, 8), (2, 16), (3, 4))]


def requests(who, *, tag, length=8, tokens=12):
    prompts = [tuple(3 + (5 * i + 3 * j) % 26 for j in range(length)) for i in range(len(who))]
    return [
        GenerateRequest(
            f"{tag}{i}", prompt, Sampling(tokens, temperature=0.0, logprobs=0, ignore_eos=True),
            None if adapter is None else ADAPTERS[adapter][0].digest,
        )
        for i, (prompt, adapter) in enumerate(zip(prompts, who, strict=True))
    ]  # fmt: skip


def answers(engine, who, *, tag, together=True, **shape):
    """{index: (tokens, logprobs)} of one batch, or of one batch per adapter."""

    async def ask():
        for version, tensors in ADAPTERS:
            if version.digest not in engine.stats().loaded:
                await engine.load_adapter(version, tensors)
        batch = requests(who, tag=tag, **shape)
        groups = (
            [range(len(who))]
            if together
            else [[i for i, w in enumerate(who) if w == g] for g in sorted({*who}, key=str)]
        )
        found = {}
        for group in groups:
            done = await engine.generate([batch[i] for i in group])
            found |= {i: (c.token_ids, torch.tensor(c.logprobs)) for i, c in zip(group, done, strict=True)}
        return found

    return run(ask())


def agreement(one, other):
    """(mean |difference| of log-probabilities up to the first other token, tokens compared)."""
    deltas = []
    for i, (tokens, logprobs) in one.items():
        others, other_logprobs = other[i]
        same = next((n for n, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        deltas.append((logprobs[:same] - other_logprobs[:same]).abs())
    joined = torch.cat(deltas)
    return joined.mean().item(), joined.numel()


def test_every_linear_layer_is_fused(op_engine, stock_engine):
    from epilora.plugin.layers import layer_kinds

    kinds = layer_kinds(op_engine._engine.collective_rpc("_epilora_model")[0])
    assert {kind for kind, _ in kinds.values()} == {"lora_fused"}
    assert {reason for _, reason in kinds.values()} == {""}
    kinds = layer_kinds(stock_engine._engine.collective_rpc("_epilora_model")[0])
    assert {*kinds.values()} == {("lora_stock", "path=stock is set")}


def test_batches_without_adapters_are_identical_to_stock(op_engine, stock_engine):
    who = [None] * 6
    ours, theirs = (answers(e, who, tag="base") for e in (op_engine, stock_engine))
    assert all(ours[i][0] == theirs[i][0] and torch.equal(ours[i][1], theirs[i][1]) for i in ours)


def deviation(engine, found, who, *, adapters=ADAPTERS, **shape):
    """Mean |log p - log p in fp32 on the engine's codes with unrounded activations| of what a batch said."""
    (manifest,) = run(engine.export_weights())
    deltas = []
    for i, request in enumerate(requests(who, tag="", **shape)):
        reference = Reference(manifest, torch.float32, None if who[i] is None else adapters[who[i]])
        tokens, logprobs = found[i]
        deltas.append((logprobs - reference.logprobs(request.prompt, tokens)).abs())
    return torch.cat(deltas).mean().item()


def test_mixed_batches_deviate_from_fp32_no_more_than_stock(op_engine, stock_engine):
    who = [0, None, 1, 0, 2, None, 1, 2, None, 0, 1, 2, None, 2, 1, 0] * 2
    ours = answers(op_engine, who, tag="mixed", tokens=24)
    theirs = answers(stock_engine, who, tag="mixed", together=False, tokens=24)
    mine, stock = (deviation(e, found, who, tokens=24) for e, found in ((op_engine, ours), (stock_engine, theirs)))
    wrong = deviation(op_engine, ours, who, adapters=ADAPTERS[1:] + ADAPTERS[:1], tokens=24)
    print(f"mean |delta log p| against fp32: ours {mine:.3f}, stock {stock:.3f}; against other adapters {wrong:.3f}")
    assert mine < 1.1 * stock
    assert wrong > 3 * mine  # another adapter does show


def test_chunked_prefill_and_prefix_cache(new_engine, environment, op_engine):
    who = [0, None, 1, 2, 1, 0, None, 2]
    shape = {"length": 150, "tokens": 24}
    chunked = engine_with(new_engine, environment, "op", max_num_batched_tokens=64)
    whole = deviation(op_engine, answers(op_engine, who, tag="long", **shape), who, **shape)
    first = deviation(chunked, answers(chunked, who, tag="long", **shape), who, **shape)
    again = deviation(chunked, answers(chunked, who, tag="again", **shape), who, **shape)  # from the prefix cache
    print(f"mean |delta log p| against fp32: whole {whole:.3f}, in chunks {first:.3f}, cached {again:.3f}")
    assert max(first, again) < 1.3 * whole


def test_vllms_compiler_sees_one_node_a_projection(op_engine, monkeypatch):
    layer = op_engine._engine.collective_rpc("_epilora_lora_layers")[0]["model.layers.0.self_attn.qkv_proj"]
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    graphs, placeholders = [], []

    def backend(graph, example):
        placeholders.append(example)
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.randn(5, layer.input_size, dtype=torch.bfloat16)
    compiled = torch.compile(layer.apply, fullgraph=True, backend=backend, dynamic=True)
    assert torch.equal(compiled(x), layer.apply(x))
    (targets,) = graphs
    assert sum("epilora" in target for target in targets) == 1
    assert not any("mm" in target for target in targets)  # the base GEMM is inside
    # A host tensor among the inputs makes the compiler take the output for unaligned: slower kernels after it.
    assert not [p for p in placeholders[0] if isinstance(p, torch.Tensor) and p.numel() == 1 and p.dtype is torch.bool]


def test_a_slot_that_changes_hands_serves_its_new_adapter(op_engine):
    before = answers(op_engine, [0, 1, 2], tag="slots")

    async def reload():
        for version, _ in ADAPTERS:
            await op_engine.unload_adapter(version.digest)
        for version, tensors in reversed(ADAPTERS):  # now in other slots
            await op_engine.load_adapter(version, tensors)

    run(reload())
    after = answers(op_engine, [0, 1, 2], tag="moved")
    assert all(before[i][0] == after[i][0] and torch.equal(before[i][1], after[i][1]) for i in before)


def test_matched_activations(new_engine, environment, op_engine):
    matched = engine_with(new_engine, environment, "op", activations="w8a16")
    plain = engine_with(new_engine, environment, "auto", activations="w8a16")  # grouped rows, plain torch
    who = [0, None, 1, 2]
    ours, theirs = answers(matched, who, tag="w8a16"), answers(plain, who, tag="w8a16")
    mean, _ = agreement(ours, theirs)
    rounded, _ = agreement(answers(op_engine, who, tag="w8a8"), theirs)
    print(f"mean |delta log p| matched {mean:.2e}, w8a8 {rounded:.2e}")
    assert mean < 0.02 < 3 * rounded


@pytest.mark.parametrize(("adapters", "dtype"), [("fp8", torch.float8_e4m3fn), ("nvfp4", torch.uint8)])
def test_slots_in_a_low_precision(adapters, dtype, new_engine, environment, op_engine):
    stored = engine_with(new_engine, environment, "op", variables={"EPILORA_ADAPTERS": adapters})
    environment.delenv("EPILORA_ADAPTERS")
    layer = stored._engine.collective_rpc("_epilora_lora_layers")[0]["model.layers.0.mlp.down_proj"]
    assert layer._epilora_stored.a[0].dtype == dtype
    who = [0, None, 1, 2]
    ours, plain = answers(stored, who, tag=adapters), answers(op_engine, who, tag=f"16bit {adapters}")
    assert torch.equal(ours[1][1], plain[1][1])  # a base row
    mean, _ = agreement(ours, plain)
    print(f"mean |delta log p| with {adapters} slots {mean:.3e}")
    assert 1e-4 < mean < {"fp8": 0.1, "nvfp4": 0.3}[adapters]
    slots = layer._epilora_stored
    assert any(bool(codes.view(torch.uint8).any()) for codes in slots.a)
    for index in range(slots.a[0].shape[0]):
        layer.reset_lora(index)
    fresh = type(slots)(slots.format, slots.host_a, slots.host_b, slots.device)
    for part in ("a", "b", "a_scales", "b_scales"):
        for emptied, made in zip(getattr(slots, part), getattr(fresh, part), strict=True):
            assert torch.equal(emptied.view(torch.uint8), made.view(torch.uint8)), part


def test_batch_invariant_layers_are_all_or_an_error(new_engine, environment):
    from epilora.errors import UnsupportedKernel

    engine = engine_with(new_engine, environment, "op", variables={"EPILORA_BATCH_INVARIANT": "1"})
    before = dict(CALLS)
    answers(engine, [0, None], tag="invariant", tokens=4)
    assert CALLS["lora_invariant"] > before.get("lora_invariant", 0)
    with pytest.raises(UnsupportedKernel, match=r"EPILORA_BATCH_INVARIANT=1.*no FP8 GEMM.*fp8_per_channel"):
        engine_with(new_engine, environment, "op", quantization=None)
    with pytest.raises(UnsupportedKernel, match=r"EPILORA_BATCH_INVARIANT=1.*plain torch.*EPILORA_PATH=op"):
        engine_with(new_engine, environment, "auto")
    environment.delenv("EPILORA_BATCH_INVARIANT")
    environment.delenv("EPILORA_PATH", raising=False)


def test_a_layer_left_to_vllm_is_an_error_where_that_is_asked(new_engine, environment):
    from epilora.errors import UnsupportedKernel

    with pytest.raises(UnsupportedKernel, match=r"EPILORA_REQUIRE=1.*path=stock is set"):
        engine_with(new_engine, environment, "stock", variables={"EPILORA_REQUIRE": "1"})
    environment.delenv("EPILORA_REQUIRE")
    environment.delenv("EPILORA_PATH")
