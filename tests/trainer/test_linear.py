"""Forward and backward of the LoRA projection against fp32 autograd on the dequantised weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epilora.errors import UnsupportedKernel
from epilora.kernels.cpu_reference import w8a16_lora_linear
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, quantize_per_token_ref, quantize_weight_ref
from epilora.trainer.linear import AdapterContext, BaseProjection, LoraLinear, LoraPair, Segment, slice_rows

K, N, R, SCALING = 24, 20, 3, 1.7


def _operand(kind: str) -> Operand:
    torch.manual_seed(1)
    weight = torch.randn(N, K)
    if kind == "channel":
        return quantize_weight_ref(weight)
    if kind == "tensor":
        return quantize_weight_ref(weight, ScaleAxis.TENSOR)
    if kind == "bf16":
        return Operand(weight.bfloat16(), Format.BF16)
    scales = torch.rand(N // 4, K // 8) + 0.5
    return Operand(weight.to(torch.float8_e4m3fn), Format.FP8_E4M3, ScaleAxis.BLOCK, scales, block=(4, 8))


def _layer(
    operand: Operand, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> tuple[LoraLinear, LoraPair, torch.Tensor]:
    torch.manual_seed(2)
    pair = LoraPair(torch.randn(R, K).requires_grad_(), torch.randn(N, R).requires_grad_(), SCALING)
    context = AdapterContext((Segment(0, None, {"m": pair}),))
    x = torch.randn(2, 5, K, dtype=dtype).requires_grad_()
    return LoraLinear("m", BaseProjection(operand, bias, context)), pair, x


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["channel", "tensor", "block", "bf16"])
def test_gradients_equal_autograd_on_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    operand = _operand(kind)
    bias = torch.linspace(-1, 1, N)
    layer, pair, x = _layer(operand, dtype, bias)
    y = layer(x)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    x_ref = x.detach().float().requires_grad_()
    a_ref, b_ref = pair.a.detach().clone().requires_grad_(), pair.b.detach().clone().requires_grad_()
    y_ref = F.linear(x_ref, dequantize(operand) + SCALING * b_ref @ a_ref, bias)
    y_ref.backward(dy.float())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert y.dtype == dtype
    assert x.grad is not None
    assert x.grad.dtype == dtype
    torch.testing.assert_close(y.float(), y_ref, rtol=tolerance, atol=tolerance * float(y_ref.detach().abs().max()))
    for mine, reference in ((x.grad, x_ref.grad), (pair.a.grad, a_ref.grad), (pair.b.grad, b_ref.grad)):
        assert mine is not None
        assert reference is not None
        assert _cosine(mine, reference) >= 0.9999
        assert float(mine.float().norm() / reference.norm()) == pytest.approx(1.0, abs=5e-3)


def test_forward_is_the_engines_arithmetic_bit_for_bit() -> None:
    operand = _operand("channel")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer, pair, x = _layer(operand, dtype)
        served = w8a16_lora_linear(
            x, operand.values, operand.scales, None, pair.a.to(dtype), (pair.b * SCALING).to(dtype)
        )
        assert torch.equal(layer(x), served)
        layer.base.context.segments = ()
        assert torch.equal(layer(x), w8a16_lora_linear(x, operand.values, operand.scales))


def test_only_x_and_the_adapter_are_saved_and_the_widened_bytes_are_counted() -> None:
    operand = _operand("channel")
    layer, _, x = _layer(operand, torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer(x)
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), R * K, N * R])
    assert layer.base.context.largest_dequantised_bytes == 4 * N * K


def test_slices_of_a_packed_weight() -> None:
    operand = _operand("channel")
    part = slice_rows(operand, 4, 12)
    assert part.values.data_ptr() == operand.values[4:].data_ptr()  # a view, not a copy
    assert part.scales.data_ptr() == operand.scales[4:].data_ptr()
    assert torch.equal(dequantize(part), dequantize(operand)[4:12])
    blocks = _operand("block")
    assert torch.equal(dequantize(slice_rows(blocks, 4, 12)), dequantize(blocks)[4:12])
    with pytest.raises(UnsupportedKernel, match="6:12 cut a block of 4"):
        slice_rows(blocks, 6, 12)


def test_rounded_activations_are_the_engines_and_leave_the_adapter_alone() -> None:
    operand = _operand("channel")
    layer, pair, x = _layer(operand, torch.float32)
    layer.base.context.round_activations = True
    codes, scale = quantize_per_token_ref(x.detach().reshape(-1, K))
    rounded = (codes.float() * scale).reshape(x.shape)
    want = F.linear(rounded, dequantize(operand)) + SCALING * F.linear(F.linear(x, pair.a), pair.b)
    y = layer(x)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    found = x.grad.clone()
    x.grad = None
    layer.base.context.round_activations = False
    layer(x).sum().backward()
    torch.testing.assert_close(found, x.grad)  # gradients pass through the rounding
