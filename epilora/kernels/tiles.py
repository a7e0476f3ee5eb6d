"""Device helpers and argument checks that several kernels share.

Legend: M tokens, R rank, L adapter slots; `slot` is the index of an adapter in its stack, -1 for none.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand

# True when kernels run in Triton's interpreter: read when triton is imported, as triton itself does.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
MAX_SLICES = 4
# How a weight is scaled: the constant `W_SCALE` of kernels that read several kinds.
PER_TENSOR, PER_CHANNEL, PER_BLOCK, NVFP4 = (tl.constexpr(kind) for kind in range(4))
_KINDS = {ScaleAxis.TENSOR: PER_TENSOR, ScaleAxis.CHANNEL: PER_CHANNEL, ScaleAxis.BLOCK: PER_BLOCK}


def scale_kind(weight: Operand) -> int:
    """The number of `PER_TENSOR`, `PER_CHANNEL`, `PER_BLOCK` or `NVFP4` that describes a checked weight."""
    return NVFP4.value if weight.format is Format.NVFP4 else _KINDS[weight.axis].value


@triton.jit
def pick4(index, p0, p1, p2, p3):
    """The `index`-th of four pointers or numbers (uniform branch; no table of pointers in memory)."""
    p = p0
    if index == 1:
        p = p1
    if index == 2:
        p = p2
    if index == 3:
        p = p3
    return p


@triton.jit
def slice_of(n, end0, end1, end2):
    """Which output slice column `n` lies in; `end*` are the ends of the first three slices (unused ones: a huge number)."""
    return (n >= end0).to(tl.int32) + (n >= end1).to(tl.int32) + (n >= end2).to(tl.int32)


@triton.jit
def any_active(active_ptr, num_entries, BLOCK: tl.constexpr):
    """Whether one of `num_entries` listed slots is >= 0 (-1 entries mean none). Returns an int32 0 or 1."""
    offs = tl.arange(0, BLOCK)
    ids = tl.load(active_ptr + offs, mask=offs < num_entries, other=-1)
    return tl.max((ids >= 0).to(tl.int32), axis=0)


@triton.jit
def widen_e4m3(codes, like: tl.constexpr):
    """e4m3 codes as `like` (bf16, fp16 or fp32), exactly. On sm_90 the direct conversion to bf16 compiles to F2F.BF16.F16, one value at a
    time at a low rate; the way through fp32 takes four ordinary instructions a pair.
    """
    if like == tl.float16:
        return codes.to(tl.float16)
    return codes.to(tl.float32).to(like)


@triton.jit
def to_e4m3(q, ROUND_FIRST: tl.constexpr):
    """fp32 in +-448 to e4m3, ties to even. ROUND_FIRST: round by arithmetic before an exact cast (the interpreter's own cast
    rounds ties away from zero; the hardware's does not need this)."""
    if ROUND_FIRST:
        bits = q.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (tl.abs(q) + 24576.0) - 24576.0  # 1.5 * 2**14: the fp32 grid there is 2**-9, e4m3's subnormal step
        small = (small.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(
            tl.float32, bitcast=True
        )  # -0 keeps its sign
        q = tl.where(tl.abs(q) < 0.015625, small, normal)
    return q.to(tl.float8e4nv)


def check(condition: bool, function: str, message: str) -> None:
    """Raise ValueError `function: message` unless `condition`."""
    if not condition:
        raise ValueError(f"{function}: {message}")


def check_tensor(
    function: str,
    name: str,
    tensor: torch.Tensor,
    *,
    dim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    device=None,
) -> None:
    """Check a tensor argument: rank, dtype, device, and that its last axis is contiguous. (Where kernels run: `dispatch.choose`.)

    Raises TypeError for a wrong type or dtype, ValueError for the rest; the message names argument, value and what is allowed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}: {name} is {type(tensor).__name__}; give a torch.Tensor")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{function}: {name} has dtype {tensor.dtype}; allowed: {', '.join(str(d) for d in dtypes)}")
    if dim is not None and tensor.dim() != dim:
        raise ValueError(f"{function}: {name} has shape {tuple(tensor.shape)}; it must have {dim} dimensions")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{function}: {name} has stride {tensor.stride()}; its last axis must be contiguous")
    if device is not None and tensor.device != device:
        raise ValueError(f"{function}: {name} is on {tensor.device}; the other arguments are on {device}")


def slice_ends(widths: list[int]) -> tuple[int, int, int]:
    """Ends of the first three slices, a huge number for those that do not exist. Raises ValueError for over four slices."""
    if not 1 <= len(widths) <= MAX_SLICES:
        raise ValueError(f"slices: {len(widths)} given; 1 to {MAX_SLICES} are supported")
    ends, total = [], 0
    for width in widths:
        total += width
        ends.append(total)
    return tuple((ends[:-1] + [2**31 - 1] * 3)[:3])  # type: ignore[return-value]


def pad4(items: list) -> list:
    """Four items, the last one repeated: kernels take one pointer per slice."""
    return (list(items) + [items[-1]] * MAX_SLICES)[:MAX_SLICES]
