"""One decoder layer's projections with random weights and adapters: what every kernel benchmark runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import CHAIN_LAYERS
from benchmarks.shapes import LAYER, Projection
from epilora.kernels.lora_decode import DecodeWorkspace
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand


@dataclass
class ProjectionData:
    """Tensors of one projection. x is this projection's own input, y its output buffer."""

    shape: Projection
    x: torch.Tensor  # [M, K] bf16
    weight: Operand  # FP8 [N, K], one scale per channel
    lora_a: list[Operand]  # [slots, R, K] bf16, one per slice
    lora_b: list[Operand]  # [slots, N_s, R] bf16
    y: torch.Tensor  # [M, N] bf16


def projection_data(shape: Projection, M: int, rank: int, slots: int, device: str = "cuda") -> ProjectionData:
    """Random tensors; FP8 codes spread over the whole range as quantised weights are."""
    N, K = shape.N, shape.K
    codes = (torch.randn(N, K, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(N, device=device) * 1e-4 + 1.5e-4

    def stack(*size: int) -> Operand:
        return Operand((torch.randn(*size, device=device) * 0.02).to(torch.bfloat16), Format.BF16)

    return ProjectionData(
        shape,
        torch.randn(M, K, device=device).to(torch.bfloat16),
        Operand(codes, Format.FP8_E4M3, ScaleAxis.CHANNEL, scales),
        [stack(slots, rank, K) for _ in shape.slices],
        [stack(slots, n, rank) for n in shape.slices],
        torch.empty(M, N, device=device, dtype=torch.bfloat16),
    )


def with_tokens(data: ProjectionData, M: int) -> ProjectionData:
    """The same weights and adapters with M other tokens."""
    x = torch.randn(M, data.shape.K, device=data.x.device).to(torch.bfloat16)
    y = torch.empty(M, data.shape.N, device=data.x.device, dtype=torch.bfloat16)
    return ProjectionData(data.shape, x, data.weight, data.lora_a, data.lora_b, y)


def layer_chain(
    M: int, rank: int, slots: int, layer: Sequence[Projection] = LAYER, num_layers: int = CHAIN_LAYERS
) -> list[list[ProjectionData]]:
    """`num_layers` layers of projections, every one with weights and adapters of its own."""
    return [[projection_data(p, M, rank, slots) for p in layer] for _ in range(num_layers)]


def token_slots(M: int, num_adapters: int, slots: int, device: str = "cuda") -> torch.Tensor:
    """[M] int32: `num_adapters` distinct slots spread over `slots`, tokens dealt to them in turn. 0 adapters: all -1."""
    if num_adapters == 0:
        return torch.full((M,), -1, dtype=torch.int32, device=device)
    if num_adapters > min(M, slots):
        raise ValueError(f"token_slots: num_adapters={num_adapters}; at most min(M={M}, slots={slots})")
    step = slots // num_adapters
    return ((torch.arange(M) % num_adapters) * step).to(torch.int32).to(device)


def decode_workspace(rank: int, layer: Sequence[Projection] = LAYER, device: str = "cuda") -> DecodeWorkspace:
    """A workspace that fits every projection of `layer` at up to 32 tokens."""
    most = max(len(p.slices) for p in layer)
    return DecodeWorkspace(device, max_k=max(p.K for p in layer), max_h=DecodeWorkspace.h_values(most, rank))
