"""Plain-torch quantise and dequantise: what every kernel is compared with.

    scale = max(amax / 448, 1 / (448 * 512)),   code = e4m3(clamp(x / scale, -448, 448))

per token for activations, per channel or per tensor for weights. Divisions are true divisions and the cast rounds to
nearest even, as vLLM's `dynamic_per_token_scaled_fp8_quant` does. NaN and infinity follow that op too: amax passes over NaN; with
an infinity in the row the scale is infinite, finite values become 0 and every quotient that is NaN becomes +448.
Source: csrc/quantization/w8a8/fp8 of vLLM (Apache-2.0), read for its behaviour.
"""

from __future__ import annotations

import torch

from .formats import E4M3_MAX, E4M3_MIN_SCALE, Format, ScaleAxis
from .operand import Operand

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of x / scale, saturated at +-448; NaN becomes +448.

    x: any float dtype. scale: fp32, broadcastable. Returns float8_e4m3fn of x's shape.
    """
    quotient = x.float() / scale
    limit = torch.tensor(E4M3_MAX, device=x.device)
    return torch.fmax(-limit, torch.fmin(quotient, limit)).to(torch.float8_e4m3fn)


def scale_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """fp32 scales with which values up to `amax` fill e4m3; never below what vLLM gives a zero row."""
    amax = amax.float()
    # a tensor divisor: torch on CUDA multiplies by the reciprocal when the divisor is a Python number
    return torch.clamp_min(amax / torch.full_like(amax, E4M3_MAX), E4M3_MIN_SCALE)


def quantize_per_token_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token dynamic FP8.

    x: [M, K] bf16, fp16 or fp32. Returns (codes [M, K] float8_e4m3fn, scale [M, 1] fp32). M = 0 gives empty tensors.
    """
    magnitude = x.float().abs()
    magnitude = torch.where(torch.isnan(magnitude), torch.zeros_like(magnitude), magnitude)
    scale = scale_of_amax(magnitude.amax(dim=-1, keepdim=True))
    return encode_e4m3(x, scale), scale


def quantize_weight_ref(weight: torch.Tensor, axis: ScaleAxis = ScaleAxis.CHANNEL) -> Operand:
    """FP8 weight operand from [N, K] real values, one scale per out channel or one for the tensor.

    Raises ValueError for another axis.
    """
    if axis is ScaleAxis.CHANNEL:
        scale = scale_of_amax(weight.float().abs().amax(dim=-1))
        return Operand(encode_e4m3(weight, scale[:, None]), Format.FP8_E4M3, axis, scale)
    if axis is ScaleAxis.TENSOR:
        scale = scale_of_amax(weight.float().abs().amax()).reshape(1)
        return Operand(encode_e4m3(weight, scale), Format.FP8_E4M3, axis, scale)
    raise ValueError(f"quantize_weight_ref: axis={axis.value}; allowed: channel, tensor")


def quantize_rows_ref(stack: torch.Tensor) -> Operand:
    """FP8 operand of an adapter stack [L, R, K] (or [L, N, R]) with one scale per row, for adapters stored in FP8.

    Scales have shape [L, R] (or [L, N]).
    """
    scale = scale_of_amax(stack.float().abs().amax(dim=-1))
    return Operand(encode_e4m3(stack, scale[..., None]), Format.FP8_E4M3, ScaleAxis.CHANNEL, scale)


def dequantize(operand: Operand) -> torch.Tensor:
    """The real values in fp32, same shape (NVFP4: unpacked); stacks too, but for FP8 in blocks."""
    if operand.format is Format.NVFP4:
        return _dequantize_nvfp4(operand)
    values = operand.values.float()
    if operand.axis is ScaleAxis.NONE:
        return values
    assert operand.scales is not None, "Operand guarantees scales when axis is not NONE"
    scales = operand.scales.float()
    if operand.axis is ScaleAxis.TENSOR:
        return values * scales.reshape(())
    if operand.axis is ScaleAxis.CHANNEL:
        return values * scales.reshape(*values.shape[:-1], 1)
    assert operand.block is not None, "Operand guarantees block when axis is BLOCK"
    rows, columns = operand.block
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values * spread[: values.shape[0], : values.shape[1]]


def _dequantize_nvfp4(operand: Operand) -> torch.Tensor:
    packed = operand.values
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(*packed.shape[:-1], -1).long()
    table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=packed.device)
    values = table[codes]
    assert operand.scales is not None, "NVFP4 always carries block scales"
    scales = operand.scales.float().repeat_interleave(16, dim=-1)[..., : values.shape[-1]]
    assert operand.global_scale is not None, "NVFP4 always carries a global scale"
    return values * scales * operand.global_scale.float().reshape(*values.shape[:-2], 1, 1)
