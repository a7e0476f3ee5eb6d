"""The fp32 reference equals transformers' own decoder on the same weights, with an adapter merged into them."""

from __future__ import annotations

import pathlib

import pytest
import torch

from benchmarks.serving.scoring import Fp32Reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "epilora" / "models" / "tiny-arith"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


class Parameters(torch.nn.Module):
    """What vLLM's module looks like to the reference: fused projections, FP8 weights as [K, N] with a scale a channel."""

    def __init__(self, weights: dict[str, torch.Tensor], *, fp8: bool) -> None:
        super().__init__()
        self.held = {}
        for name, tensor in weights.items():
            if fp8 and tensor.dim() == 2 and "_proj." in name:
                scale = tensor.abs().amax(1, keepdim=True) / 448
                self.held[name] = (tensor / scale).to(torch.float8_e4m3fn).t()
                self.held[name.replace(".weight", ".weight_scale")] = scale
            else:
                self.held[name] = tensor

    def named_parameters(self, *_, **__):
        return (
            (name.replace("_proj.", "_proj.base_layer."), torch.nn.Parameter(t, False)) for name, t in self.held.items()
        )


def fused(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    weights = {}
    for name, tensor in state.items():
        leaf = name.split(".")[-2]
        whole = next((f for f, parts in FUSED.items() if leaf in parts), None)
        if whole is None:
            weights[name] = tensor
        elif leaf == FUSED[whole][0]:
            weights[name.replace(leaf, whole)] = torch.cat([state[name.replace(leaf, part)] for part in FUSED[whole]])
    return weights


TOKENS = [3, 9, 14, 2, 30, 7, 7, 21, 5]


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        found = model(ids).logits.log_softmax(-1)[0]
    return found[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_reference_equals_transformers(theirs):
    reference = Fp32Reference(Parameters(fused(theirs), fp8=False), theirs.config)
    torch.testing.assert_close(torch.tensor(reference.scores(TOKENS, {})), logprobs(theirs), atol=1e-5, rtol=1e-5)


def test_reference_adds_an_adapter_to_every_part(theirs):
    generator = torch.Generator().manual_seed(0)
    adapter = {}
    for name, module in theirs.named_modules():
        if name.rsplit(".", 1)[-1] in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
            N, K = module.weight.shape
            a_RK, b_NR = torch.randn(4, K, generator=generator) * 0.1, torch.randn(N, 4, generator=generator) * 0.1
            adapter[name] = (a_RK, b_NR)
    plain = logprobs(theirs)
    reference = Fp32Reference(Parameters(fused(theirs), fp8=False), theirs.config)
    found = torch.tensor(reference.scores(TOKENS, adapter))
    with torch.no_grad():
        for name, (a_RK, b_NR) in adapter.items():
            theirs.get_submodule(name).weight += b_NR @ a_RK
    merged = logprobs(theirs)
    with torch.no_grad():
        for name, (a_RK, b_NR) in adapter.items():
            theirs.get_submodule(name).weight -= b_NR @ a_RK
    assert (merged - plain).abs().max() > 0.1  # the adapter matters
    torch.testing.assert_close(found, merged, atol=1e-5, rtol=1e-5)


def test_reference_reads_fp8_codes_and_scales(theirs):
    codes = Fp32Reference(Parameters(fused(theirs), fp8=True), theirs.config)
    widened = {name: codes.weight(name.removesuffix(".weight")) for name in fused(theirs) if "_proj." in name}
    exact = Fp32Reference(Parameters(fused(theirs) | widened, fp8=False), theirs.config)
    assert codes.scores(TOKENS, {}) == exact.scores(TOKENS, {})


def test_other_architectures_are_refused(theirs):
    config = type("Config", (), {"architectures": ["Qwen3_5ForCausalLM"]})
    with pytest.raises(ValueError, match="it evaluates Llama, Qwen2 and Qwen3"):
        Fp32Reference(Parameters({}, fp8=False), config)
