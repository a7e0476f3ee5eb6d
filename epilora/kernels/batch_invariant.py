"""Batch-invariant mode: a row's bits do not depend on how many rows are computed with it, nor on their adapters.

Every other path picks tiles, splits of K and kernels by the number of tokens, and with them the order of its sums. Here the order is
a function of the layer's shape alone: 32 rows at a time through the decode kernels in one configuration (W8A8), or one tile shape of the
W8A16 kernel at all sizes. The vendor's GEMM takes no part: its choice of kernels is not ours.

The cost is speed: weights are read once for every 32 rows (`benchmarks.kernels`, provider `epilora_batch_invariant`). It is for
debugging and for comparing an engine with a trainer, not for prefill.

Legend: M tokens, N out features, K in features, R rank, S slices, L adapter slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..quant.operand import Operand
from .arguments import shared_limit, weight_kind
from .dispatch import Implementation
from .lora_decode import MAX_TOKENS, DecodeWorkspace, lora_decode
from .lora_expand import TokenGroups, lora_shrink_grouped, shrink_config_for
from .w8a16 import LoraTerm, w8a16_config_for, w8a16_gemm


def lora_linear(
    x: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[Operand] = (),
    lora_b: Sequence[Operand] = (),
    token_lora_indices: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """One projection with FP8 activations, with or without adapters, for any number of tokens.

    Arguments as in `lora_decode`, x [M, K] with any M. Returns out [M, N]; M = 0 launches nothing. Allocates only when `out` is None.
    Raises as `lora_decode`.
    """
    M = x.shape[0]
    y = torch.empty((M, weight.values.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
    for start in range(0, M, MAX_TOKENS):
        rows = slice(start, min(M, start + MAX_TOKENS))
        lora_decode(
            x[rows],
            weight,
            lora_a,
            lora_b,
            None if token_lora_indices is None else token_lora_indices[rows],
            workspace=workspace,
            active_lora_ids=active_lora_ids,
            bias=bias,
            out=y[rows],
            batch_invariant=True,
            implementation=implementation,
        )
    return y


def w8a16_linear(
    x: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[Operand] = (),
    lora_b: Sequence[Operand] = (),
    token_lora_indices: torch.Tensor | None = None,
    groups: TokenGroups | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """One projection with 16-bit activations, with or without adapters, for any number of tokens.

    x: [M, K] bf16 or fp16. lora_a, lora_b, groups: as in `lora_shrink_grouped` and `LoraTerm`; token_lora_indices: [M] int32.
    bias, out: as in `w8a16_gemm`. Returns out [M, N]. Raises ValueError if adapters come without groups or indices, else as those two.
    """
    K = x.shape[1]
    N, kind = weight.shape[0], weight_kind(weight)
    term = None
    if len(lora_a):
        if groups is None or token_lora_indices is None:
            raise ValueError(
                f"w8a16_linear: {len(lora_a)} slices of adapters with groups={groups is not None}, "
                f"token_lora_indices={token_lora_indices is not None}; give both"
            )
        L, R, _ = lora_a[0].values.shape
        shrink = shrink_config_for(MAX_TOKENS, len(lora_a), K, R, L)
        h = lora_shrink_grouped(x, lora_a, groups, config=shrink, implementation=implementation)
        term = LoraTerm(h, lora_b, token_lora_indices, groups)
    # K in one part: a split needs a counter a tile, and a large batch has more tiles than there are counters.
    tiles = dataclasses.replace(w8a16_config_for(MAX_TOKENS, N, K, shared_limit(x.device), kind), split_k=1)
    return w8a16_gemm(x, weight, bias=bias, lora=term, out=out, config=tiles, implementation=implementation)
