"""K2: scales, bias, up-projections of several adapters in one tile, slices, scattered rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import problem, rms_ratio

from epilora.errors import UnsupportedKernel
from epilora.kernels.fused_lora_gemm import GemmConfig, fused_lora_gemm, fused_lora_gemm_ref
from epilora.kernels.lora_expand import ShrinkConfig, group_tokens, lora_shrink_grouped
from epilora.kernels.lora_shrink import lora_shrink_ref
from epilora.kernels.quantize import quantize_ref
from epilora.quant.block_fp8 import quantize_groups_ref
from epilora.quant.formats import ScaleAxis
from epilora.quant.reference import dequantize

NARROW = GemmConfig(block_m=16, block_n=16, block_k=64, swap_ab=True, num_stages=2)
WIDE = GemmConfig(block_m=32, block_n=32, block_k=64, swap_ab=False, num_stages=2)


def inputs(p):
    codes, scale = quantize_ref(p.x)
    h = lora_shrink_ref(p.x, p.lora_a, p.slots)
    h = torch.stack((h * 0.25, h * 0.75))
    h[:, :, (p.slots < 0) | (p.slots >= p.lora_a[0].values.shape[0])] = float("nan")  # rows nobody may read
    return codes, scale, h


def limit(dtype, out_dtype):
    """RMS error from rounding h once (and y once)."""
    eps = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
    return eps[dtype] + eps.get(out_dtype, 0.0)


@pytest.mark.parametrize("config", [NARROW, WIDE], ids=["swap_ab", "plain"])
@pytest.mark.parametrize("kind", ["one", "none", "distinct", "mixed", "stale"])
@pytest.mark.parametrize(
    ("M", "K", "widths", "R", "L"),
    [(1, 64, (32,), 8, 1), (17, 144, (64, 32, 32), 16, 4), (7, 128, (32, 32, 32, 40), 40, 64)],
    ids=str,
)
def test_fused_lora_gemm(M, K, widths, R, L, kind, config, device, dtype, poisoned_empty):
    axis = ScaleAxis.TENSOR if M == 7 else ScaleAxis.CHANNEL
    p = problem(M, K, widths, R, L, kind=kind, dtype=dtype, device=device, axis=axis, bias=M == 17)
    codes, scale, h = inputs(p)
    y = fused_lora_gemm(
        codes, scale, p.weight, h, p.lora_b, p.slots, bias=p.bias, out_dtype=torch.float32, config=config
    )
    ref = fused_lora_gemm_ref(codes, scale, p.weight, h, p.lora_b, p.slots, bias=p.bias)
    assert rms_ratio(y, ref) < limit(dtype, torch.float32)


def test_fused_lora_gemm_sorted_rows_land_in_token_order(device, dtype):
    p = problem(40, 128, (64, 32), 16, 4, kind="mixed", dtype=dtype, device=device)
    codes, scale, h = inputs(p)
    order = torch.argsort(p.slots.long(), stable=True).to(torch.int32)
    y = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, sorted_tokens=order, out_dtype=dtype, config=WIDE)
    ref = fused_lora_gemm_ref(codes, scale, p.weight, h, p.lora_b, p.slots)
    assert rms_ratio(y, ref) < limit(dtype, dtype)
    active = torch.full((5,), -1, dtype=torch.int32, device=device)
    stale = torch.zeros_like(order)  # an older batch's list
    y = fused_lora_gemm(
        codes, scale, p.weight, h, p.lora_b, p.slots, sorted_tokens=stale, active_lora_ids=active, out_dtype=dtype, config=WIDE
    )  # fmt: skip
    assert rms_ratio(y, fused_lora_gemm_ref(codes, scale, p.weight)) < limit(dtype, dtype)


def test_fused_lora_gemm_reads_the_grouped_shrinks_h(device, dtype):
    """K1 and K2 of the fused path: h as the grouped shrink leaves it, in 16 bits or in parts."""
    p = problem(40, 128, (64, 32), 16, 4, kind="mixed", dtype=dtype, device=device)
    codes, scale = quantize_ref(p.x)
    groups = group_tokens(p.slots, 4)
    for split_k in (1, 2):
        h = lora_shrink_grouped(p.x, p.lora_a, groups, config=ShrinkConfig(16, 16, 64, split_k, 4, 2))
        y = fused_lora_gemm(
            codes, scale, p.weight, h.permute(0, 2, 1, 3), p.lora_b, p.slots, sorted_tokens=groups.sorted_tokens,
            active_lora_ids=groups.active_slots, out_dtype=dtype, config=WIDE,
        )  # fmt: skip
        ref = fused_lora_gemm_ref(
            codes, scale, p.weight, lora_shrink_ref(p.x, p.lora_a, p.slots)[None], p.lora_b, p.slots
        )
        assert rms_ratio(y, ref) < 2 * limit(dtype, dtype)


def test_fused_lora_gemm_fp8_adapters(device, dtype):
    p = problem(9, 128, (64, 32, 16), 16, 3, kind="distinct", dtype=dtype, device=device, fp8=True)
    codes, scale, h = inputs(p)
    y = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, out_dtype=dtype, config=NARROW)
    ref = fused_lora_gemm_ref(codes, scale, p.weight, h, p.lora_b, p.slots)
    assert rms_ratio(y, ref) < 2 * limit(dtype, dtype)


@pytest.mark.parametrize("config", [NARROW, WIDE], ids=["swap_ab", "plain"])
@pytest.mark.parametrize(("kind", "R"), [("distinct", 16), ("mixed", 48)])
def test_fused_lora_gemm_nvfp4_adapters(kind, R, config, device, dtype):
    p = problem(9, 128, (64, 32, 40), R, 3, kind=kind, dtype=dtype, device=device, nvfp4=True)
    codes, scale, h = inputs(p)
    y = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, out_dtype=dtype, config=config)
    ref = fused_lora_gemm_ref(codes, scale, p.weight, h, p.lora_b, p.slots)
    base = fused_lora_gemm_ref(codes, scale, p.weight)
    assert rms_ratio(ref, base) > 0.01, "the adapters must show"
    assert rms_ratio(y, ref) < limit(dtype, dtype)


@pytest.mark.parametrize("config", [NARROW, WIDE], ids=["swap_ab", "plain"])
@pytest.mark.parametrize(
    ("M", "K", "widths", "stored"), [(1, 128, (160,), ""), (18, 400, (128, 48), "nvfp4"), (5, 256, (32, 64, 96), "fp8")]
)
def test_fused_lora_gemm_block_scaled_base(M, K, widths, stored, config, device, dtype):
    p = problem(
        M, K, widths, 16, 3, kind="mixed", dtype=dtype, device=device, axis=ScaleAxis.BLOCK, bias=M == 5,
        **({stored: True} if stored else {}),
    )  # fmt: skip
    codes, scale = quantize_groups_ref(p.x)
    h = lora_shrink_ref(p.x, p.lora_a, p.slots)[None]
    y = fused_lora_gemm(
        codes, scale, p.weight, h, p.lora_b, p.slots, bias=p.bias, out_dtype=torch.float32, config=config
    )
    ref = fused_lora_gemm_ref(codes, scale, p.weight, h, p.lora_b, p.slots, bias=p.bias)
    assert rms_ratio(y, ref) < limit(dtype, torch.float32)
    real = p.x.float() @ dequantize(p.weight).T
    assert rms_ratio(fused_lora_gemm_ref(codes, scale, p.weight), real) < 0.04, "the reference itself"


def test_fused_lora_gemm_block_scaled_refusals(device, dtype):
    p = problem(4, 256, (32, 16), 16, 3, kind="one", dtype=dtype, device=device, axis=ScaleAxis.BLOCK)
    codes, scale = quantize_groups_ref(p.x)
    with pytest.raises(ValueError, match=r"x_scale is \(4, 1\) for a block-scaled weight; needed: contiguous \(4, 2\)"):
        fused_lora_gemm(codes, scale[:, :1], p.weight)
    with pytest.raises(ValueError, match=r"not legal for slices .* axis=block"):
        fused_lora_gemm(codes, scale, p.weight, config=dataclasses.replace(NARROW, block_k=256))
    small = dataclasses.replace(p.weight, block=(64, 128), scales=torch.ones(1, 2, device=device))
    with pytest.raises(UnsupportedKernel, match=r"blocks of \(64, 128\)"):
        fused_lora_gemm(codes, scale, small)


def test_fused_lora_gemm_infinite_adapter_stays_in_its_rows(device, dtype):
    p = problem(4, 64, (32,), 16, 4, kind="distinct", dtype=dtype, device=device)
    codes, scale, h = inputs(p)
    clean = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, out_dtype=dtype, config=NARROW)
    p.lora_b[0].values[2] = float("inf")
    dirty = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, out_dtype=dtype, config=NARROW)
    assert torch.equal(clean[[0, 1, 3]], dirty[[0, 1, 3]])
    assert not torch.isfinite(dirty[2]).all()


def test_fused_lora_gemm_without_adapters_equals_rows_without_one(device, dtype):
    p = problem(5, 128, (64,), 16, 4, kind="mixed", dtype=dtype, device=device)
    codes, scale, h = inputs(p)
    base = fused_lora_gemm(codes, scale, p.weight, out_dtype=dtype, config=NARROW)
    mixed = fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, out_dtype=dtype, config=NARROW)
    none = p.slots < 0
    assert none.any()
    assert torch.equal(base[none], mixed[none])


def test_fused_lora_gemm_rejects(device, dtype):
    p = problem(4, 64, (32, 16), 16, 3, kind="one", dtype=dtype, device=device)
    codes, scale, h = inputs(p)
    with pytest.raises(ValueError, match=r"lora_b slices are \[32\] wide, together 32; the weight has N=48"):
        fused_lora_gemm(codes, scale, p.weight, h[:, :1].contiguous(), p.lora_b[:1], p.slots)
    with pytest.raises(ValueError, match="is not legal for slices"):
        fused_lora_gemm(codes, scale, p.weight, h, p.lora_b, p.slots, config=GemmConfig(block_n=64))
    with pytest.raises(ValueError, match=r"weight is \(48, 64\); x has K=32"):
        fused_lora_gemm(codes[:, :32].contiguous(), scale, p.weight)
    assert fused_lora_gemm(codes[:0], scale[:0], p.weight).shape == (0, 48)
    stored = problem(4, 64, (32, 16), 16, 3, kind="one", dtype=dtype, device=device, nvfp4=True)
    strided = [stored.lora_b[0], dataclasses.replace(stored.lora_b[1], global_scale=torch.ones(6, device=device)[::2])]
    with pytest.raises(ValueError, match=r"lora_b\[1\] has global scales with strides \(2,\)"):
        fused_lora_gemm(codes, scale, p.weight, h, strided, p.slots)
