"""A module's adapter stored in FP8 or NVFP4, with the product B A kept as close as the format allows.

Only the product counts, and B A = (B T^-1)(T A) for every invertible T of rank width: that freedom is used first.

  balance  A and B from the singular value decomposition of B A, sqrt of the singular values in each; then rotated along the
           rank by an orthonormal cosine transform. All rows of A and columns of B get like magnitudes, and outliers of single
           directions are spread, so that 16 neighbours along the rank can share one scale.
  search   per block (NVFP4) or row (FP8) the scale with the least squared error among a few near amax / largest code
  refit    A is rounded, then B solved again by least squares against the rounded A, rounded, and once more the other way about;
           the best pair seen is kept.

`method="plain"` leaves all three out (round to nearest with scales from the largest magnitude), for comparison.

Measured by `benchmarks.formats`. Legend: N out features, K in features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from epilora.quant.formats import E4M3_MAX, FACTS, Format, ScaleAxis
from epilora.quant.nvfp4 import BLOCK, E2M1_MAX, inverse_global_scale_for, quantize_nvfp4_ref, with_block_scales
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, encode_e4m3, quantize_rows_ref

from .fold import PREFIX, FoldedModule

STORED_FORMATS = (Format.FP8_E4M3, Format.NVFP4)
METHODS = ("aware", "plain")
_REFITS = 3
# Multiples of the scale at which the largest magnitude meets the largest code; 1.5 puts it on NVFP4's code 4 instead of 6.
_NVFP4_CANDIDATES = (1.0, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5)
_FP8_CANDIDATES = tuple(
    2.0 ** (-step / 8) for step in range(8)
)  # an octave: the same codes come back one exponent lower


@dataclass(frozen=True)
class ConvertedModule:
    """One module's adapter in a storage format. a: operand [R', K]; b: operand [N, R'], the scaling folded in; R' is the rank,
    padded with zeros to a multiple of 16 for NVFP4. relative_error: |B A - stored product| / |B A|, Frobenius.
    """

    a: Operand
    b: Operand
    scaling: float
    relative_error: float

    def widened(self) -> FoldedModule:
        """The stored numbers as fp32 tensors: what any kernel computes with."""
        return FoldedModule(dequantize(self.a), dequantize(self.b), self.scaling)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = [t for o in (self.a, self.b) for t in (o.values, o.scales, o.global_scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


def convert(folded: Mapping[str, FoldedModule], fmt: Format, *, method: str = "aware") -> dict[str, ConvertedModule]:
    """Every module of an adapter in `fmt` (fp8_e4m3 or nvfp4). Raises ValueError for another format or method, or where K is no
    multiple of 16 (nvfp4), naming the module.
    """
    out = {}
    for name, module in folded.items():
        try:
            out[name] = convert_module(module, fmt, method=method)
        except ValueError as err:
            raise ValueError(f"module {name!r}: {err}") from err
    return out


def convert_module(module: FoldedModule, fmt: Format, *, method: str = "aware") -> ConvertedModule:
    """One module in `fmt`; see the module's docstring. An adapter whose product is zero comes back with error 0."""
    if fmt not in STORED_FORMATS:
        raise ValueError(f"convert: format={fmt.value}; allowed: {', '.join(f.value for f in STORED_FORMATS)}")
    if method not in METHODS:
        raise ValueError(f"convert: method={method!r}; allowed: {', '.join(METHODS)}")
    if fmt is Format.NVFP4 and module.a_RK.shape[1] % BLOCK:
        raise ValueError(f"convert: K={module.a_RK.shape[1]}; nvfp4 needs a multiple of {BLOCK}; use fp8_e4m3")
    a_RK, b_NR = _padded(module, fmt)
    exact = _Product(a_RK.double(), b_NR.double())
    if method == "plain" or exact.norm == 0.0:
        quantise = _plain_nvfp4 if fmt is Format.NVFP4 else quantize_rows_ref
        a, b = quantise(a_RK), quantise(b_NR)
        return ConvertedModule(a, b, module.scaling, exact.relative_error(dequantize(a), dequantize(b)))
    quantise = _searched_nvfp4 if fmt is Format.NVFP4 else _searched_fp8
    a_RK, b_NR = _balanced(exact)
    best = None
    a = quantise(a_RK)
    for _ in range(_REFITS):
        b = quantise(exact.best_b(dequantize(a)))
        best = _better(best, a, b, exact)
        a = quantise(exact.best_a(dequantize(b)))
        best = _better(best, a, b, exact)
    assert best is not None, "_REFITS is at least one"
    error, a, b = best
    return ConvertedModule(a, b, module.scaling, error)


class _Product:
    """B A in factors, fp64, and what can be said of it with matrices of rank width only."""

    def __init__(self, a_RK: torch.Tensor, b_NR: torch.Tensor) -> None:
        self.a_RK, self.b_NR = a_RK, b_NR
        self.square = float(((b_NR.T @ b_NR) * (a_RK @ a_RK.T)).sum())
        self.norm = math.sqrt(max(0.0, self.square))

    def relative_error(self, a_RK: torch.Tensor, b_NR: torch.Tensor) -> float:
        if self.norm == 0.0:
            return 0.0
        a, b = a_RK.double(), b_NR.double()
        cross = float(((self.b_NR.T @ b) * (self.a_RK @ a.T)).sum())
        other = float(((b.T @ b) * (a @ a.T)).sum())
        return math.sqrt(max(0.0, self.square - 2.0 * cross + other)) / self.norm

    def best_b(self, a_RK: torch.Tensor) -> torch.Tensor:
        """The B that brings B a_RK closest to the product."""
        a = a_RK.double()
        return (self.b_NR @ ((self.a_RK @ a.T) @ torch.linalg.pinv(a @ a.T, hermitian=True))).float()

    def best_a(self, b_NR: torch.Tensor) -> torch.Tensor:
        """The A that brings b_NR A closest to the product."""
        b = b_NR.double()
        return ((torch.linalg.pinv(b.T @ b, hermitian=True) @ (b.T @ self.b_NR)) @ self.a_RK).float()


def _better(
    best: tuple[float, Operand, Operand] | None, a: Operand, b: Operand, exact: _Product
) -> tuple[float, Operand, Operand]:
    error = exact.relative_error(dequantize(a), dequantize(b))
    return (error, a, b) if best is None or error < best[0] else best


def _padded(module: FoldedModule, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    rank = module.rank if fmt is not Format.NVFP4 else -(-module.rank // BLOCK) * BLOCK
    return module.padded(rank, torch.float32)


def _balanced(product: _Product) -> tuple[torch.Tensor, torch.Tensor]:
    q_a, r_a = torch.linalg.qr(product.a_RK.T)
    q_b, r_b = torch.linalg.qr(product.b_NR)
    left, singular, right = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    rank = product.a_RK.shape[0]
    half = singular.clamp_min(0).sqrt()
    turn = _cosine_transform(rank)[:, : half.numel()]  # fewer directions than rank where N or K is smaller
    a_RK = turn @ ((half[:, None] * right) @ q_a.T)
    b_NR = (q_b @ (left * half)) @ turn.T
    return a_RK.float(), b_NR.float()


def _cosine_transform(order: int) -> torch.Tensor:
    """Orthonormal DCT-II matrix [order, order], fp64."""
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(math.pi / order * (index[:, None] + 0.5) * index[None, :]) * math.sqrt(2.0 / order)
    matrix[:, 0] /= math.sqrt(2.0)
    return matrix


def _plain_nvfp4(x: torch.Tensor) -> Operand:
    return quantize_nvfp4_ref(x)


def _searched(
    amax: torch.Tensor, candidates: tuple[float, ...], error_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Per group the candidate multiple of amax with the least error. error_of: multiples (amax's shape) -> errors (likewise)."""
    best = torch.full_like(amax, candidates[0])
    least = error_of(best)
    for candidate in candidates[1:]:
        multiple = torch.full_like(amax, candidate)
        error = error_of(multiple)
        best, least = torch.where(error < least, multiple, best), torch.minimum(error, least)
    return best


def _searched_nvfp4(x: torch.Tensor) -> Operand:
    inverse = inverse_global_scale_for(x.abs().amax())
    amax = x.abs().view(x.shape[0], -1, BLOCK).amax(dim=-1)

    def rounded(multiple: torch.Tensor) -> Operand:
        scale = (inverse * (amax * multiple / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        return with_block_scales(x, scale, 1.0 / inverse)

    def error_of(multiple: torch.Tensor) -> torch.Tensor:
        return (dequantize(rounded(multiple)) - x).view(x.shape[0], -1, BLOCK).square().sum(dim=-1)

    return rounded(_searched(amax, _NVFP4_CANDIDATES, error_of))


def _searched_fp8(x: torch.Tensor) -> Operand:
    smallest = torch.finfo(torch.float32).tiny
    amax = x.abs().amax(dim=-1).clamp_min(smallest)

    def rounded(multiple: torch.Tensor) -> Operand:
        # Divided by the multiple: the row's largest magnitude may only move down from the largest code, never past it.
        scale = (amax / (E4M3_MAX * multiple)).clamp_min(smallest)
        return Operand(encode_e4m3(x, scale[:, None]), Format.FP8_E4M3, ScaleAxis.CHANNEL, scale)

    def error_of(multiple: torch.Tensor) -> torch.Tensor:
        return (dequantize(rounded(multiple)) - x).square().sum(dim=-1)

    return rounded(_searched(amax, _FP8_CANDIDATES, error_of))


def bytes_per_adapter(shapes: Mapping[str, tuple[int, int]], rank: int, fmt: Format) -> int:
    """Bytes a slot of `rank` takes for modules {name: (N, K)} in `fmt`: codes, scales and global scales of A and B."""
    facts = FACTS[fmt]
    total = 0
    for N, K in shapes.values():
        for rows, columns in ((rank, K), (N, rank)):
            total += math.ceil(rows * columns / facts.values_per_byte)
            if facts.block_k is not None:
                total += rows * math.ceil(columns / facts.block_k) + 4
            elif facts.scale_torch_dtype is not None:
                total += 4 * rows
    return total


def stored_tensors(stored: Mapping[str, ConvertedModule]) -> tuple[int, dict[str, torch.Tensor]]:
    """(rank, tensors under PEFT's keys, fp32) of a converted adapter, its scaling already in B: a spec of that rank and equal alpha
    folds them to exactly the stored numbers. Modules whose padded ranks differ are padded to the largest.
    """
    widened = {name: module.widened() for name, module in stored.items()}
    rank = max(module.rank for module in widened.values())
    tensors = {}
    for name, module in widened.items():
        a_RK, b_NR = module.padded(rank, torch.float32)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a_RK
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b_NR
    return rank, tensors
