"""NVFP4 in plain torch: e2m1 codes, one e4m3 scale per 16 values along K, one fp32 scale per tensor.

    real = e2m1(code) * e4m3(block scale) * global_scale

`global_scale` multiplies here, as all our scales do. Checkpoints differ: compressed-tensors stores the reciprocal
(`weight_global_scale` = 448 * 6 / amax), ModelOpt the factor itself (`weight_scale_2`). The readers below bring both to one
Operand without touching codes or block scales.

Rounding of a value is to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties go to the code with an even last bit, as the hardware's
conversion and vLLM's reference do. `quantize_nvfp4_ref` gives vLLM's codes and block scales bit for bit.

Legend: N rows, K columns (a multiple of 16), G = K / 16 blocks a row.
Sources: NVIDIA, "Pretraining large language models with NVFP4" (arXiv 2509.25149); vLLM's and compressed-tensors' reference code
(Apache-2.0), read for their behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .formats import E4M3_MAX, FACTS, Format, ScaleAxis
from .operand import Operand

BLOCK = 16
E2M1_MAX = FACTS[Format.NVFP4].largest
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between neighbours; where the lower code is odd, the tie goes up.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIE_GOES_UP = (False, True, False, True, False, True, False)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Four-bit codes (uint8, 0 to 15, sign in bit 3) of fp32 values, saturated at +-6. Zero of either sign is code 0.

    NaN has no code: ValueError.
    """
    if torch.isnan(x).any():
        raise ValueError("encode_e2m1: x holds NaN; NVFP4 has no code for it, so the tensor cannot be stored in it")
    magnitude = x.float().abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint, up in zip(_MIDPOINTS, _TIE_GOES_UP, strict=True):
        code += (magnitude >= midpoint if up else magnitude > midpoint).to(torch.uint8)
    return torch.where((x < 0) & (code > 0), code | 8, code)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of four-bit codes (uint8, 0 to 15)."""
    table = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), device=codes.device)
    return table[codes.long()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] codes to [..., K / 2] bytes, the even column in the low half. Raises ValueError for an odd K."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack_e2m1: K={codes.shape[-1]}; two codes share a byte, so K must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] bytes to [..., K] codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def inverse_global_scale_for(amax: torch.Tensor) -> torch.Tensor:
    """fp32 [1]: 448 * 6 / amax, with which the block scales of a tensor of largest magnitude `amax` fill e4m3's range; 1.0 for an
    all-zero tensor.
    """
    amax = amax.float().reshape(1)
    return torch.where(amax > 0, E4M3_MAX * E2M1_MAX / amax.clamp_min(torch.finfo(torch.float32).tiny), 1.0)


def quantize_nvfp4_ref(x: torch.Tensor, inverse_global_scale: torch.Tensor | None = None) -> Operand:
    """NVFP4 operand of [N, K] values (any float dtype, K a multiple of 16).

    inverse_global_scale: fp32 [1], what vLLM calls an input's global scale (the reciprocal, because the last bit of a block scale
    depends on it); None: from x's largest magnitude. Block scale: e4m3(inverse_global_scale * amax(block) / 6). A block of zeros
    gets scale 0 and codes 0. Raises ValueError for another K, or NaN or infinity in x.
    """
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"quantize_nvfp4_ref: x has shape {tuple(x.shape)}; needed: [N, K] with K a multiple of {BLOCK}"
        )
    if not torch.isfinite(x).all():
        raise ValueError("quantize_nvfp4_ref: x holds NaN or infinity; NVFP4 stores finite values only")
    magnitude = x.float().abs()
    if inverse_global_scale is None:
        inverse_global_scale = inverse_global_scale_for(magnitude.amax() if x.numel() else magnitude.new_zeros(()))
    amax = magnitude.view(x.shape[0], -1, BLOCK).amax(dim=-1)
    # The product with 1 / 6, not a division by 6: vLLM's reference and kernel do so.
    scale = (inverse_global_scale * (amax * (1.0 / E2M1_MAX))).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return with_block_scales(x, scale, 1.0 / inverse_global_scale)


def with_block_scales(x: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    """NVFP4 operand of [N, K] values under given block scales (e4m3 [N, K / 16]) and global scale (fp32 [1], multiplies)."""
    inverse_step = reciprocal(scales.float() * global_scale)
    blocks = x.float().view(x.shape[0], -1, BLOCK) * inverse_step[..., None]
    codes = encode_e2m1(blocks.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)
    return Operand(pack_e2m1(codes), Format.NVFP4, ScaleAxis.BLOCK, scales, block=(1, BLOCK), global_scale=global_scale)


def quantize_nvfp4_stack_ref(stack: torch.Tensor) -> Operand:
    """NVFP4 operand of an adapter stack [L, R, K] (or [L, N, R]), every slot under a global scale of its own."""
    return stack_operands([quantize_nvfp4_ref(matrix) for matrix in stack])


def stack_operands(matrices: Sequence[Operand]) -> Operand:
    """One operand [L, N, K] of L NVFP4 matrices of equal shape."""
    scales = [m.scales for m in matrices if m.scales is not None]
    whole = [m.global_scale for m in matrices if m.global_scale is not None]
    values = torch.stack([m.values for m in matrices])
    return Operand(
        values, Format.NVFP4, ScaleAxis.BLOCK, torch.stack(scales), block=(1, BLOCK), global_scale=torch.cat(whole)
    )


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 where x is 0."""
    return torch.where(x == 0, torch.zeros_like(x), 1.0 / x)


def from_compressed_tensors(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    """The operand of a compressed-tensors `nvfp4-pack-quantized` layer.

    packed: `weight_packed`, uint8 [N, K / 2]. scale: `weight_scale`, e4m3 [N, K / 16]. global_scale: `weight_global_scale`, fp32 [1],
    the reciprocal of ours. Raises TypeError or ValueError naming what does not fit.
    """
    return _checked("from_compressed_tensors", packed, scale, 1.0 / global_scale.float().reshape(1))


def from_modelopt(weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> Operand:
    """The operand of a ModelOpt NVFP4 layer: `weight` uint8 [N, K / 2], `weight_scale` e4m3 [N, K / 16], `weight_scale_2` fp32, which
    multiplies as ours does. Raises TypeError or ValueError naming what does not fit.
    """
    return _checked("from_modelopt", weight, weight_scale, weight_scale_2.float().reshape(1))


def _checked(name: str, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise TypeError(f"{name}: codes are {packed.dtype} {tuple(packed.shape)}; needed: uint8 [N, K / 2]")
    N, K = packed.shape[0], packed.shape[1] * 2
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != (N, K // BLOCK) or K % BLOCK:
        raise ValueError(
            f"{name}: block scales are {scale.dtype} {tuple(scale.shape)}; needed: float8_e4m3fn {(N, K // BLOCK)} in rows of "
            "blocks (a swizzled copy must be read before the engine swizzles it)"
        )
    if not torch.isfinite(global_scale).all() or (global_scale <= 0).any():
        raise ValueError(f"{name}: global scale {global_scale.tolist()}; needed: one positive finite value")
    return Operand(packed, Format.NVFP4, ScaleAxis.BLOCK, scale, block=(1, BLOCK), global_scale=global_scale)
