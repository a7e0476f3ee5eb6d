"""The training GEMMs as a layer, on a GPU or in Triton's interpreter (fp16 there), against fp32 autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epilora.quant.block_fp8 import quantize_blocks_ref
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.nvfp4 import quantize_nvfp4_ref
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, quantize_weight_ref
from epilora.trainer.attach import MappedBase
from epilora.trainer.gemm_linear import GemmProjection
from epilora.trainer.linear import AdapterContext, LoraLinear, LoraPair, Segment
from epilora.trainer.logprob import selected_logprobs
from epilora.trainer.model import BaseModel, build_model
from epilora.trainer.own_base import copy_codes
from epilora.trainer.session import Session

from .conftest import HAS_CUDA, SPEC, Small

pytestmark = [pytest.mark.gpu] if HAS_CUDA else []  # `make test-gpu` runs all of it there, `make test` here
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter's bf16 products are not to be trusted
M, K, N, R, SCALING = 37, 96, 48, 16, 1.7


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))


def operand(kind: str) -> Operand:
    torch.manual_seed(1)
    weight = torch.randn(N, K, device=DEVICE)
    if kind == "16 bit":
        return Operand(weight.to(DTYPE), Format.BF16 if DTYPE is torch.bfloat16 else Format.FP16)
    if kind == "nvfp4":
        return quantize_nvfp4_ref(weight)
    return quantize_blocks_ref(weight) if kind == "block" else quantize_weight_ref(weight, ScaleAxis(kind))


def pair(seed: int) -> LoraPair:
    torch.manual_seed(seed)
    a, b = torch.randn(R, K, device=DEVICE), torch.randn(N, R, device=DEVICE)
    return LoraPair(a.requires_grad_(), b.requires_grad_(), SCALING)


def layer(weight: Operand, mode: str, *segments: Segment, bias: torch.Tensor | None = None) -> LoraLinear:
    return LoraLinear("m", GemmProjection(weight, bias, AdapterContext(segments), mode))


@pytest.mark.parametrize("mode", ["panel", "registers"])
@pytest.mark.parametrize("kind", ["channel", "tensor", "block", "nvfp4", "16 bit"])
def test_gradients_equal_autograd_on_the_dequantised_weight(kind: str, mode: str) -> None:
    weight, adapter = operand(kind), pair(2)
    bias = torch.linspace(-1, 1, N, device=DEVICE).to(DTYPE)
    x = torch.randn(1, M, K, device=DEVICE).to(DTYPE).requires_grad_()
    y = layer(weight, mode, Segment(0, None, {"m": adapter}), bias=bias)(x)
    dy = torch.randn(y.shape, device=DEVICE).to(DTYPE)
    y.backward(dy)
    x_ref = x.detach().float().requires_grad_()
    a_ref, b_ref = (t.detach().clone().requires_grad_() for t in (adapter.a, adapter.b))
    y_ref = F.linear(x_ref, dequantize(weight) + SCALING * b_ref @ a_ref, bias.float())
    y_ref.backward(dy.float())
    assert y.dtype == DTYPE
    assert cosine(y, y_ref) >= 0.9999
    for mine, reference in ((x.grad, x_ref.grad), (adapter.a.grad, a_ref.grad), (adapter.b.grad, b_ref.grad)):
        assert mine is not None
        assert reference is not None
        assert cosine(mine, reference) >= 0.9999
        assert float(mine.float().norm() / reference.norm()) == pytest.approx(1.0, abs=5e-3)


def test_rows_of_two_adapters_and_of_none_share_a_batch() -> None:
    weight = operand("channel")
    x = torch.randn(M, K, device=DEVICE).to(DTYPE)
    dy = torch.randn(M, N, device=DEVICE).to(DTYPE)
    one, two = pair(2), pair(3)
    rows = {"one": slice(0, 11), "two": slice(11, 30), "none": slice(30, M)}
    mixed_x = x.clone().requires_grad_()
    y = layer(weight, "registers", Segment(0, 11, {"m": one}), Segment(11, 30, {"m": two}))(mixed_x)
    y.backward(dy)
    for name, adapter in (("one", one), ("two", two), ("none", None)):
        span = rows[name]
        alone = (
            None
            if adapter is None
            else LoraPair(adapter.a.detach().requires_grad_(), adapter.b.detach().requires_grad_(), SCALING)
        )
        x_alone = x[span].clone().requires_grad_()
        segments = () if alone is None else (Segment(0, None, {"m": alone}),)
        y_alone = layer(weight, "registers", *segments)(x_alone)
        y_alone.backward(dy[span])
        assert cosine(y[span], y_alone) >= 0.99999
        assert mixed_x.grad is not None
        assert cosine(mixed_x.grad[span], x_alone.grad) >= 0.99999
        if adapter is not None and alone is not None:
            assert cosine(adapter.a.grad, alone.a.grad) >= 0.99999
            assert cosine(adapter.b.grad, alone.b.grad) >= 0.99999


def test_x_h_and_the_served_adapter_are_saved_and_no_weight_is_held() -> None:
    made = layer(operand("channel"), "registers", Segment(0, None, {"m": pair(2)}))
    x = torch.randn(M, K, device=DEVICE).to(DTYPE).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        made(x)
    assert sorted(t.numel() for t in saved) == sorted([M * K, M * R, R * K, N * R])
    assert made.base.context.largest_dequantised_bytes == 0
    layer_panel = layer(operand("channel"), "panel")
    layer_panel(x)
    assert layer_panel.base.context.largest_dequantised_bytes == 2 * N * K  # smaller than a panel here


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="gemm_mode='fast'; allowed: registers, panel"):
        GemmProjection(operand("channel"), mode="fast")


def gradients(model: BaseModel, session: Session, pairs: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """d(sum of log p of the answers) of packed sequences; pairs: (ids, how many of the last are the answer)."""
    session.grad.zero_()
    ids = torch.tensor([[i for sequence, _ in pairs for i in sequence]])
    ends = torch.tensor([len(sequence) for sequence, _ in pairs]).cumsum(0).tolist()
    places = [p for end, (_, count) in zip(ends, pairs, strict=True) for p in range(end - count - 1, end - 1)]
    with model.adapter(session.pairs):
        hidden = model.hidden(ids, tuple(len(sequence) for sequence, _ in pairs))[0, places]
        targets = ids[0, [p + 1 for p in places]].to(hidden.device)
        chosen, _ = selected_logprobs(hidden, model.head, targets[:, None])
        chosen.sum().backward()
    return {f"{name}.{side}": getattr(p, side).grad.clone() for name, p in session.pairs.items() for side in "ab"}


@pytest.mark.parametrize("mode", ["panel", "registers"])
def test_gradients_of_a_model_equal_fp32_autograd(small: Small, mode: str) -> None:
    base = copy_codes(MappedBase(small.base.manifest), DEVICE, offloaded=False)
    model = build_model(base, DTYPE, checkpoint_activations=True, gemm_mode=mode)
    exact = build_model(base, torch.float32)
    session = Session("s", SPEC, {"lr": 1e-9}, 3, exact.linear_shapes, DEVICE)
    with torch.no_grad():
        noise = torch.randn(session.theta.shape, generator=torch.Generator().manual_seed(0))
        session.theta.add_(0.1 * noise.to(DEVICE))
    batch = [([7, 3, 9, 1, 4, 22], 3), ([5, 41, 2], 1), ([11, 12, 13, 14, 15, 16, 17], 5)]
    want, found = gradients(exact, session, batch), gradients(model, session, batch)
    assert min(cosine(found[name], want[name]) for name in want) >= 0.9999
