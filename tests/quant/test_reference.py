"""Plain-torch quantisation: hand-worked values, vLLM's edge cases, round trips of every operand kind."""

from __future__ import annotations

import pytest
import torch

from epilora.quant.formats import E4M3_MIN_SCALE, Format, ScaleAxis
from epilora.quant.operand import Operand
from epilora.quant.reference import (
    dequantize,
    encode_e4m3,
    quantize_per_token_ref,
    quantize_rows_ref,
    quantize_weight_ref,
)


def test_quantize_per_token_hand_worked():
    codes, scale = quantize_per_token_ref(torch.tensor([[448.0, -224.0, 1.0], [0.0, 0.0, 0.0]]))
    assert scale.tolist() == [[1.0], [pytest.approx(E4M3_MIN_SCALE)]]
    assert codes.float().tolist() == [[448.0, -224.0, 1.0], [0.0, 0.0, 0.0]]


def test_quantize_per_token_scale_is_a_true_division():
    x = torch.linspace(0.1, 50.0, 4096)[:, None]
    _, scale = quantize_per_token_ref(x)
    exact = (x.double() / 448.0).float()
    assert torch.equal(scale, torch.clamp_min(exact, E4M3_MIN_SCALE))


def test_quantize_per_token_infinity_and_nan():
    inf, nan = float("inf"), float("nan")
    codes, scale = quantize_per_token_ref(torch.tensor([[inf, 1.0, -inf, nan], [nan, 2.0, -1.0, 0.0]]))
    assert scale[0].item() == inf
    assert codes[0].float().tolist() == [448.0, 0.0, 448.0, 448.0]
    assert scale[1].item() == pytest.approx(2.0 / 448.0)
    assert codes[1].float().tolist() == [448.0, 448.0, -224.0, 0.0]


def test_encode_e4m3_saturates_and_rounds_to_even():
    codes = encode_e4m3(torch.tensor([1e9, -1e9, 17.0, 19.0, 2.0**-10, 1.5 * 2.0**-9]), torch.tensor(1.0))
    assert codes.float().tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8]


@pytest.mark.parametrize("axis", [ScaleAxis.CHANNEL, ScaleAxis.TENSOR])
def test_weight_round_trip(axis):
    torch.manual_seed(0)
    weight = torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]
    operand = quantize_weight_ref(weight, axis)
    assert operand.scales.numel() == (6 if axis is ScaleAxis.CHANNEL else 1)
    step = operand.scales.reshape(-1, 1) * 16  # half a step at the top of the range: 32 / 2
    assert ((dequantize(operand) - weight).abs() <= step).all()


def test_quantize_weight_refuses_blocks():
    with pytest.raises(ValueError, match="axis=block; allowed: channel, tensor"):
        quantize_weight_ref(torch.zeros(2, 2), ScaleAxis.BLOCK)


def test_adapter_rows_round_trip():
    torch.manual_seed(0)
    stack = torch.randn(3, 8, 32)
    operand = quantize_rows_ref(stack)
    assert operand.scales.shape == (3, 8)
    relative = (dequantize(operand) - stack).norm() / stack.norm()
    assert relative < 0.04  # e4m3 has 3 mantissa bits


def test_dequantize_blocks():
    values = torch.ones(4, 6).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    operand = Operand(values, Format.FP8_E4M3, ScaleAxis.BLOCK, scales, block=(2, 4))
    assert dequantize(operand)[0].tolist() == [1.0] * 4 + [2.0] * 2
    assert dequantize(operand)[3].tolist() == [3.0] * 4 + [4.0] * 2


def test_dequantize_nvfp4_low_nibble_first():
    values = torch.tensor([[0x21, 0xF7] + [0] * 6], dtype=torch.uint8)  # 0.5 1.0 6.0 -6.0
    scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    operand = Operand(values, Format.NVFP4, ScaleAxis.BLOCK, scales, block=(1, 16), global_scale=torch.tensor([0.5]))
    assert operand.shape == (1, 16)
    assert dequantize(operand)[0, :5].tolist() == [0.5, 1.0, 6.0, -6.0, 0.0]


def test_dequantize_16_bit_is_the_values():
    values = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert dequantize(Operand(values, Format.BF16)).tolist() == [[1.5, -2.0]]
