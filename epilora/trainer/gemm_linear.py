"""The LoRA layer of `linear.py` by the training GEMMs: 16 bits in and out, fp32 accumulation, codes read in place.

    y  = x W^T + h (sB)^T,   h  = x A^T          dx = dy W + dh A,   dh = dy sB
    dA = dh^T x,             dB = s dy^T h

Saved for the backward pass: x, A, sB and h. A base stored in 16 bits is multiplied by the vendor's GEMMs in the same
places, so that the two kinds of trainer differ in nothing else.

Legend: M tokens, K in features, N out features, R rank, s = the adapter's scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epilora.kernels.dispatch import Implementation
from epilora.kernels.training import MODES, PANEL_BYTES, lora_grads, train_dx, train_forward
from epilora.quant.formats import Format

from .linear import BaseProjection, Rows, all_as_served

Matrices = Sequence[torch.Tensor]


@dataclass(frozen=True)
class GemmProjection(BaseProjection):
    """mode: "panel" (fast) or "registers" (the matched engine's arithmetic), see `epilora.kernels.training`.

    implementation: of those kernels; None is the device's.
    """

    mode: str = "panel"
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"trainer.gemm_mode={self.mode!r}; allowed: {', '.join(MODES)}")

    @property
    def _sixteen_bit(self) -> bool:
        return self.operand.format in (Format.BF16, Format.FP16)

    def _note_panel(self) -> None:
        n, k = self.operand.shape
        self.context.note_dequantised(min(PANEL_BYTES, 2 * n * k) if self.mode == "panel" else 0)

    def product(self, x_MK: torch.Tensor, a: Matrices = (), b: Matrices = ()) -> tuple[torch.Tensor, Any]:
        """(x W^T + h B^T + bias, h = x A^T or None) in x's dtype. a, b: one adapter for all rows, or none."""
        if self._sixteen_bit:
            h_MR = x_MK @ a[0].t() if a else None
            y_MN = x_MK @ self.operand.values.t()
            if h_MR is not None:
                y_MN.addmm_(h_MR, b[0].t())
        else:
            self._note_panel()
            y_MN, h_MR = train_forward(x_MK, self.operand, a, b, mode=self.mode, implementation=self.implementation)
        return (y_MN if self.bias is None else y_MN.add_(self.bias)), h_MR

    def input_gradient(self, dy_MN: torch.Tensor, a: Matrices = (), b: Matrices = ()) -> tuple[torch.Tensor, Any]:
        """(dy W + dh A, dh = dy B or None) in dy's dtype. a, b as in `product`."""
        if self._sixteen_bit:
            dx_MK, dh_MR = dy_MN @ self.operand.values, dy_MN @ b[0] if b else None
            return (dx_MK if dh_MR is None else dx_MK.addmm_(dh_MR, a[0])), dh_MR
        self._note_panel()
        return train_dx(dy_MN, self.operand, a, b, mode=self.mode, implementation=self.implementation)

    def apply(self, x_MK: torch.Tensor, rows: tuple[Rows, ...], tensors: Matrices) -> torch.Tensor:
        """As `BaseProjection.apply`; x in a 16-bit dtype (the interpreter and the reference take fp32 as well)."""
        return _Gemm.apply(x_MK, self, rows, *tensors)


class _Gemm(torch.autograd.Function):
    """See `GemmProjection.apply`."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, base: GemmProjection, rows: tuple[Rows, ...], *tensors: torch.Tensor
    ) -> torch.Tensor:
        served = all_as_served(x_MK, rows, tensors)
        ctx.whole = len(rows) == 1 and rows[0][:2] == (0, x_MK.shape[0])
        if ctx.whole:
            y_MN, h_MR = base.product(x_MK, served[:1], served[1:])
            hs = [] if h_MR is None else [h_MR]
        else:
            y_MN, _ = base.product(x_MK)
            hs = [x_MK[start:stop] @ a.t() for (start, stop, _), a in zip(rows, served[::2], strict=True)]
            for (start, stop, _), h, b_NR in zip(rows, hs, served[1::2], strict=True):
                y_MN[start:stop].addmm_(h, b_NR.t())
        if rows:
            ctx.save_for_backward(x_MK, *served, *hs)
        ctx.base, ctx.rows = base, rows
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy_MN = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        if not ctx.rows:
            return ctx.base.input_gradient(dy_MN)[0] if ctx.needs_input_grad[0] else None, None, None
        x_MK, *rest = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        served, hs = rest[: 2 * len(ctx.rows)], rest[2 * len(ctx.rows) :]
        dx_MK: torch.Tensor | None = None
        if ctx.whole and ctx.needs_input_grad[0]:
            dx_MK, dh_MR = ctx.base.input_gradient(dy_MN, served[:1], served[1:])
            dhs = [dh_MR]
        else:
            dhs = [dy_MN[start:stop] @ b for (start, stop, _), b in zip(ctx.rows, served[1::2], strict=True)]
            if ctx.needs_input_grad[0]:
                dx_MK, _ = ctx.base.input_gradient(dy_MN)
                for (start, stop, _), dh, a_RK in zip(ctx.rows, dhs, served[::2], strict=True):
                    dx_MK[start:stop].addmm_(dh, a_RK)
        found: list[torch.Tensor] = []
        for (start, stop, scaling), h, dh in zip(ctx.rows, hs, dhs, strict=True):
            da, db = lora_grads(x_MK[start:stop], dy_MN[start:stop], h, dh, [dy_MN.shape[1]])
            found += [da[0].float(), db[0].float().mul_(scaling)]
        return dx_MK, None, None, *found
