"""Adapters in FP8 and NVFP4: the product's error, what the error-aware conversion gains, sizes, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from epilora.adapters.convert import STORED_FORMATS, bytes_per_adapter, convert, convert_module
from epilora.adapters.fold import FoldedModule
from epilora.quant.formats import Format


def adapter(rank: int, N: int, K: int, *, decay: float = 0.0) -> FoldedModule:
    """decay: decades over which the directions' sizes fall."""
    a_RK = (torch.rand(rank, K) * 2 - 1) * math.sqrt(3 / K)
    b_NR = torch.randn(N, rank) * 0.01 * torch.logspace(0, -decay, rank)
    return FoldedModule(a_RK, b_NR, 2.0)


def product_error(module: FoldedModule, stored: FoldedModule) -> float:
    exact = module.b_NR.double() @ module.a_RK.double()
    return float((stored.b_NR.double() @ stored.a_RK.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("fmt", STORED_FORMATS)
@pytest.mark.parametrize("method", ["aware", "plain"])
@pytest.mark.parametrize(("rank", "N", "K"), [(8, 96, 128), (24, 64, 256), (64, 48, 160)])
def test_reported_error_is_the_products(fmt, method, rank, N, K):
    torch.manual_seed(0)
    module = adapter(rank, N, K)
    stored = convert_module(module, fmt, method=method)
    assert stored.relative_error == pytest.approx(product_error(module, stored.widened()), rel=1e-3)
    assert stored.relative_error < (0.04 if fmt is Format.FP8_E4M3 else 0.16)


@pytest.mark.parametrize(("fmt", "decay", "at_most"), [
    (Format.NVFP4, 0.0, 0.85), (Format.NVFP4, 2.0, 0.6), (Format.FP8_E4M3, 0.0, 0.95), (Format.FP8_E4M3, 2.0, 0.7),
])  # fmt: skip
def test_error_aware_conversion_beats_rounding(fmt, decay, at_most):
    torch.manual_seed(1)
    module = adapter(16, 256, 256, decay=decay)
    aware, plain = (convert_module(module, fmt, method=m).relative_error for m in ("aware", "plain"))
    assert aware < at_most * plain


def test_an_adapter_that_does_nothing_stays_one():
    stored = convert_module(FoldedModule(torch.randn(16, 32), torch.zeros(32, 16), 1.0), Format.NVFP4)
    assert stored.relative_error == 0.0
    assert not stored.widened().b_NR.any()


def test_rank_that_fills_no_block_is_padded_with_nothing():
    torch.manual_seed(2)
    module = adapter(8, 64, 64)
    stored = convert_module(module, Format.NVFP4)
    assert stored.a.values.shape == (16, 32)
    assert stored.b.values.shape == (64, 8)
    assert stored.scaling == 2.0


def test_sizes_against_16_bit():
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    sixteen = bytes_per_adapter(shapes, 64, Format.BF16)
    assert sixteen == 2 * 64 * sum(N + K for N, K in shapes.values())
    assert sixteen / bytes_per_adapter(shapes, 64, Format.FP8_E4M3) > 1.9
    assert sixteen / bytes_per_adapter(shapes, 64, Format.NVFP4) > 3.4
    torch.manual_seed(3)
    for fmt in STORED_FORMATS:
        assert convert_module(adapter(16, 64, 128), fmt).num_bytes == bytes_per_adapter({"m": (64, 128)}, 16, fmt)


def test_refusals_name_the_module_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"module 'q_proj': convert: K=24; nvfp4 needs a multiple of 16; use fp8_e4m3"):
        convert({"q_proj": adapter(8, 16, 24)}, Format.NVFP4)
    with pytest.raises(ValueError, match="format=bf16; allowed: fp8_e4m3, nvfp4"):
        convert_module(adapter(8, 16, 16), Format.BF16)
    with pytest.raises(ValueError, match="method='best'; allowed: aware, plain"):
        convert_module(adapter(8, 16, 16), Format.NVFP4, method="best")
