"""Training GEMMs against fp32 and against autograd, in both modes; arguments refused by name."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import problem

from epilora.kernels import training
from epilora.kernels.training import (
    MODES,
    DxConfig,
    dx_config_for,
    is_legal_dx,
    lora_grads,
    lora_grads_ref,
    train_dx,
    train_dx_ref,
    train_forward,
    train_forward_ref,
)
from epilora.kernels.w8a16 import W8A16Config
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.reference import dequantize, quantize_weight_ref

pytestmark = pytest.mark.usefixtures("poisoned_empty")
FORWARD = W8A16Config(32, 32, 64, True, 1, 8, 4, 2)


def adapter(p):
    return [a.values[0].contiguous() for a in p.lora_a], [b.values[0].contiguous() for b in p.lora_b]


def rms(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("M", "K", "widths", "R", "axis"),
    [
        (37, 96, (48, 16, 20), 8, ScaleAxis.CHANNEL),
        (33, 128, (64,), 64, ScaleAxis.TENSOR),
        (1, 64, (32, 32), 16, ScaleAxis.CHANNEL),
        (37, 200, (128, 32), 8, ScaleAxis.BLOCK),
        (33, 304, (160,), 16, Format.NVFP4),
        (5, 64, (48, 16), 8, Format.NVFP4),
    ],
)
def test_forward_and_dx_err_no_more_than_twice_sixteen_bit_torch(
    mode, M, K, widths, R, axis, device, dtype, monkeypatch
):
    monkeypatch.setattr(training, "PANEL_BYTES", 128 * 320 * 2)
    training._panels.clear()
    p = problem(M, K, widths, R, 1, kind="one", dtype=dtype, device=device, axis=axis)
    a, b = adapter(p)
    wide = dequantize(p.weight).to(dtype)
    dy = torch.randn(M, sum(widths), device=device).to(dtype)
    y, h = train_forward(p.x, p.weight, a, b, mode=mode, config=FORWARD)
    plain = p.x @ wide.t() + torch.cat([(p.x @ ai.t()) @ bi.t() for ai, bi in zip(a, b, strict=True)], dim=1)
    want = train_forward_ref(p.x, p.weight, a, b)
    assert rms(y, want) <= 2 * rms(plain, want)
    assert h.shape == (M, len(widths) * R)
    dx, dh = train_dx(dy, p.weight, a, b, mode=mode, config=DxConfig(32, 32, 32, False, 8, 4, 2))
    columns = list(dy.split(list(widths), dim=1))
    plain = dy @ wide + sum((g @ bi) @ ai for g, ai, bi in zip(columns, a, b, strict=True))
    want = train_dx_ref(dy, p.weight, a, b)
    assert rms(dx, want) <= 2 * rms(plain, want)
    assert dh.shape == h.shape


@pytest.mark.parametrize(
    "config",
    [DxConfig(64, 64, 32, True, 4, 4, 2), DxConfig(32, 64, 32, False, 4, 4, 2, use_tma=True)],
    ids=["swap", "tma"],
)
@pytest.mark.parametrize("axis", [ScaleAxis.CHANNEL, ScaleAxis.BLOCK, Format.NVFP4])
def test_other_orientations_of_dx(config, axis, device, dtype):
    p = problem(70, 96, (64, 96), 8, 1, kind="one", dtype=dtype, device=device, axis=axis)
    a, b = adapter(p)
    dy = torch.randn(70, 160, device=device).to(dtype)
    if axis is Format.NVFP4 and config.use_tma:
        with pytest.raises(ValueError, match="is not legal for N=160, K=96"):
            train_dx(dy, p.weight, a, b, config=config)
        return
    dx, _ = train_dx(dy, p.weight, a, b, config=config)
    assert rms(dx, train_dx_ref(dy, p.weight, a, b)) <= 8 * torch.finfo(dtype).eps


def test_gradients_are_those_of_autograd(device, dtype):
    p = problem(24, 64, (32, 16), 8, 1, kind="one", dtype=dtype, device=device)
    a, b = adapter(p)
    dy = torch.randn(24, 48, device=device).to(dtype)
    x32 = p.x.float().requires_grad_()
    a32 = [t.float().requires_grad_() for t in a]
    b32 = [t.float().requires_grad_() for t in b]
    train_forward_ref(x32, p.weight, a32, b32).backward(dy.float())
    _, h = train_forward(p.x, p.weight, a, b, config=FORWARD)
    dx, dh = train_dx(dy, p.weight, a, b)
    grads_a, grads_b = lora_grads(p.x, dy, h, dh, (32, 16))
    limit = 4 * torch.finfo(dtype).eps
    assert rms(dx, x32.grad) <= limit
    for got, leaf in zip(grads_a + grads_b, a32 + b32, strict=True):
        assert rms(got, leaf.grad) <= limit
    refs_a, refs_b = lora_grads_ref(p.x, dy, a, b)
    for ref, leaf in zip(refs_a + refs_b, a32 + b32, strict=True):
        assert rms(ref, leaf.grad) <= 1e-5


def test_without_an_adapter_and_without_tokens(device, dtype):
    p = problem(5, 64, (32,), 8, 1, kind="one", dtype=dtype, device=device)
    y, h = train_forward(p.x, p.weight)
    assert h is None
    assert rms(y, train_forward_ref(p.x, p.weight)) <= 2 * torch.finfo(dtype).eps
    dx, dh = train_dx(y[:0], p.weight)
    assert dx.shape == (0, 64)
    assert dh is None
    assert train_forward(p.x[:0], p.weight)[0].shape == (0, 32)


def test_panels_never_hold_more_than_their_budget(device, dtype, monkeypatch):
    monkeypatch.setattr(training, "PANEL_BYTES", 128 * 64 * 2)
    training._panels.clear()
    p = problem(3, 64, (300,), 8, 1, kind="one", dtype=dtype, device=device)
    y, _ = train_forward(p.x, p.weight, mode="panel")
    assert rms(y, train_forward_ref(p.x, p.weight)) <= 4 * torch.finfo(dtype).eps
    (panel,) = training._panels.values()
    assert panel.numel() * panel.element_size() == 128 * 64 * 2
    assert [(s.start, s.stop) for s in training._spans(300, 64, 2)] == [(0, 128), (128, 256), (256, 300)]


def test_default_configs_are_legal():
    for M in (1, 129, 4096):
        for N in (192, 4096, 24576):
            for K in (64, 576, 12288):
                assert is_legal_dx(dx_config_for(M, N, K), N, K)


def test_bad_arguments_are_refused_by_name(device, dtype):
    p = problem(4, 64, (32,), 8, 1, kind="one", dtype=dtype, device=device)
    a, b = adapter(p)
    with pytest.raises(ValueError, match=r"mode='copy' is unknown; allowed: registers, panel"):
        train_forward(p.x, p.weight, a, b, mode="copy")
    with pytest.raises(ValueError, match=r"lora_a\[0\] is"):
        train_forward(p.x, p.weight, [a[0][:, :32]], b)
    with pytest.raises(ValueError, match="1 lora_a and 0 lora_b"):
        train_dx(torch.zeros(4, 32, dtype=dtype, device=device), p.weight, a, [])
    with pytest.raises(ValueError, match=r"weight \(32, 64\) does not fit dy \(4, 64\)"):
        train_dx(p.x, p.weight)
    with pytest.raises(ValueError, match="do not fit"):
        lora_grads(p.x, p.x, p.x, p.x[:2], (64,))
    with pytest.raises(ValueError, match="is not legal"):
        train_dx(torch.zeros(4, 32, dtype=dtype, device=device), p.weight, config=DxConfig(512, 256, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [64, 256, 2048])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_train_dx_registers_by_default_is_as_exact_as_panels(M, with_adapter):
    """Without an adapter, at 256 tokens, the register kernel was once off by 3.8 %: a call without a `config` must not be."""
    torch.manual_seed(0)
    device, N, K, R = torch.device("cuda", 0), 4096, 4096, 64
    weight = quantize_weight_ref(torch.randn(N, K, device=device))
    dy = torch.randn(M, N, dtype=torch.bfloat16, device=device)
    lora = ()
    if with_adapter:
        lora = (
            [torch.randn(R, K, dtype=torch.bfloat16, device=device)],
            [torch.randn(N, R, dtype=torch.bfloat16, device=device)],
        )
    dx, _ = train_dx(dy, weight, *lora, mode="registers")
    panel, _ = train_dx(dy, weight, *lora, mode="panel")
    ref = train_dx_ref(dy, weight, *lora)
    error, panel_error = ((y.float() - ref.float()).norm() / ref.float().norm() for y in (dx, panel))
    assert error <= 1.5 * panel_error
