"""A linear layer on low-precision codes with trainable LoRA deltas; no dequantised weight outlives a call.

    y  = round( x W^T + (x A^T) (s B)^T ),          W = codes * scale, widened for this one product
    dx = dy W + (dy sB) A,   dA = (dy sB)^T x,   dB = s dy^T (x A^T)

Here in plain torch and fp32: `epilora.kernels.cpu_reference`, the same functions a matched (W8A16) engine runs without a
GPU. Saved for the backward pass are x, A and B; x A^T is made again, and the codes are widened again. On a GPU
`gemm_linear.py` takes its place.

Rows of several adapters may share a batch, as long as each adapter's rows are consecutive: the product with W is one,
each adapter's own products cover its rows.

Legend: M tokens, K in features, N out features, R rank, s = the adapter's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from epilora.errors import UnsupportedKernel
from epilora.kernels.cpu_reference import lora_delta, w8a16_linear, widen_e4m3
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, quantize_per_token_ref

from .ranks import RankGroup


@dataclass(frozen=True)
class LoraPair:
    """One module's adapter: a [R, K] and b [N, R] fp32 leaves, scaling (not folded)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a batch (stop None: to the end) and the adapter they use: module name -> pair; None: none."""

    start: int
    stop: int | None
    pairs: Mapping[str, LoraPair] | None


Rows = tuple[int, int, float]  # first row, end row, scaling of one adapter's segment


@dataclass
class AdapterContext:
    """What the projections of one model share: the adapters they apply now, and what they measured.

    segments: the batch's rows by adapter, in order; rows of no segment, and modules an adapter leaves out, compute the
    plain base. round_activations: the base multiplies activations rounded to FP8 per token, as a W8A8 engine does (a control:
    gradients pass through the rounding). largest_dequantised_bytes: the biggest widened weight that existed at any moment.
    """

    segments: tuple[Segment, ...] = ()
    round_activations: bool = False
    largest_dequantised_bytes: int = 0

    def note_dequantised(self, num_bytes: int) -> None:
        """Record that a weight was widened to `num_bytes`."""
        self.largest_dequantised_bytes = max(self.largest_dequantised_bytes, num_bytes)


def slice_rows(operand: Operand, start: int, stop: int) -> Operand:
    """Rows [start, stop) of a weight operand as views: one checkpoint module out of a packed projection.

    Raises UnsupportedKernel if a block of scales would be cut.
    """
    scales = operand.scales
    if scales is not None and operand.axis is ScaleAxis.CHANNEL:
        scales = scales.reshape(-1)[start:stop]
    elif scales is not None and operand.axis is ScaleAxis.BLOCK:
        rows = operand.block[0] if operand.block else 1
        if start % rows or (stop % rows and stop != operand.values.shape[0]):
            raise UnsupportedKernel(f"rows {start}:{stop} cut a block of {rows} rows that shares scales")
        scales = scales[start // rows : -(-stop // rows)]
    return replace(operand, values=operand.values[start:stop], scales=scales)


@dataclass(frozen=True)
class BaseProjection:
    """A frozen [N, K] weight (and bias [N]) and the two products training needs of it. Both work in fp32."""

    operand: Operand
    bias: torch.Tensor | None = None
    context: AdapterContext = field(default_factory=AdapterContext)

    @property
    def _channelwise(self) -> bool:
        return self.operand.format is Format.FP8_E4M3 and self.operand.axis in (ScaleAxis.CHANNEL, ScaleAxis.TENSOR)

    def _note(self) -> None:
        n, k = self.operand.shape
        self.context.note_dequantised(4 * n * k)

    def forward(self, x_MK: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in fp32, [M, N]."""
        self._note()
        if self._channelwise:
            assert self.operand.scales is not None, "FP8 operands carry scales"
            return w8a16_linear(x_MK, self.operand.values, self.operand.scales, self.bias, out_dtype=torch.float32)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x_MK.float(), dequantize(self.operand), bias)

    def backward(self, dy_MN: torch.Tensor) -> torch.Tensor:
        """dy W in fp32, [M, K]."""
        self._note()
        if self._channelwise:
            assert self.operand.scales is not None, "FP8 operands carry scales"
            return (dy_MN.float() * self.operand.scales.reshape(-1)) @ widen_e4m3(self.operand.values)
        return dy_MN.float() @ dequantize(self.operand)

    def apply(self, x_MK: torch.Tensor, rows: tuple[Rows, ...], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """y [M, N] in x's dtype, differentiable in x and in tensors: A and B of every element of `rows`, in order."""
        return _ReferenceProjection.apply(x_MK, self, rows, *tensors)


class _ReferenceProjection(torch.autograd.Function):
    """See `BaseProjection.apply`."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, base: BaseProjection, rows: tuple[Rows, ...], *tensors: torch.Tensor
    ) -> torch.Tensor:
        y_MN = base.forward(x_MK)
        served = all_as_served(x_MK, rows, tensors)
        for (start, stop, _), a_RK, b_NR in zip(rows, served[::2], served[1::2], strict=True):
            y_MN[start:stop] += lora_delta(x_MK[start:stop], a_RK, b_NR, out_dtype=torch.float32)
        if rows:
            ctx.save_for_backward(x_MK, *served)
        ctx.base, ctx.rows, ctx.dtype = base, rows, x_MK.dtype
        return y_MN.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy_MN = grads[0].float()
        dx_MK = ctx.base.backward(dy_MN) if ctx.needs_input_grad[0] else None
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        found: list[torch.Tensor] = []
        for index, (start, stop, scaling) in enumerate(ctx.rows):
            x_part, a_RK, b_NR = (t.float() for t in (saved[0][start:stop], *saved[1 + 2 * index : 3 + 2 * index]))
            dy_part = dy_MN[start:stop]
            dh_MR = dy_part @ b_NR
            if dx_MK is not None:
                dx_MK[start:stop] += dh_MR @ a_RK
            found += [dh_MR.t() @ x_part, (dy_part.t() @ (x_part @ a_RK.t())) * scaling]
        return None if dx_MK is None else dx_MK.to(ctx.dtype), None, None, *found


def all_as_served(x: torch.Tensor, rows: Sequence[Rows], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A and scaling * B of every segment as an engine of x's dtype stores them (gradients pass through the rounding)."""
    served: list[torch.Tensor] = []
    for (_, _, scaling), a_RK, b_NR in zip(rows, tensors[::2], tensors[1::2], strict=True):
        served += [a_RK.to(x.dtype), (b_NR * scaling).to(x.dtype)]
    return served


class LoraLinear(nn.Module):
    """Stands in for one `nn.Linear` of the model. Has no parameters of its own: base and adapters are looked up."""

    def __init__(self, name: str, base: BaseProjection, parts_of: RankGroup | None = None) -> None:
        """name: the checkpoint's module name, e.g. `model.layers.0.self_attn.q_proj`. parts_of: ranks whose products are
        parts of a sum (a row-parallel layer), None: the product is complete.
        """
        super().__init__()
        self.name = name
        self.base = base
        self.parts_of = parts_of
        self.out_features, self.in_features = base.operand.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] in the trainer's dtype. Returns [..., N] in the same dtype."""
        x_MK = x.reshape(-1, self.in_features)
        rows: list[Rows] = []
        tensors: list[torch.Tensor] = []
        for segment in self.base.context.segments:
            pair = None if segment.pairs is None else segment.pairs.get(self.name)
            if pair is not None:
                rows.append((segment.start, x_MK.shape[0] if segment.stop is None else segment.stop, pair.scaling))
                tensors += [pair.a, pair.b]
        if self.base.context.round_activations and self.base.operand.scales is not None:
            y_MN = self._rounded(x_MK, rows, tensors)
        else:
            y_MN = self.base.apply(x_MK, tuple(rows), tensors)
        if self.parts_of is not None:
            y_MN = self.parts_of.total(y_MN)
        return y_MN.reshape(*x.shape[:-1], self.out_features)

    def _rounded(self, x_MK: torch.Tensor, rows: Sequence[Rows], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The base on rounded activations; the adapters, as in such an engine, on those that are not."""
        with torch.no_grad():
            codes, scale = quantize_per_token_ref(x_MK)
            shift = (codes.float() * scale).to(x_MK.dtype) - x_MK
        y_MN = self.base.apply(x_MK + shift, (), ())
        served = all_as_served(x_MK, rows, tensors)
        for (start, stop, _), a_RK, b_NR in zip(rows, served[::2], served[1::2], strict=True):
            delta = F.linear(F.linear(x_MK[start:stop], a_RK), b_NR)
            y_MN = torch.cat([y_MN[:start], y_MN[start:stop] + delta, y_MN[stop:]])
        return y_MN

    def extra_repr(self) -> str:
        return f"{self.name}, [{self.out_features}, {self.in_features}] {self.base.operand.format.value}"
