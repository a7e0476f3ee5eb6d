"""The base: what its arithmetic is in every dtype, and that there is one copy of it that others can compute on."""

import ctypes
import mmap
import os

import pytest
import torch
import torch.nn.functional as F

from epilora.adapters.digest import weights_digest
from epilora.adapters.fold import fold
from epilora.errors import AdapterRejected, UnsupportedKernel
from epilora.kernels.cpu_reference import w8a16_lora_linear
from epilora.quant.formats import Format, ScaleAxis
from epilora.types import GenerateRequest, Sampling

from .conftest import run
from .tiny import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, make_adapter, make_model

pytestmark = pytest.mark.vllm

SEEDED = Sampling(max_tokens=24, seed=5, logprobs=0, ignore_eos=True)


def mapped(entry):
    """A manifest tensor, mapped from its file; writes would stay private."""
    descriptor = os.open(entry.location.path, os.O_RDONLY)
    region = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)  # torch wants it writable
    os.close(descriptor)
    count = 1
    for size in entry.shape:
        count *= size
    flat = torch.frombuffer(region, dtype=getattr(torch, entry.dtype), count=count, offset=entry.location.offset_bytes)
    return flat.view(entry.shape)


class Reference:
    """Qwen3 in plain torch on the exported bytes: unrounded activations, matched arithmetic, whole-sequence attention."""

    def __init__(self, manifest, dtype, adapter=None):
        self.manifest, self.dtype = manifest, dtype
        self.adapter = {}
        if adapter is not None:
            version, tensors = adapter
            self.adapter = fold(version.spec, tensors)

    def tensor(self, name):
        return mapped(self.manifest.entry(name).values)

    def linear(self, x, name):
        entry = self.manifest.entry(name)
        codes, scales = mapped(entry.values), mapped(entry.scales)
        out, row = [], 0
        for leaf, width in entry.slices:
            module = self.adapter.get(name.rsplit(".", 1)[0] + "." + leaf)
            a, b = (module.a_RK.to(self.dtype), module.b_NR.to(self.dtype)) if module else (None, None)
            out.append(w8a16_lora_linear(x, codes[row : row + width], scales[row : row + width], None, a, b))
            row += width
        return torch.cat(out, dim=-1)

    def norm(self, x, name, eps=1e-6):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return wide.to(self.dtype) * self.tensor(name)

    def rotate(self, x):
        half = HEAD_DIM // 2
        angle = torch.arange(x.shape[0]).float()[:, None] / 10000.0 ** (torch.arange(half).float() * 2 / HEAD_DIM)
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    def logprobs(self, prompt, completion):
        tokens = torch.tensor([*prompt, *completion])
        x = self.tensor("model.embed_tokens")[tokens].to(self.dtype)
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            h = self.norm(x, f"{at}.input_layernorm")
            qkv = self.linear(h, f"{at}.self_attn.qkv_proj")
            q, k, v = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
            q = self.rotate(self.norm(q.reshape(-1, HEADS, HEAD_DIM), f"{at}.self_attn.q_norm"))
            k = self.rotate(self.norm(k.reshape(-1, KV_HEADS, HEAD_DIM), f"{at}.self_attn.k_norm"))
            v = v.reshape(-1, KV_HEADS, HEAD_DIM)
            heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            x = x + self.linear(attended[0].transpose(0, 1).reshape(len(tokens), -1), f"{at}.self_attn.o_proj")
            h = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = self.linear(h, f"{at}.mlp.gate_up_proj").split(FFN, dim=-1)
            x = x + self.linear(F.silu(gate) * up, f"{at}.mlp.down_proj")
        logits = F.linear(self.norm(x, "model.norm"), self.tensor("model.embed_tokens").to(self.dtype)).float()
        picked = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])
        return picked.flatten()


def mismatch(engine, dtype):
    """Mean |log p of engine - log p of reference| over tokens of base rows and adapter rows."""
    adapter = make_adapter(2, size=0.08)

    async def sample():
        await engine.load_adapter(*adapter)
        who = [None, adapter[0].digest] * 8
        prompts = [tuple(3 + (5 * i + 3 * j) % 26 for j in range(8)) for i in range(16)]
        batch = [
            GenerateRequest(str(i), prompts[i], Sampling(24, seed=i, logprobs=0, ignore_eos=True), who[i])
            for i in range(16)
        ]
        done = await engine.generate(batch)
        (manifest,) = await engine.export_weights()
        await engine.unload_adapter(adapter[0].digest)
        return done, manifest

    done, manifest = run(sample())
    deltas = []
    for completion in done:
        reference = Reference(manifest, dtype, adapter if completion.adapter else None)
        theirs = reference.logprobs(completion.prompt_token_ids, completion.token_ids)
        deltas.append((torch.tensor(completion.logprobs) - theirs).abs())
    return torch.cat(deltas).mean().item()


# dtype -> (largest matched mismatch, least ratio of w8a8 to it). The ratios are the ones promised for each dtype.
BOUNDS = {"float32": (3e-6, 1000.0), "float16": (3e-3, 15.0), "bfloat16": (3e-2, 2.5)}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_matched_activations_remove_the_mismatch(new_engine, main_engine, dtype):
    largest, ratio = BOUNDS[dtype]
    matched_engine = main_engine if dtype == "float32" else new_engine(dtype=dtype)
    rounded_engine = new_engine(dtype=dtype, activations="w8a8")
    assert (matched_engine.info().activations, rounded_engine.info().activations) == ("w8a16", "w8a8")
    matched = mismatch(matched_engine, getattr(torch, dtype))
    rounded = mismatch(rounded_engine, getattr(torch, dtype))
    print(f"{dtype}: mean |delta log p| w8a16 {matched:.2e}, w8a8 {rounded:.2e}, {rounded / matched:.0f}x")
    assert matched < largest
    assert rounded > ratio * matched


def test_every_fp8_layer_is_switched_or_none(main_engine, new_engine, monkeypatch):
    assert main_engine._rpc("epilora_activations") == {"w8a16": 4 * LAYERS}
    from epilora.plugin import layers

    monkeypatch.setattr(layers, "_matched_problem", lambda layer: "it is odd" if layer.input_size == FFN else None)
    with pytest.raises(UnsupportedKernel, match=r"down_proj.*it is odd.*w8a8"):
        new_engine()


def test_matched_needs_a_base_in_fp8_or_unquantised(new_engine):
    from epilora.plugin.layers import match_activations

    assert new_engine(quantization=None)._rpc("epilora_activations") == {}
    with pytest.raises(UnsupportedKernel, match=r"quantization 'awq', has no FP8 linear layer"):
        match_activations(torch.nn.Linear(2, 2), "w8a16", "awq")
    with pytest.raises(ValueError, match=r"w8a32.*w8a8, w8a16"):
        new_engine(activations="w8a32")


def test_an_adapter_too_large_for_fp16_is_refused(new_engine):
    engine = new_engine(dtype="float16")
    version, tensors = make_adapter(1, size=1e5)
    with pytest.raises(AdapterRejected, match=r"reaches .*float16, up to 6.55e\+04"):
        run(engine.load_adapter(version, tensors))


def test_a_plain_base_runs_too(new_engine):
    engine = new_engine(quantization=None, activations="w8a8")
    assert engine.info().quantization == "none"
    (done,) = run(engine.generate([GenerateRequest("x", "1+2=", SEEDED)]))
    assert len(done.token_ids) == 24
    model = engine._engine.collective_rpc("_epilora_model")[0]
    repacked = not model.get_submodule("model.layers.0.self_attn.qkv_proj").base_layer.weight.numel()
    if repacked:  # vLLM's choice for this CPU: bytes nobody else can read are not exported as if they could be
        with pytest.raises(UnsupportedKernel, match=r"qkv_proj\.weight is empty"):
            run(engine.export_weights())
    else:
        (manifest,) = run(engine.export_weights())
        entry = manifest.entry("model.layers.0.self_attn.qkv_proj")
        assert (entry.format, entry.axis, entry.scales) == (Format.FP32, ScaleAxis.NONE, None)


# ---- export -------------------------------------------------------------------------------------------------------


def test_every_worker_keeps_its_weights_out_of_the_pool(main_engine):
    """Shown on the class that all workers derive from; on the CPU it changes nothing."""
    from vllm.v1.worker.gpu_worker import Worker

    assert Worker._maybe_get_memory_pool_context._epilora


def test_export_changes_nothing_and_repeats_itself(new_engine):
    engine = new_engine(name="exporting")

    async def around():
        (before,) = await engine.generate([GenerateRequest("x", "1+2=", SEEDED)])
        first = await engine.export_weights()
        (after,) = await engine.generate([GenerateRequest("x", "1+2=", SEEDED)])
        return before, first, after, await engine.export_weights(), await engine.base_checksum()

    before, first, after, second, checksum = run(around())
    assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs)
    assert first == second
    assert first[0].base_digest == checksum == engine.info().base_digest
    assert (first[0].engine, first[0].tp_rank, first[0].tp_size) == ("exporting", 0, 1)
    path = first[0].entries[0].values.location.path
    assert os.path.exists(path)
    engine.close()
    assert not os.path.exists(path)


def test_manifest_lists_every_weight_as_it_lies_there(main_engine):
    (manifest,) = run(main_engine.export_weights())
    layer = [
        f"model.layers.0.{m}" for m in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    shapes = {name: manifest.entry(name).values.shape for name in layer}
    assert shapes == dict(zip(layer, [(160, 96), (96, 96), (576, 96), (96, 288)], strict=True))
    assert manifest.entry(layer[0]).slices == (("q_proj", 96), ("k_proj", 32), ("v_proj", 32))
    assert manifest.entry(layer[1]).slices == (("o_proj", 96),)
    assert manifest.entry(layer[2]).slices == (("gate_proj", 288), ("up_proj", 288))
    for name in layer:
        entry = manifest.entry(name)
        assert (entry.format, entry.axis) == (Format.FP8_E4M3, ScaleAxis.CHANNEL)
        assert entry.scales.shape == (entry.values.shape[0], 1)
        assert (
            entry.values.location.offset_bytes % mmap.PAGESIZE
            == entry.scales.location.offset_bytes % mmap.PAGESIZE
            == 0
        )
    assert manifest.entry("model.embed_tokens").values.shape == (VOCAB, HIDDEN)
    names = {entry.name for entry in manifest.entries}
    assert "lm_head" not in names  # tied
    assert len(names) == LAYERS * 8 + 2
    stored = [(f"{e.name}.weight", mapped(e.values)) for e in manifest.entries]
    stored += [(f"{e.name}.weight_scale", mapped(e.scales)) for e in manifest.entries if e.scales is not None]
    assert weights_digest(stored) == manifest.base_digest


def test_codes_are_vllms_quantisation_of_the_checkpoint(main_engine, model_path):
    from safetensors.torch import load_file

    from epilora.quant.formats import E4M3_MAX

    (manifest,) = run(main_engine.export_weights())
    entry = manifest.entry("model.layers.1.mlp.down_proj")
    weight = load_file(model_path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.tensor(E4M3_MAX)
    assert torch.equal(mapped(entry.scales), scale)
    assert torch.equal(mapped(entry.values).float(), (weight / scale).to(torch.float8_e4m3fn).float())


def test_the_engine_computes_on_the_shared_pages(main_engine):
    (manifest,) = run(main_engine.export_weights())
    entry = manifest.entry("model.layers.0.mlp.gate_up_proj")
    model = main_engine._engine.collective_rpc("_epilora_model")[0]
    layer = model.get_submodule("model.layers.0.mlp.gate_up_proj").base_layer
    assert tuple(layer.weight.shape) == (HIDDEN, 2 * FFN)
    assert layer.weight.stride() == (1, HIDDEN)
    with open("/proc/self/maps") as file:
        owner = [line.split() for line in file if entry.values.location.path in line and "r--s" in line]
    spans = [tuple(int(x, 16) for x in fields[0].split("-")) for fields in owner]
    address = layer.weight.data_ptr()
    assert any(start <= address < end for start, end in spans)
    assert ctypes.string_at(address, 64) == bytes(mapped(entry.values).view(torch.uint8).flatten()[:64].tolist())


def test_an_untied_head_is_exported(new_engine, tmp_path):
    engine = new_engine(model_path=str(make_model(tmp_path / "untied", tie=False)), activations="w8a8")
    (manifest,) = run(engine.export_weights())
    assert manifest.entry("lm_head").values.shape == (VOCAB, HIDDEN)
    assert manifest.entry("lm_head").slices == ()


def test_a_changed_byte_changes_the_checksum(new_engine):
    engine = new_engine()
    model = engine._engine.collective_rpc("_epilora_model")[0]
    weight = model.get_submodule("model.layers.0.self_attn.o_proj").base_layer.weight
    weight.data.view(torch.uint8)[0, 0] ^= 1
    assert run(engine.base_checksum()) != engine.info().base_digest
