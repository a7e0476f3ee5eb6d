"""NVFP4 codes and scales: hand-worked values, bit equality with vLLM's reference and compressed-tensors' packing, layouts."""

from __future__ import annotations

import pytest
import torch

from epilora.quant.formats import Format
from epilora.quant.nvfp4 import (
    decode_e2m1,
    encode_e2m1,
    from_compressed_tensors,
    from_modelopt,
    inverse_global_scale_for,
    pack_e2m1,
    quantize_nvfp4_ref,
    unpack_e2m1,
)
from epilora.quant.reference import dequantize


def test_encode_e2m1_rounds_ties_to_even_codes_and_saturates():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 1e9, -0.25, -0.3, -7.0])
    assert decode_e2m1(encode_e2m1(x)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.0, -0.5, -6.0]
    with pytest.raises(ValueError, match="NaN"):
        encode_e2m1(torch.tensor([float("nan")]))


def test_pack_puts_the_even_column_low():
    packed = pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert unpack_e2m1(packed).tolist() == [[1, 2, 15, 0]]
    with pytest.raises(ValueError, match="K=3"):
        pack_e2m1(torch.zeros(1, 3, dtype=torch.uint8))


def test_quantize_hand_worked():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 2688.0, -448.0  # 448 * 6: the global scale is one, the block scale 448
    operand = quantize_nvfp4_ref(x)
    assert operand.global_scale.tolist() == [1.0]
    assert operand.scales.float().tolist() == [[448.0, 0.0]]
    assert dequantize(operand)[0, :3].tolist() == [2688.0, -448.0, 0.0]
    assert not quantize_nvfp4_ref(torch.zeros(2, 16)).values.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_vllm_and_compressed_tensors_bit_for_bit(dtype):
    emulation = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    torch.manual_seed(0)
    x = (torch.randn(48, 256) * torch.logspace(-4, 3, 48)[:, None]).to(dtype)
    x[3], x[5, :16] = 0, 0
    inverse = inverse_global_scale_for(x.abs().amax())
    values, scales = emulation.ref_nvfp4_quant(x.clone(), inverse, 16)
    operand = quantize_nvfp4_ref(x, inverse)
    assert torch.equal(operand.scales.float(), scales)
    ours = decode_e2m1(unpack_e2m1(operand.values))
    assert torch.equal(ours, values.view(48, 256))
    assert torch.equal(pack_fp4_to_uint8(ours), operand.values)


def test_checkpoint_layouts_give_the_same_operand():
    torch.manual_seed(1)
    operand = quantize_nvfp4_ref(torch.randn(8, 64))
    theirs = from_compressed_tensors(operand.values, operand.scales, 1.0 / operand.global_scale)
    modelopt = from_modelopt(operand.values, operand.scales, operand.global_scale.reshape(()))
    assert theirs.format is Format.NVFP4
    for other in (theirs, modelopt):
        torch.testing.assert_close(dequantize(other), dequantize(operand), rtol=2e-7, atol=0)


def test_checkpoint_layouts_that_do_not_fit_are_refused():
    operand = quantize_nvfp4_ref(torch.randn(8, 64))
    with pytest.raises(ValueError, match=r"block scales are torch.float8_e4m3fn \(4, 8\)"):
        from_modelopt(operand.values, operand.scales.view(4, 8), operand.global_scale)
    with pytest.raises(ValueError, match="global scale"):
        from_compressed_tensors(operand.values, operand.scales, torch.zeros(1))
    with pytest.raises(TypeError, match=r"codes are torch\.int8"):
        from_modelopt(operand.values.view(torch.int8), operand.scales, operand.global_scale)


def test_quantize_refuses_what_it_cannot_store():
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_nvfp4_ref(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_nvfp4_ref(torch.full((1, 16), float("inf")))
