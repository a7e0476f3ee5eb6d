"""The typed operand: stored values, their scales, and what they mean, kept together.

Kernels take operands, never loose tensors, so a new format changes no signature.

Legend: N out features (or M tokens), K in features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .formats import FACTS, Format, ScaleAxis


@dataclass(frozen=True)
class Operand:
    """A [N, K] matrix in a storage format, or a stack of L such matrices (adapter slots).

    values: [N, K] in the format's torch dtype (NVFP4: uint8 [N, K/2], low nibble first); rows are contiguous. Stacks: [L, N, K].
    scales: None (16/32-bit); fp32 [1] (TENSOR), fp32 [N] or [N, 1] (CHANNEL), [ceil(N/bn), ceil(K/bk)] (BLOCK), with L in front
    in a stack. axis, format: how to read them. block: (rows, columns) one scale covers when axis is BLOCK.
    global_scale: fp32, one value a matrix ([1], stacks [L]), NVFP4 only.
    Raises TypeError or ValueError where values, scales and axis do not fit each other.
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
        if self.format is Format.NVFP4:
            self._check_nvfp4()
        elif self.global_scale is not None:
            raise ValueError(f"Operand: format {self.format.value} with a global scale; only nvfp4 has one")
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
        if self.axis is ScaleAxis.BLOCK and self.block is not None:
            needed = (-(-n // self.block[0]), -(-self.columns // self.block[1]))
            if tuple(self.scales.shape) != needed:
                raise ValueError(
                    f"Operand: scales are {tuple(self.scales.shape)} for {self.shape} in blocks of {self.block}; needed: {needed}"
                )

    def _check_nvfp4(self) -> None:
        facts = FACTS[Format.NVFP4]
        if self.axis is not ScaleAxis.BLOCK or self.block != (1, facts.block_k):
            raise ValueError(
                f"Operand: nvfp4 with axis={self.axis.value}, block={self.block}; needed: axis block, block (1, {facts.block_k})"
            )
        assert self.scales is not None, "checked: an axis comes with scales"
        needed = (*self.values.shape[:-1], self.columns // 16)
        if self.columns % 16 or self.scales.dtype != torch.float8_e4m3fn or tuple(self.scales.shape) != needed:
            raise ValueError(
                f"Operand: nvfp4 scales are {self.scales.dtype} {tuple(self.scales.shape)} for K={self.columns}; "
                f"needed: float8_e4m3fn {needed}, K a multiple of 16, rows of blocks (not swizzled)"
            )
        matrices = math.prod(self.values.shape[:-2])
        found = self.global_scale
        if found is None or found.dtype != torch.float32 or found.numel() != matrices:
            said = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(f"Operand: nvfp4 global scale is {said}; needed: float32, {matrices} value(s)")

    @property
    def columns(self) -> int:
        """K in real values, whatever the packing."""
        return self.values.shape[-1] * (2 if FACTS[self.format].values_per_byte == 2.0 else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) in real values, whatever the packing."""
        return self.values.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.values.device
