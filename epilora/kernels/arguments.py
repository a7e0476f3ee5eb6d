"""Checks of arguments that several kernels share: each names the kernel, the argument, its value and what is allowed.

Public functions check once, at their edge; launches below them check nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedKernel
from ..quant.block_fp8 import BLOCK
from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand
from .dispatch import Implementation
from .tiles import MAX_SLICES, pad4

if TYPE_CHECKING:
    from .lora_expand import TokenGroups

MAX_RANK = 256
HOPPER_SHARED_BYTES = 227 * 1024  # a block's limit on compute capability 9.0 and 10.0; 99 KiB on 8.9 and 12.0
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


WeightKind = ScaleAxis | Format  # ScaleAxis.BLOCK: FP8 in 128 x 128 blocks; Format.NVFP4


def weight_kind(weight: Operand) -> WeightKind | None:
    """What tiles depend on beside the shape: NVFP4, FP8 in blocks, or None for FP8 with a scale a tensor or channel."""
    if weight.format is Format.NVFP4:
        return Format.NVFP4
    return ScaleAxis.BLOCK if weight.axis is ScaleAxis.BLOCK else None


def check_stacks(kernel: str, name: str, operands: Sequence[Operand], x: torch.Tensor) -> None:
    """Check one contiguous stack [L, rows, columns] a slice: one format and number of slots; x's dtype, FP8 with row scales or NVFP4."""
    if not 1 <= len(operands) <= MAX_SLICES:
        raise ValueError(f"{kernel}: {name} has {len(operands)} slices; allowed: 1 to {MAX_SLICES}")
    first = operands[0]
    for s, operand in enumerate(operands):
        values = operand.values
        where = f"{kernel}: {name}[{s}]"
        if values.dim() != 3:
            raise ValueError(f"{where} has shape {tuple(values.shape)}; allowed: [slots, rows, columns]")
        if not values.is_contiguous():
            raise ValueError(f"{where} has strides {values.stride()}; allowed: contiguous {tuple(values.shape)}")
        if values.device != x.device:
            raise ValueError(f"{where} is on {values.device}; allowed: the tokens' device {x.device}")
        if operand.format is not first.format or values.shape[0] != first.values.shape[0]:
            raise ValueError(
                f"{where} is {operand.format.value} with {values.shape[0]} slots; allowed: as {name}[0], "
                f"{first.format.value} with {first.values.shape[0]}"
            )
        if operand.format is Format.FP8_E4M3:
            if (
                operand.axis is not ScaleAxis.CHANNEL
                or operand.scales is None
                or operand.scales.numel() != values[..., 0].numel()
            ):
                raise ValueError(
                    f"{where} needs one scale a row (axis channel, fp32 [{values.shape[0]}, {values.shape[1]}])"
                )
            if operand.scales.dtype != torch.float32 or not operand.scales.is_contiguous():
                raise ValueError(f"{where} scales are {operand.scales.dtype}; allowed: contiguous float32")
        elif operand.format is Format.NVFP4:
            check_nvfp4_stack(kernel, f"{name}[{s}]", operand)
        elif values.dtype != x.dtype:
            raise TypeError(
                f"{where} is {values.dtype}; allowed: the tokens' dtype {x.dtype}, float8_e4m3fn with row scales, or nvfp4"
            )


def check_nvfp4_stack(kernel: str, name: str, operand: Operand) -> None:
    """Check what the operand itself does not promise: rows side by side and everything on one device."""
    scales, whole = operand.scales, operand.global_scale
    assert scales is not None, "an NVFP4 operand has block scales"
    assert whole is not None, "an NVFP4 operand has global scales"
    for what, tensor in (("codes", operand.values), ("scales", scales), ("global scales", whole)):
        if not tensor.is_contiguous() or tensor.device != operand.device:
            raise ValueError(
                f"{kernel}: {name} has {what} with strides {tensor.stride()} on {tensor.device}; "
                f"allowed: contiguous on {operand.device}"
            )


def stack_pointers(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """Four values, four scales and four global scales, the last slice's repeated, as kernels take them. What a format does not have
    is its values again (never read).
    """
    values = [o.values for o in operands]
    scales = [o.values if o.scales is None else o.scales for o in operands]
    whole = [o.values if o.global_scale is None else o.global_scale for o in operands]
    return [*pad4(values), *pad4(scales), *pad4(whole)]


def check_groups(kernel: str, groups: TokenGroups, M: int, L: int, device: torch.device) -> None:
    """Check the arrays of a step's groups for M tokens over L slots."""
    wanted = {"sorted_tokens": M, "active_slots": L + 1, "counts": L + 1, "starts": L + 2}
    for name, least in wanted.items():
        array = getattr(groups, name)
        if array.dtype != torch.int32 or array.dim() != 1 or array.stride(0) != 1 or array.device != device:
            raise ValueError(
                f"{kernel}: groups.{name} is {array.dtype} {tuple(array.shape)} on {array.device}; "
                f"allowed: int32 [n] on {device}"
            )
        if array.numel() < least:
            raise ValueError(f"{kernel}: groups.{name} has {array.numel()} entries; at least {least} for M={M}, L={L}")


def check_tokens(kernel: str, name: str, tensor: torch.Tensor, implementation: Implementation) -> None:
    """Check a [M, columns] tensor of tokens: a dtype that the implementation takes, contiguous rows."""
    if implementation is Implementation.CUDA:
        raise UnsupportedKernel(
            f"{kernel}: implementation=cuda asked, but it has no CUDA C++ form; allowed: triton, interpreter, reference"
        )
    allowed = _SIXTEEN_BIT if implementation is Implementation.TRITON else (*_SIXTEEN_BIT, torch.float32)
    if tensor.dtype not in allowed:
        raise TypeError(f"{kernel}: {name} is {tensor.dtype}; allowed: {', '.join(str(d) for d in allowed)}")
    if tensor.dim() != 2 or tensor.stride(1) != 1:
        raise ValueError(
            f"{kernel}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            f"allowed: 2-D with contiguous rows"
        )


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory a block may use on `device` (a Hopper block's where kernels are interpreted)."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing from torch's stubs


@functools.cache
def multiplies_nvfp4(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply NVFP4 numbers (compute capability 10 and 12)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def scales_of(operand: Operand) -> torch.Tensor:
    """The scales of an operand that was checked to have them."""
    assert operand.scales is not None, "checked before"
    return operand.scales


def check_weight(
    kernel: str,
    weight: Operand,
    device: torch.device,
    K: int | None = None,
    *,
    blocks: bool = False,
    nvfp4: bool = False,
) -> None:
    """Check a base operand: FP8 e4m3 [N, K] contiguous, one fp32 scale per tensor, per channel or (`blocks`) per 128 x 128 block; or
    (`nvfp4`) NVFP4. K: in features it must have.
    """
    axes = (ScaleAxis.TENSOR, ScaleAxis.CHANNEL, *((ScaleAxis.BLOCK,) if blocks else ()))
    if nvfp4 and weight.format is Format.NVFP4 and weight.values.dim() == 2:
        check_nvfp4_stack(kernel, "weight", weight)
        if weight.device != device or (K is not None and weight.columns != K):
            raise ValueError(f"{kernel}: weight is {weight.shape} on {weight.device}; x has K={K} on {device}")
        return
    if weight.format is not Format.FP8_E4M3 or weight.axis not in axes:
        raise UnsupportedKernel(
            f"{kernel}: weight is {weight.format.value} with axis={weight.axis.value}; "
            f"allowed: fp8_e4m3 with axis {' or '.join(axis.value for axis in axes)}{', nvfp4' if nvfp4 else ''}"
        )
    if weight.axis is ScaleAxis.BLOCK and (weight.block != (BLOCK, BLOCK) or not scales_of(weight).is_contiguous()):
        raise UnsupportedKernel(
            f"{kernel}: weight has blocks of {weight.block}, scales with strides {scales_of(weight).stride()}; "
            f"allowed: {(BLOCK, BLOCK)}, contiguous scales"
        )
    if weight.values.dim() != 2 or not weight.values.is_contiguous():
        raise ValueError(
            f"{kernel}: weight has shape {tuple(weight.values.shape)} and strides {weight.values.stride()}; "
            f"allowed: contiguous [N, K]"
        )
    if K is not None and weight.values.shape[1] != K:
        raise ValueError(f"{kernel}: weight is {tuple(weight.values.shape)}; x has K={K}")
    if (
        weight.device != device
        or weight.scales is None
        or weight.scales.device != device
        or weight.scales.dtype != torch.float32
    ):
        raise ValueError(f"{kernel}: weight is on {weight.device}; allowed: codes and float32 scales on {device}")
