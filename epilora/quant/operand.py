"""The typed operand: stored values, their scales, and what they mean, kept together.

Kernels take operands, never loose tensors, so a new format changes no signature.

Legend: N out features (or M tokens), K in features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import FACTS, Format, ScaleAxis


@dataclass(frozen=True)
class Operand:
    """A [N, K] matrix in a storage format.

    values: [N, K] in the format's torch dtype (NVFP4: uint8 [N, K/2], low nibble first); rows are contiguous.
    scales: None (16/32-bit); fp32 [1] (TENSOR), fp32 [N] or [N, 1] (CHANNEL), [N/bn, K/bk] (BLOCK).
    axis, format: how to read them. block: (rows, columns) one scale covers when axis is BLOCK.
    global_scale: fp32 [1], NVFP4 only.
    """

    values: torch.Tensor
    format: Format
    axis: ScaleAxis = ScaleAxis.NONE
    scales: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    global_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        facts = FACTS[self.format]
        want = getattr(torch, facts.torch_dtype)
        if self.values.dtype != want:
            raise TypeError(f"Operand: values are {self.values.dtype}, format {self.format.value} stores {want}")
        if (self.axis is ScaleAxis.NONE) != (self.scales is None):
            raise ValueError(
                f"Operand: axis={self.axis.value} with scales={'none' if self.scales is None else 'given'}"
            )
        if self.scales is None and facts.scale_torch_dtype is not None:
            raise ValueError(f"Operand: format {self.format.value} needs scales; give axis and scales")
        if self.scales is None or self.values.dim() != 2:
            return
        n = self.values.shape[0]
        if self.axis is ScaleAxis.TENSOR and self.scales.numel() != 1:
            raise ValueError(f"Operand: axis=tensor needs one scale, got shape {tuple(self.scales.shape)}")
        if self.axis is ScaleAxis.CHANNEL and self.scales.numel() != n:
            raise ValueError(
                f"Operand: axis=channel needs {n} scales for values {tuple(self.values.shape)}, got {tuple(self.scales.shape)}"
            )
        if self.axis is ScaleAxis.BLOCK and self.block is None:
            raise ValueError("Operand: axis=block needs block=(rows, columns)")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) in real values, whatever the packing."""
        per_byte = FACTS[self.format].values_per_byte
        packed = 2 if per_byte == 2.0 else 1
        return self.values.shape[0], self.values.shape[1] * packed

    @property
    def device(self) -> torch.device:
        return self.values.device
