"""Decode shrink: partial sums add up to x A^T of each row's adapter; other rows are left alone."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import problem, rms_ratio

from epilora.kernels.lora_shrink import ShrinkConfig, lora_shrink, lora_shrink_ref, valid_slots_ref
from epilora.kernels.quantize import quantize_ref
from epilora.quant.block_fp8 import quantize_groups_ref

SENTINEL = 12345.0


@pytest.mark.parametrize("kind", ["one", "none", "distinct", "mixed", "stale"])
@pytest.mark.parametrize(("M", "K", "R", "L"), [(1, 64, 8, 1), (3, 200, 16, 4), (17, 256, 40, 64)])
def test_lora_shrink(M, K, R, L, kind, device, dtype):
    p = problem(M, K, (16, 32), R, L, kind=kind, dtype=dtype, device=device)
    config = ShrinkConfig(splits=3, groups=2, block_m=16, block_k=32)
    h = torch.full((3, 2, M, R), SENTINEL, device=device)
    lora_shrink(p.x, p.lora_a, p.slots, out=h, config=config)
    has = valid_slots_ref(p.slots, L) >= 0
    assert (h[:, :, ~has] == SENTINEL).all()
    if has.any():
        ref = lora_shrink_ref(p.x, p.lora_a, p.slots)
        assert rms_ratio(h.sum(0)[:, has], ref[:, has]) < 1e-5


def test_lora_shrink_quantises_in_the_same_launch(device, dtype):
    p = problem(5, 160, (16,), 16, 3, kind="mixed", dtype=dtype, device=device)
    codes = torch.zeros(5, 160, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(5, 1, device=device)
    h = lora_shrink(p.x, p.lora_a, p.slots, quantize_to=(codes, scale))
    ref_codes, ref_scale = quantize_ref(p.x)
    assert torch.equal(codes.view(torch.uint8).cpu(), ref_codes.view(torch.uint8).cpu())
    assert torch.equal(scale.cpu(), ref_scale.cpu())
    has = valid_slots_ref(p.slots, 3) >= 0
    assert rms_ratio(h.sum(0)[:, has], lora_shrink_ref(p.x, p.lora_a, p.slots)[:, has]) < 1e-5


def test_lora_shrink_fp8_adapters(device, dtype):
    p = problem(4, 96, (16, 16), 16, 3, kind="distinct", dtype=dtype, device=device, fp8=True)
    h = lora_shrink(p.x, p.lora_a, p.slots)
    assert rms_ratio(h.sum(0), lora_shrink_ref(p.x, p.lora_a, p.slots)) < 1e-5


def test_lora_shrink_quantises_by_groups(device, dtype):
    p = problem(5, 320, (16,), 16, 3, kind="mixed", dtype=dtype, device=device)
    codes = torch.zeros(5, 320, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(5, 3, device=device)
    p.x[:, 128:] *= 0.1
    lora_shrink(p.x, p.lora_a, p.slots, quantize_to=(codes, scale), quantize_by_groups=True)
    ref_codes, ref_scale = quantize_groups_ref(p.x)
    assert torch.equal(codes.view(torch.uint8).cpu(), ref_codes.view(torch.uint8).cpu())
    assert torch.equal(scale.cpu(), ref_scale.cpu())
    with pytest.raises(ValueError, match=r"quantize_to\[1\] is \(5, 3\); needed: contiguous, 5 values"):
        lora_shrink(p.x, p.lora_a, p.slots, quantize_to=(codes, scale))


@pytest.mark.parametrize(("M", "K", "R", "L"), [(1, 64, 16, 1), (17, 208, 48, 5)])
def test_lora_shrink_nvfp4_adapters(M, K, R, L, device, dtype):
    p = problem(M, K, (16, 16), R, L, kind="distinct", dtype=dtype, device=device, nvfp4=True)
    h = lora_shrink(p.x, p.lora_a, p.slots, config=ShrinkConfig(splits=3, groups=2, block_m=16, block_k=64))
    ref = lora_shrink_ref(p.x, p.lora_a, p.slots)
    for row in range(M):  # slots differ in size: each row against its own
        assert rms_ratio(h.sum(0)[:, row], ref[:, row]) < 1e-5


def test_lora_shrink_nobody_active(device, dtype):
    """Old positive slots stay in the mapping when no adapter is active: the active list decides."""
    p = problem(3, 64, (16,), 8, 4, kind="one", dtype=dtype, device=device)
    h = torch.full((2, 1, 3, 8), SENTINEL, device=device)
    active = torch.full((5,), -1, dtype=torch.int32, device=device)
    lora_shrink(p.x, p.lora_a, p.slots, active_lora_ids=active, out=h, config=ShrinkConfig(splits=2))
    assert (h == SENTINEL).all()
    active[1] = 3
    lora_shrink(p.x, p.lora_a, p.slots, active_lora_ids=active, out=h, config=ShrinkConfig(splits=2))
    assert rms_ratio(h.sum(0), lora_shrink_ref(p.x, p.lora_a, p.slots)) < 1e-5


def test_lora_shrink_row_does_not_depend_on_its_neighbours(device, dtype):
    p = problem(8, 128, (16,), 16, 8, kind="distinct", dtype=dtype, device=device)
    config = ShrinkConfig(splits=2, groups=1)
    alone = lora_shrink(p.x, p.lora_a, p.slots, config=config)
    others = p.slots.clone()
    others[1:] = torch.tensor([0, 0, -1, 5, 5, 2, 2], dtype=torch.int32)
    mixed = lora_shrink(p.x, p.lora_a, others, config=config)
    assert torch.equal(alone[:, :, 0], mixed[:, :, 0])


def test_lora_shrink_rejects(device, dtype):
    p = problem(4, 96, (16, 16), 16, 3, kind="one", dtype=dtype, device=device)
    with pytest.raises(ValueError, match="token_lora_indices has 2 entries for 4 tokens"):
        lora_shrink(p.x, p.lora_a, p.slots[:2])
    with pytest.raises(TypeError, match=r"token_lora_indices has dtype torch.int64; allowed: torch.int32"):
        lora_shrink(p.x, p.lora_a, p.slots.long())
    with pytest.raises(ValueError, match=r"lora_a\[0\] has shape .* its last axis must be 64"):
        lora_shrink(p.x[:, :64], p.lora_a, p.slots)
    assert lora_shrink(p.x[:0], p.lora_a, p.slots).shape[2] == 0
