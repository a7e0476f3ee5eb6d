"""NVFP4 activations: codes and scales bit-equal to the reference (itself held to vLLM's), packing, layouts refused; the W4A4 GEMM."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import problem, rms_ratio

from epilora.errors import UnsupportedKernel
from epilora.kernels.fused_lora_gemm import GemmConfig, fused_lora_gemm, fused_lora_gemm_ref
from epilora.kernels.lora_decode import DecodeWorkspace, lora_decode
from epilora.kernels.lora_shrink import lora_shrink_ref
from epilora.kernels.quantize_nvfp4 import quantize_nvfp4
from epilora.quant.formats import Format
from epilora.quant.nvfp4 import inverse_global_scale_for, quantize_nvfp4_ref
from epilora.quant.reference import dequantize

NARROW = GemmConfig(block_m=16, block_n=16, block_k=64, swap_ab=True, num_stages=2)
WIDE = GemmConfig(block_m=32, block_n=32, block_k=128, swap_ab=False, num_stages=2)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (5, 208), (3, 4096)])
def test_equals_the_reference_bit_for_bit(M, K, source, device):
    x = torch.randn(M, K, device=device) * torch.logspace(-4, 3, M, device=device)[:, None]
    x[-1, :16] = 0
    x[0, 1::3] *= 0.01
    x = x.to(source)
    for factor in (1.0, 0.37, 8.0):  # 8: the block scale saturates
        inverse = inverse_global_scale_for(x.abs().amax()) * factor
        out = quantize_nvfp4(x, inverse)
        ref = quantize_nvfp4_ref(x, inverse)
        assert torch.equal(out.scales.view(torch.uint8).cpu(), ref.scales.view(torch.uint8).cpu())
        assert torch.equal(out.values.cpu(), ref.values.cpu())
        assert torch.equal(out.global_scale.cpu(), ref.global_scale.cpu())


def test_every_tie_goes_to_the_even_code(device):
    x = torch.zeros(1, 16, device=device)
    x[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25])
    out = quantize_nvfp4(x.half(), torch.ones(1, device=device))
    assert dequantize(out)[0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]


def test_refusals(device):
    x = torch.randn(2, 64, device=device).half()
    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="K=40; needed: a multiple of 16"):
        quantize_nvfp4(x[:, :40], one)
    with pytest.raises(ValueError, match="inverse_global_scale has 2 values"):
        quantize_nvfp4(x, torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"codes_out is \(2, 64\); needed: contiguous \(2, 32\)"):
        quantize_nvfp4(x, one, codes_out=torch.zeros(2, 64, dtype=torch.uint8, device=device))
    assert quantize_nvfp4(x[:0], one).values.shape == (0, 32)


@pytest.mark.parametrize("config", [NARROW, WIDE], ids=["swap_ab", "plain"])
@pytest.mark.parametrize(
    ("M", "K", "widths", "stored"), [(1, 64, (48,), ""), (18, 400, (64, 40), "nvfp4"), (5, 256, (32, 64), "fp8")]
)
def test_w4a4_gemm(M, K, widths, stored, config, device, dtype):
    kind = {stored: True} if stored else {}
    p = problem(M, K, widths, 16, 3, kind="mixed", dtype=dtype, device=device, axis=Format.NVFP4, bias=M == 5, **kind)
    x = quantize_nvfp4(p.x, inverse_global_scale_for(p.x.abs().amax()))
    h = lora_shrink_ref(p.x, p.lora_a, p.slots)[None]
    y = fused_lora_gemm(
        x.values, x.scales, p.weight, h, p.lora_b, p.slots, x_global_scale=x.global_scale, bias=p.bias,
        out_dtype=torch.float32, config=config,
    )  # fmt: skip
    ref = fused_lora_gemm_ref(
        x.values, x.scales, p.weight, h, p.lora_b, p.slots, x_global_scale=x.global_scale, bias=p.bias
    )
    assert rms_ratio(y, ref) < 2 * torch.finfo(dtype).eps
    assert rms_ratio(dequantize(x) @ dequantize(p.weight).T, p.x.float() @ dequantize(p.weight).T) < 0.15


def test_w4a4_refusals(device, dtype):
    p = problem(4, 128, (32,), 16, 3, kind="one", dtype=dtype, device=device, axis=Format.NVFP4)
    x = quantize_nvfp4(p.x, torch.ones(1, device=device))
    with pytest.raises(TypeError, match=r"xq has dtype .*float8_e4m3fn; allowed: torch.uint8"):
        fused_lora_gemm(p.x.to(torch.float8_e4m3fn), x.scales, p.weight)
    with pytest.raises(ValueError, match="x_global_scale is None"):
        fused_lora_gemm(x.values, x.scales, p.weight)
    with pytest.raises(ValueError, match=r"x_scale is \(8, 4\) for a block-scaled weight; needed: contiguous \(4, 8\)"):
        fused_lora_gemm(x.values, x.scales.view(8, 4), p.weight, x_global_scale=x.global_scale)
    with pytest.raises(UnsupportedKernel, match="weight is nvfp4; use w8a16_gemm"):
        lora_decode(p.x, p.weight, workspace=DecodeWorkspace(device, max_k=128, max_h=1))
