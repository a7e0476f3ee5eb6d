"""Block-scaled FP8: vLLM's group quantisation bit for bit, ragged sides, the product by blocks, layouts refused."""

from __future__ import annotations

import pytest
import torch

from epilora.quant.block_fp8 import (
    NATIVE_SMALLEST_SCALE,
    block_gemm_ref,
    from_checkpoint,
    quantize_blocks_ref,
    quantize_groups_ref,
)
from epilora.quant.formats import E4M3_MIN_SCALE
from epilora.quant.reference import dequantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_equal_vllm_bit_for_bit(dtype):
    module = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    torch.manual_seed(0)
    x = (torch.randn(16, 512) * torch.logspace(-6, 4, 16)[:, None]).to(dtype)
    x[2] = 0
    with set_current_vllm_config(VllmConfig()):
        quantise = module.QuantFP8(static=False, group_shape=GroupShape(1, 128))
    codes, scales = quantise.forward_native(x)
    ours, our_scales = quantize_groups_ref(x, smallest_scale=NATIVE_SMALLEST_SCALE)
    assert torch.equal(our_scales, scales)
    assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))


def test_weight_blocks_round_trip_and_ragged_sides():
    torch.manual_seed(1)
    weight = torch.randn(200, 300)
    weight[:128, :128] *= 100
    operand = quantize_blocks_ref(weight)
    assert operand.scales.shape == (2, 3)
    assert operand.scales[0, 0] == weight[:128, :128].abs().max() / 448
    real = dequantize(operand)
    assert ((real - weight).norm() / weight.norm()).item() < 0.03
    assert quantize_blocks_ref(torch.zeros(3, 5)).scales.item() == pytest.approx(E4M3_MIN_SCALE)


def test_product_by_blocks_is_the_product_of_real_values():
    torch.manual_seed(2)
    x, weight = torch.randn(5, 300), torch.randn(150, 300)
    codes, scales = quantize_groups_ref(x)
    operand = quantize_blocks_ref(weight)
    real_x = codes.float() * scales.repeat_interleave(128, 1)[:, :300]
    torch.testing.assert_close(
        block_gemm_ref(codes, scales, operand), real_x @ dequantize(operand).T, rtol=1e-4, atol=1e-3
    )


def test_checkpoint_layer():
    operand = quantize_blocks_ref(torch.randn(256, 384))
    again = from_checkpoint(operand.values, operand.scales)
    assert torch.equal(dequantize(again), dequantize(operand))
    with pytest.raises(ValueError, match=r"weight_scale_inv is \(3, 2\).*needed: \(2, 3\)"):
        from_checkpoint(operand.values, operand.scales.T)
    with pytest.raises(TypeError, match="weight is torch"):
        from_checkpoint(operand.values.float(), operand.scales)
