"""The W8A16 GEMM against fp32: both orientations, split-K, scales, bias, adapters in the epilogue; arguments refused by
name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import SIXTEEN, problem

from epilora.errors import UnsupportedKernel
from epilora.kernels import w8a16
from epilora.kernels.lora_expand import ShrinkConfig, group_tokens, lora_shrink_grouped
from epilora.kernels.w8a16 import LoraTerm, W8A16Config, is_legal_w8a16, w8a16_config_for, w8a16_gemm, w8a16_gemm_ref
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand

pytestmark = pytest.mark.usefixtures("poisoned_empty")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SWAP = W8A16Config(16, 32, 64, True, 1, 1, 4, 2)
SPLIT = W8A16Config(16, 32, 64, True, 2, 1, 4, 2)
TMA = W8A16Config(32, 32, 64, True, 1, 1, 4, 2, True)
PLAIN = W8A16Config(32, 32, 64, False, 1, 2, 4, 2)
WIDE = W8A16Config(128, 64, 64, True, 1, 8, 4, 2)


@pytest.mark.parametrize(
    ("config", "M", "K", "widths", "axis", "bias"),
    [
        (SWAP, 1, 160, (40,), ScaleAxis.CHANNEL, False),
        (SWAP, 17, 64, (64,), ScaleAxis.TENSOR, True),
        (SPLIT, 5, 288, (48, 20), ScaleAxis.CHANNEL, True),
        (SPLIT, 16, 128, (64,), ScaleAxis.TENSOR, False),
        (TMA, 33, 128, (64,), ScaleAxis.CHANNEL, False),
        (PLAIN, 33, 100, (40, 24), ScaleAxis.CHANNEL, True),
        (WIDE, 130, 96, (70,), ScaleAxis.CHANNEL, False),
        (SWAP, 3, 208, (160,), ScaleAxis.BLOCK, True),
        (SPLIT, 5, 288, (48, 112), ScaleAxis.BLOCK, False),
        (TMA, 33, 256, (192,), ScaleAxis.BLOCK, False),
        (PLAIN, 33, 144, (130,), ScaleAxis.BLOCK, True),
        (SWAP, 3, 208, (40,), Format.NVFP4, True),
        (SPLIT, 5, 288, (48, 20), Format.NVFP4, False),
        (PLAIN, 33, 144, (40, 24), Format.NVFP4, True),
        (WIDE, 130, 128, (70,), Format.NVFP4, False),
    ],
    ids=str,
)
def test_gemm_matches_fp32(config, M, K, widths, axis, bias, device, dtype):
    p = problem(M, K, widths, 8, 2, kind="none", dtype=dtype, device=device, axis=axis, bias=bias)
    y = w8a16_gemm(p.x, p.weight, bias=p.bias, config=config)
    want = w8a16_gemm_ref(p.x, p.weight, bias=p.bias)
    assert y.dtype == dtype
    error = (y.float() - want).abs()
    assert error.max() <= EPS[dtype] * want.abs().max(), f"worst at {divmod(int(error.argmax()), y.shape[1])}"


@pytest.mark.parametrize("axis", [ScaleAxis.BLOCK, Format.NVFP4])
@pytest.mark.parametrize("stored", ["", "nvfp4"])
def test_adapters_over_block_scaled_and_nvfp4_bases(axis, stored, device, dtype):
    M, K, widths, R, L = 13, 256, (40, 120), 16, 4
    p = problem(
        M, K, widths, R, L, kind="mixed", dtype=dtype, device=device, axis=axis, **({stored: True} if stored else {})
    )
    groups = group_tokens(p.slots, L)
    h = lora_shrink_grouped(p.x, p.lora_a, groups)
    y = w8a16_gemm(p.x, p.weight, lora=LoraTerm(h, p.lora_b, p.slots, groups))
    want = w8a16_gemm_ref(p.x, p.weight, lora=LoraTerm(h.nan_to_num(0.0), p.lora_b, p.slots, groups))
    error = (y.float() - want).abs()
    assert error.max() <= EPS[dtype] * want.abs().max(), f"worst at {divmod(int(error.argmax()), y.shape[1])}"
    assert torch.equal(y[p.slots < 0], w8a16_gemm(p.x, p.weight)[p.slots < 0])


@pytest.mark.parametrize("config", [SPLIT, PLAIN], ids=["swap", "plain"])
@pytest.mark.parametrize(
    ("kind", "R", "stored"),
    [("mixed", 8, ""), ("distinct", 64, "fp8"), ("none", 16, ""), ("distinct", 16, "nvfp4"), ("mixed", 48, "nvfp4")],
)
def test_adapters_in_the_epilogue(config, kind, R, stored, device, dtype):
    M, K, widths, L = 13, 128, (40, 24, 16), 4  # 40 and 24: slices meet inside a tile
    p = problem(M, K, widths, R, L, kind=kind, dtype=dtype, device=device, **({stored: True} if stored else {}))
    groups = group_tokens(p.slots, L)
    h = lora_shrink_grouped(p.x, p.lora_a, groups, config=ShrinkConfig(16, 64 if R > 16 else 16, 64, 2, 4, 2))
    slots = torch.cat([p.slots, torch.full((3,), 2**30, dtype=torch.int32, device=device)])  # longer than the batch
    if kind == "none":
        slots[:M] = 1  # stale positive slots, as vLLM leaves them when nobody has an adapter
    y = w8a16_gemm(p.x, p.weight, lora=LoraTerm(h, p.lora_b, slots, groups), config=config)
    want = w8a16_gemm_ref(p.x, p.weight, lora=LoraTerm(h.nan_to_num(0.0), p.lora_b, p.slots, groups))
    error = (y.float() - want).abs()
    assert error.max() <= EPS[dtype] * want.abs().max(), f"worst at {divmod(int(error.argmax()), y.shape[1])}"
    base = w8a16_gemm(p.x, p.weight, config=config)
    assert torch.equal(y[p.slots < 0], base[p.slots < 0]), "a row without an adapter differs from the plain GEMM"


def test_one_adapter_for_every_row(device, dtype):
    p = problem(9, 64, (32, 32), 16, 2, kind="one", dtype=dtype, device=device)
    h = torch.randn(1, 9, 2, 16, device=device).to(dtype)
    y = w8a16_gemm(p.x, p.weight, lora=LoraTerm(h, p.lora_b), config=SWAP)
    want = w8a16_gemm_ref(p.x, p.weight, lora=LoraTerm(h, p.lora_b))
    assert (y.float() - want).abs().max() <= EPS[dtype] * want.abs().max()


def test_split_k_leaves_its_counters_as_it_found_them(device, dtype):
    p = problem(16, 256, (64,), 8, 2, kind="none", dtype=dtype, device=device)
    first = w8a16_gemm(p.x, p.weight, config=SPLIT)
    space = w8a16._workspaces[p.x.device][-1]
    assert int(space.counters.abs().sum()) == 0
    space.parts.fill_(float("nan"))  # whatever the last launch left there must not matter
    assert torch.equal(w8a16_gemm(p.x, p.weight, config=SPLIT), first)
    assert int(space.counters.abs().sum()) == 0


def test_every_code_is_widened_exactly(device, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = torch.isfinite(codes.float())
    table = torch.where(finite, codes.float(), torch.zeros(())).to(torch.float8_e4m3fn).view(8, 32)
    weight = Operand(
        table.repeat(2, 1).to(device).contiguous(), Format.FP8_E4M3, ScaleAxis.TENSOR, torch.ones(1, device=device)
    )
    y = w8a16_gemm(torch.eye(32, dtype=dtype, device=device), weight, config=W8A16Config(16, 16, 32, True, 1, 1, 4, 2))
    assert torch.equal(y.t().float().cpu(), table.repeat(2, 1).float())


def test_no_tokens_launch_nothing(device, dtype):
    p = problem(2, 64, (32,), 8, 2, kind="none", dtype=dtype, device=device)
    assert w8a16_gemm(p.x[:0], p.weight).shape == (0, 32)


def test_default_configs_are_legal():
    for M in (1, 9, 16, 17, 33, 65, 200, 4096):
        for N in (192, 4096, 6144, 24576, 29568):
            for K in (64, 576, 1536, 4096, 12288, 29568):
                for kind in (None, ScaleAxis.BLOCK, Format.NVFP4):
                    for shared in (227 * 1024, 99 * 1024):
                        config = w8a16_config_for(M, N, K, shared, kind)
                        assert is_legal_w8a16(config, N, K, shared, kind), (M, N, K, kind, config)
    # As timed: 8-token tiles take twice as long on NVFP4.
    for kind, rows in ((None, 8), (ScaleAxis.BLOCK, 8), (Format.NVFP4, 16)):
        assert w8a16_config_for(1, 4096, 4096, kind=kind).block_m == rows


def test_bad_arguments_are_refused_by_name(device, dtype):
    p = problem(4, 64, (32,), 8, 2, kind="one", dtype=dtype, device=device, bias=True)
    out = torch.zeros(4, 32, dtype=dtype, device=device)
    plain = Operand(torch.zeros(32, 64, dtype=dtype, device=device), SIXTEEN[dtype])
    with pytest.raises(UnsupportedKernel, match=r"weight is fp16 with axis=none; allowed: fp8_e4m3 with .*, nvfp4"):
        w8a16_gemm(p.x, plain, out=out)
    base = problem(4, 64, (32,), 8, 2, kind="one", dtype=dtype, device=device, axis=Format.NVFP4).weight
    with pytest.raises(ValueError, match=r"weight \(32, 64\) does not fit x \(4, 32\)"):
        w8a16_gemm(p.x[:, :32].contiguous(), base, out=out)
    swizzled = dataclasses.replace(base, scales=base.scales.t().contiguous().t())
    with pytest.raises(ValueError, match=r"weight has scales with strides \(1, 32\)"):
        w8a16_gemm(p.x, swizzled, out=out)
    with pytest.raises(ValueError, match="is not legal"):
        w8a16_gemm(p.x, base, out=out, config=TMA)
    with pytest.raises(ValueError, match=r"weight \(32, 64\) does not fit x \(4, 48\)"):
        w8a16_gemm(p.x[:, :48].contiguous(), p.weight, out=out)
    with pytest.raises(ValueError, match="bias is"):
        w8a16_gemm(p.x, p.weight, bias=p.bias[:5], out=out)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        w8a16_gemm(p.x.double(), p.weight)
    with pytest.raises(ValueError, match="out is"):
        w8a16_gemm(p.x, p.weight, out=out[:2])
    with pytest.raises(ValueError, match="is not legal"):
        w8a16_gemm(p.x, p.weight, out=out, config=W8A16Config(16, 32, 64, True, 8))
    h = torch.zeros(1, 4, 1, 8, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=r"slots given without lora\.groups"):
        w8a16_gemm(p.x, p.weight, out=out, lora=LoraTerm(h, p.lora_b, p.slots))
    with pytest.raises(ValueError, match=r"lora.h is \(1, 3, 1, 8\)"):
        w8a16_gemm(p.x, p.weight, out=out, lora=LoraTerm(h[:, :3].contiguous(), p.lora_b))
    with pytest.raises(UnsupportedKernel, match="implementation=cuda asked"):
        w8a16_gemm(p.x, p.weight, out=out, implementation="cuda")
    assert (out == 0).all(), "something was launched"
