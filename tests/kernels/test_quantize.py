"""Per-token quantisation: codes and scales are bit-equal to the reference, edge values included."""

from __future__ import annotations

import pytest
import torch

from epilora.kernels.quantize import quantize, quantize_groups, quantize_ref
from epilora.quant.block_fp8 import NATIVE_SMALLEST_SCALE, OP_SMALLEST_SCALE, quantize_groups_ref


def same(x: torch.Tensor) -> None:
    codes, scale = quantize(x)
    ref_codes, ref_scale = quantize_ref(x)
    assert torch.equal(scale.cpu(), ref_scale.cpu())
    assert torch.equal(codes.view(torch.uint8).cpu(), ref_codes.view(torch.uint8).cpu())


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 576), (2, 4096), (5, 5000)])
def test_quantize_random(M, K, source, device):
    x = torch.randn(M, K, device=device) * torch.logspace(-6, 3, M, device=device)[:, None]
    same(x.to(source))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_quantize_edge_values(source, device):
    info = torch.finfo(source)
    x = torch.zeros(7, 64, dtype=source, device=device)
    x[1, 3] = info.max
    x[2, 5] = info.tiny
    x[3, :4] = torch.tensor([float("inf"), 1.0, -float("inf"), float("nan")], dtype=source)
    x[4, :3] = torch.tensor([float("nan"), 2.0, -1.0], dtype=source)
    x[5] = torch.linspace(-1, 1, 64, device=device).to(source)
    x[6] = -info.max
    same(x)


def test_quantize_zero_row_has_the_smallest_scale(device):
    codes, scale = quantize(torch.zeros(1, 32, dtype=torch.float16, device=device))
    assert scale.item() == pytest.approx(1.0 / (448.0 * 512.0), rel=1e-6)
    assert codes.view(torch.uint8).abs().sum().item() == 0


def test_quantize_strided_rows_and_empty_batch(device):
    x = torch.randn(4, 128, dtype=torch.float16, device=device)
    same(x[:, :64])
    codes, scale = quantize(x[:0])
    assert codes.shape == (0, 128)
    assert scale.shape == (0, 1)


@pytest.mark.parametrize("smallest", [OP_SMALLEST_SCALE, NATIVE_SMALLEST_SCALE], ids=["op", "native"])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("M", "K"), [(1, 64), (3, 576), (2, 4096), (4, 5000)])
def test_quantize_groups(M, K, source, smallest, device):
    x = torch.randn(M, K, device=device) * torch.logspace(-6, 3, M, device=device)[:, None]
    x[:, K // 2 :] *= 1e-3
    x[-1, :40] = 0
    if M > 1:
        x[1, :3] = torch.tensor([float("nan"), float("inf"), 1.0])
    x = x.to(source)
    codes, scale = quantize_groups(x, smallest_scale=smallest)
    ref_codes, ref_scale = quantize_groups_ref(x, smallest_scale=smallest)
    assert scale.shape == (M, -(-K // 128))
    assert torch.equal(scale.cpu(), ref_scale.cpu())
    assert torch.equal(codes.view(torch.uint8).cpu(), ref_codes.view(torch.uint8).cpu())


def test_quantize_groups_smallest_scales_and_refusals(device):
    zeros = torch.zeros(2, 256, dtype=torch.float16, device=device)
    assert quantize_groups(zeros)[1].unique().item() == pytest.approx(1e-10 / 448, rel=1e-6)
    with pytest.raises(ValueError, match=r"scale_out is \(2, 1\); needed: contiguous \(2, 2\)"):
        quantize_groups(zeros, scale_out=torch.zeros(2, 1, device=device))
    assert quantize_groups(zeros[:0])[1].shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_quantize_groups_equals_vllm_op(source, device):
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    x = (torch.randn(65, 4096, device=device) * torch.logspace(-7, 3, 65, device=device)[:, None]).to(source)
    x[3] = 0
    want, want_scale = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    codes, scale = quantize_groups(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def test_quantize_rejects(device):
    x = torch.randn(4, 128, device=device)
    with pytest.raises(TypeError, match=r"float32; allowed: torch\.bfloat16, torch\.float16"):
        quantize(x)
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        quantize(x.half().t())
    with pytest.raises(ValueError, match="scale_out has 3 values; needed: 4"):
        quantize(x.half(), scale_out=torch.zeros(3, device=device))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_quantize_equals_vllm(source):
    """Codes and scales of vLLM's own op, bit for bit: Triton kernel, decode prologue and reference alike."""
    import vllm._custom_ops as ops

    from epilora.kernels.lora_decode import DecodeWorkspace, lora_decode
    from epilora.quant.reference import quantize_weight_ref

    device = torch.device("cuda", 0)
    x = torch.randn(24, 4096, device=device) * torch.logspace(-7, 4, 24, device=device)[:, None]
    x = x.to(source)
    x[1] = 0
    x[2, 7], x[3, 9] = torch.finfo(source).max, torch.finfo(source).tiny
    x[4, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=source, device=device)
    x[5, 0] = float("nan")
    x[6, :4] = torch.tensor([-0.0, 0.0, -0.0, 1.0], dtype=source, device=device)
    theirs, their_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    workspace = DecodeWorkspace(device, max_k=4096, max_h=1)
    lora_decode(
        x, quantize_weight_ref(torch.randn(32, 4096, device=device)), workspace=workspace, implementation="cuda"
    )
    decode = workspace.codes[: 24 * 4096].view(24, 4096), workspace.scale[:24]
    for codes, scale in (quantize(x), quantize_ref(x), decode):
        assert torch.equal(scale.view(-1), their_scale.view(-1))
        assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
