"""The matched (W8A16) arithmetic on a CPU, stated once: engine and trainer both call these functions.

    y = round((x codes^T) * scale + bias + (x A^T) B^T)

The codes are widened without rounding (every e4m3 value is a bf16, fp16 and fp32 value), the activations are not
quantised, sums run in fp32 whatever the dtype of x (in fp16 `x codes^T` before scaling would overflow past 65504), the
scale is applied to the finished sum, and the result is rounded to the dtype of x once. The adapter's scaling (alpha /
rank) is folded into B beforehand. What engine and trainer disagree on is then only the order of sums inside a GEMM and
the attention kernel.

At most one projection is widened at a time: nothing is cached between calls.

Legend: M tokens, K in features, N out features, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACCUMULATE_DTYPE = torch.float32
_SIGN_AND_LOW_SEVEN = -0x78100000  # 0x87F00000 as int32: bit 31, bits 20 to 26
_REBIAS = 2.0**120  # e4m3's exponent bias is 7, fp32's 127
_E4M3_MAX = 448.0


def widen_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of e4m3 codes: the bits of `codes.float()` (NaN for NaN), in a fifth of its time.

    That conversion goes code by code: 6.5 against 1.3 ms for one 1536 x 576 weight on an AVX2 core. Here the exponent and
    mantissa bits of all codes are moved to fp32's place and the exponent is rebiased by a multiplication, which makes e4m3's
    subnormals right too. The two NaN codes come out as +-480 and are put right if there are any. All of it happens in the
    result's own buffer.

    codes: float8_e4m3fn, any shape and strides. Returns fp32 of that shape. Not under `torch.set_flush_denormal(True)`,
    which would flush the subnormals.
    """
    bits = codes.view(torch.int8).to(torch.int32)  # the sign fills bits 7 to 31
    values = bits.bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_LOW_SEVEN).view(torch.float32).mul_(_REBIAS)
    if values.numel():
        low, high = values.aminmax()
        if high > _E4M3_MAX or low < -_E4M3_MAX:
            values.masked_fill_(values.abs() > _E4M3_MAX, float("nan"))
    return values


def w8a16_linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x codes^T) * scale (+ bias), accumulated in fp32. Differentiable in x (codes and scales are constants).

    x_MK: [..., K], fp32, bf16 or fp16. codes_NK: [N, K] float8_e4m3fn (any strides). scale_N: [N] or [N, 1] fp32, or
    one value.
    Returns [..., N] in `out_dtype` (None: the dtype of x). Ask for fp32 to add a LoRA delta before the only rounding.
    """
    y_MN = F.linear(x_MK.to(ACCUMULATE_DTYPE), widen_e4m3(codes_NK))
    y_MN = y_MN.mul_(scale_N.reshape(-1).to(ACCUMULATE_DTYPE))  # in place: a GEMM's backward does not need its output
    if bias_N is not None:
        y_MN = y_MN.add_(bias_N.to(ACCUMULATE_DTYPE))
    return y_MN.to(out_dtype or x_MK.dtype)


def lora_delta(
    x_MK: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """(x A^T) B^T, accumulated in fp32; the [M, R] intermediate is not rounded. Differentiable in x, A and B.

    x_MK: [..., K]; a_RK: [R, K]; b_NR: [N, R], scaling folded in. A 16-bit engine stores A and B in its own dtype: a
    trainer that wants to match it rounds them to that dtype first. Returns [..., N] in `out_dtype` (None: the dtype of
    x).
    """
    h_MR = F.linear(x_MK.to(ACCUMULATE_DTYPE), a_RK.to(ACCUMULATE_DTYPE))
    return F.linear(h_MR, b_NR.to(ACCUMULATE_DTYPE)).to(out_dtype or x_MK.dtype)


def w8a16_lora_linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    a_RK: torch.Tensor | None = None,
    b_NR: torch.Tensor | None = None,
) -> torch.Tensor:
    """Base plus adapter, rounded once: what the engine's layer computes for rows of one adapter (a, b None: plain
    base).

    Shapes and dtypes as in `w8a16_linear` and `lora_delta`. Returns [..., N] in the dtype of x.
    """
    y_MN = w8a16_linear(x_MK, codes_NK, scale_N, bias_N, out_dtype=ACCUMULATE_DTYPE)
    if a_RK is not None and b_NR is not None:
        y_MN = y_MN + lora_delta(x_MK, a_RK, b_NR, out_dtype=ACCUMULATE_DTYPE)
    return y_MN.to(x_MK.dtype)
