"""Inputs that several kernel tests share: stacks of adapters, slot lists that hurt, FP8 weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from epilora.quant.block_fp8 import quantize_blocks_ref
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.nvfp4 import quantize_nvfp4_ref, quantize_nvfp4_stack_ref
from epilora.quant.operand import Operand
from epilora.quant.reference import quantize_rows_ref, quantize_weight_ref

SIXTEEN = {torch.float16: Format.FP16, torch.bfloat16: Format.BF16}


@dataclass
class Problem:
    """One projection with adapters."""

    x: torch.Tensor
    weight: Operand
    lora_a: list[Operand]
    lora_b: list[Operand]
    slots: torch.Tensor
    bias: torch.Tensor | None

    @property
    def lora(self):
        return self.lora_a, self.lora_b, self.slots


def slot_list(kind: str, M: int, L: int, device) -> torch.Tensor:
    """int32 slots: 'one', 'none', 'distinct', 'mixed' (-1 and repeats), 'stale' (garbage outside 0 .. L-1 too)."""
    base = torch.arange(M)
    if kind == "one":
        slots = torch.full((M,), L - 1)
    elif kind == "none":
        slots = torch.full((M,), -1)
    elif kind == "distinct":
        slots = base % L
    elif kind == "mixed":
        slots = (base * 7) % (L + 1) - 1
    else:
        slots = torch.tensor([0, 2**30, -1, L, -7, L - 1, -(2**31)])[base % 7]
    return slots.to(torch.int32).to(device)


def problem(
    M: int,
    K: int,
    widths: tuple[int, ...],
    R: int,
    L: int,
    *,
    kind: str,
    dtype: torch.dtype,
    device,
    axis=ScaleAxis.CHANNEL,
    bias=False,
    fp8=False,
    nvfp4=False,
) -> Problem:
    """Random inputs from a fixed seed; axis: of the base's scales, or Format.NVFP4. Weights have unequal rows, NVFP4 slots unequal global scales, so that a wrong scale shows."""
    g = torch.Generator().manual_seed(M * 7919 + K + R)

    def rand(*size):
        return torch.randn(*size, generator=g)

    N = sum(widths)
    real = rand(N, K) * torch.linspace(0.5, 2.0, N)[:, None] * 0.05
    if axis is Format.NVFP4:
        weight = quantize_nvfp4_ref(real * torch.linspace(0.25, 4.0, K)[None, :])
        weight = dataclasses.replace(weight, global_scale=weight.global_scale.to(device))
    elif axis is ScaleAxis.BLOCK:
        weight = quantize_blocks_ref(real * torch.linspace(0.25, 4.0, K)[None, :])
    else:
        weight = quantize_weight_ref(real, axis)
    weight = dataclasses.replace(weight, values=weight.values.to(device), scales=weight.scales.to(device))

    def stack(*size):
        values = (rand(*size) * 0.1).to(dtype)
        if nvfp4:
            q = quantize_nvfp4_stack_ref(values * torch.logspace(-1, 1, size[0])[:, None, None])
            return dataclasses.replace(
                q, values=q.values.to(device), scales=q.scales.to(device), global_scale=q.global_scale.to(device)
            )
        if fp8:
            q = quantize_rows_ref(values)
            return Operand(q.values.to(device), q.format, q.axis, q.scales.to(device))
        return Operand(values.to(device), SIXTEEN[dtype])

    return Problem(
        x=(rand(M, K) * 2).to(dtype).to(device),
        weight=weight,
        lora_a=[stack(L, R, K) for _ in widths],
        lora_b=[stack(L, n, R) for n in widths],
        slots=slot_list(kind, M, L, device),
        bias=rand(N).to(dtype).to(device) if bias else None,
    )


def rms_ratio(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in fp64; infinite when `out` holds a value that is not finite."""
    out, ref = out.double(), ref.double()
    if not torch.isfinite(out).all():
        return float("inf")
    return float((out - ref).norm() / ref.norm().clamp_min(1e-30))
