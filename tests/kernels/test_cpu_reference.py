"""Widening e4m3 codes by moving bits, against torch's own conversion."""

import pytest
import torch

from epilora.kernels.cpu_reference import w8a16_linear, widen_e4m3

ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = ALL[torch.isfinite(ALL.float())]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def test_every_finite_code_keeps_its_bits() -> None:
    assert FINITE.numel() == 254
    assert torch.equal(bits(widen_e4m3(FINITE)), bits(FINITE.float()))  # -0.0 and the subnormals too
    subnormal = FINITE.float().abs()
    assert int(((subnormal > 0) & (subnormal < 2**-6)).sum()) == 14


def test_nan_codes_are_nan_and_change_nothing_beside_them() -> None:
    assert torch.equal(torch.isnan(widen_e4m3(ALL)), torch.isnan(ALL.float()))
    assert torch.isnan(widen_e4m3(ALL)).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(bits(widen_e4m3(ALL)[torch.isfinite(ALL.float())]), bits(FINITE.float()))
    for code in (0x7F, 0xFF):
        assert torch.isnan(widen_e4m3(ALL[code : code + 1])).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda c: c.view(16, 16),
        lambda c: c.view(16, 16).t(),  # an engine's weight
        lambda c: c.view(16, 16)[3:9],  # a part of a packed projection
        lambda c: c.view(16, 16)[:, 1::3],
        lambda c: c[:0].view(0, 16),
        lambda c: c[5],
    ],
    ids=["whole", "transposed", "rows", "columns", "empty", "scalar"],
)
def test_views_of_any_strides(view) -> None:
    codes = view(torch.where(torch.isfinite(ALL.float()), ALL.float(), torch.ones(())).to(torch.float8_e4m3fn))
    wide = widen_e4m3(codes)
    assert wide.shape == codes.shape
    assert torch.equal(wide, codes.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_what_it_was_with_torchs_conversion(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = FINITE[torch.randint(254, (48, 64), generator=generator)]
    x, scale = torch.randn(5, 64, generator=generator).to(dtype), torch.rand(48, generator=generator)
    want = (torch.nn.functional.linear(x.float(), codes.float()) * scale).to(dtype)
    assert torch.equal(w8a16_linear(x, codes, scale), want)
