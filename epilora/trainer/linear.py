"""A linear layer on low-precision codes with a trainable LoRA delta; no dequantised weight outlives a call.

    y  = round( x W^T + (x A^T) (s B)^T ),          W = codes * scale, widened for this one product
    dx = dy W + (dy sB) A,   dA = (dy sB)^T x,   dB = s dy^T (x A^T)

The forward arithmetic is `epilora.kernels.cpu_reference`, the same functions a matched (W8A16) engine runs. Saved for
the backward pass are x, A and B; x A^T is made again (M R K flops), and the codes are widened again.

Legend: M tokens, K in features, N out features, R rank, s = the adapter's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from epilora.errors import UnsupportedKernel
from epilora.kernels.cpu_reference import lora_delta, w8a16_linear
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize


@dataclass(frozen=True)
class LoraPair:
    """One module's adapter: a [R, K] and b [N, R] fp32 leaves, scaling (not folded)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass
class AdapterContext:
    """What the projections of one model share: the adapter they apply now, and what they measured.

    active: checkpoint module name -> its pair; modules left out, and all of them under None, compute the plain base. A
    mixed batch would hold row groups here; the projections ask `pair` and know no more.
    largest_dequantised_bytes: the biggest widened weight that existed at any moment.
    """

    active: Mapping[str, LoraPair] | None = None
    largest_dequantised_bytes: int = 0

    def pair(self, name: str) -> LoraPair | None:
        """The active pair of module `name`."""
        return None if self.active is None else self.active.get(name)

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
            return (dy_MN.float() * self.operand.scales.reshape(-1)) @ self.operand.values.float()
        return dy_MN.float() @ dequantize(self.operand)


class _LoraProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        a_RK: torch.Tensor | None,
        b_NR: torch.Tensor | None,
        scaling: float,
        base: BaseProjection,
    ) -> torch.Tensor:
        y_MN = base.forward(x_MK)
        if a_RK is not None and b_NR is not None:
            a_RK, b_NR = _as_served(x_MK, a_RK, b_NR, scaling)
            y_MN += lora_delta(x_MK, a_RK, b_NR, out_dtype=torch.float32)
            ctx.save_for_backward(x_MK, a_RK, b_NR)
        ctx.base, ctx.scaling, ctx.dtype = base, scaling, x_MK.dtype
        return y_MN.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy_MN = grads[0].float()
        dx_MK = ctx.base.backward(dy_MN) if ctx.needs_input_grad[0] else None
        da_RK = db_NR = None
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        if saved:
            x_MK, a_RK, b_NR = (tensor.float() for tensor in saved)
            dh_MR = dy_MN @ b_NR
            if dx_MK is not None:
                dx_MK += dh_MR @ a_RK
            da_RK = dh_MR.t() @ x_MK
            db_NR = (dy_MN.t() @ (x_MK @ a_RK.t())) * ctx.scaling
        return None if dx_MK is None else dx_MK.to(ctx.dtype), da_RK, db_NR, None, None


def _as_served(
    x: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and scaling * B as an engine of x's dtype stores them (the rounding is passed through by the gradient)."""
    return a_RK.to(x.dtype), (b_NR * scaling).to(x.dtype)


class LoraLinear(nn.Module):
    """Stands in for one `nn.Linear` of the model. Has no parameters of its own: base and adapter are both looked up."""

    def __init__(self, name: str, base: BaseProjection) -> None:
        """name: the checkpoint's module name, e.g. `model.layers.0.self_attn.q_proj`."""
        super().__init__()
        self.name = name
        self.base = base
        self.out_features, self.in_features = base.operand.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] in the trainer's dtype. Returns [..., N] in the same dtype."""
        pair = self.base.context.pair(self.name)
        x_MK = x.reshape(-1, self.in_features)
        a, b, scaling = (None, None, 1.0) if pair is None else (pair.a, pair.b, pair.scaling)
        return _LoraProjection.apply(x_MK, a, b, scaling, self.base).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.name}, [{self.out_features}, {self.in_features}] {self.base.operand.format.value}"
