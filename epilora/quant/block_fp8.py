"""FP8 with one fp32 scale per 128 x 128 block of a weight and per 1 x 128 group of an activation (DeepSeek's and Qwen's checkpoints).

    scale = max(amax / 448, smallest),   code = e4m3(clamp(x / scale, -448, 448))

Both divisions are true ones. vLLM has two smallest scales for groups: its CUDA op `per_token_group_fp8_quant` takes amax as at least
1e-10 (`OP_SMALLEST_SCALE`), `QuantFP8` in plain torch 1 / (448 * 512) (`NATIVE_SMALLEST_SCALE`); only groups whose magnitudes stay
below 1 / 512 tell them apart. `quantize_groups_ref` gives either's codes and scales bit for bit. The op's clamp turns a quotient that is
NaN into -448. A matrix whose sides are no multiples of 128 has narrower blocks at its end.

Legend: M tokens, N out features, K in features. Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import torch

from .formats import E4M3_MAX, E4M3_MIN_SCALE, Format, ScaleAxis
from .operand import Operand
from .reference import encode_e4m3, scale_of_amax

BLOCK = 128
OP_SMALLEST_SCALE = float(torch.tensor(1e-10) / torch.tensor(E4M3_MAX))
NATIVE_SMALLEST_SCALE = E4M3_MIN_SCALE


def quantize_groups_ref(
    x: torch.Tensor, group: int = BLOCK, *, smallest_scale: float = OP_SMALLEST_SCALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations by groups of K: (codes [M, K] float8_e4m3fn, scales [M, ceil(K / group)] fp32) of x [M, K], any float dtype."""
    M, K = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -K % group)).view(M, -1, group)
    magnitude = padded.abs()
    amax = torch.where(torch.isnan(magnitude), torch.zeros_like(magnitude), magnitude).amax(dim=-1)
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(smallest_scale)
    limit = torch.tensor(E4M3_MAX, device=x.device)
    codes = torch.fmin(torch.fmax(padded / scales[..., None], -limit), limit).to(torch.float8_e4m3fn)
    return codes.view(M, -1)[:, :K].contiguous(), scales


def quantize_blocks_ref(weight: torch.Tensor, block: int = BLOCK) -> Operand:
    """Weight operand [N, K] with one scale per block x block tile, scales [ceil(N / block), ceil(K / block)]."""
    N, K = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -K % block, 0, -N % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scales = scale_of_amax(tiles.abs().amax(dim=(1, 3)))
    codes = encode_e4m3(tiles, scales[:, None, :, None]).view(padded.shape)[:N, :K].contiguous()
    return Operand(codes, Format.FP8_E4M3, ScaleAxis.BLOCK, scales, block=(block, block))


def from_checkpoint(
    weight: torch.Tensor, weight_scale_inv: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Operand:
    """The operand of a block-scaled checkpoint layer: `weight` float8_e4m3fn [N, K], `weight_scale_inv` fp32 [N / bn, K / bk] (which
    multiplies, whatever its name says). Raises TypeError or ValueError naming what does not fit.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise TypeError(
            f"from_checkpoint: weight is {weight.dtype} {tuple(weight.shape)}; needed: float8_e4m3fn [N, K]"
        )
    needed = (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
    if tuple(weight_scale_inv.shape) != needed:
        raise ValueError(
            f"from_checkpoint: weight_scale_inv is {tuple(weight_scale_inv.shape)} for weight {tuple(weight.shape)} in blocks of "
            f"{block}; needed: {needed}"
        )
    return Operand(weight, Format.FP8_E4M3, ScaleAxis.BLOCK, weight_scale_inv.float(), block=block)


def block_gemm_ref(codes: torch.Tensor, scales: torch.Tensor, weight: Operand) -> torch.Tensor:
    """y [M, N] fp32 of group-quantised activations and a block-scaled weight: per 128 of K an exact product of codes, scaled by both
    scales, summed in the order of K.
    """
    assert weight.block is not None, "a block-scaled operand has a block"
    assert weight.scales is not None, "a block-scaled operand has scales"
    rows, columns = weight.block
    N, K = weight.values.shape
    y = torch.zeros(codes.shape[0], N, device=codes.device)
    of_row = weight.scales.repeat_interleave(rows, 0)[:N]
    for g, start in enumerate(range(0, K, columns)):
        part = codes[:, start : start + columns].float() @ weight.values[:, start : start + columns].float().T
        y += part * scales[:, g : g + 1] * of_row[:, g]
    return y
