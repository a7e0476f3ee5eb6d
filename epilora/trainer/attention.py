"""Causal attention over packed sequences, plugged into transformers' models under one name.

A packed batch is one row [1, T] of whole sequences one after the other; each token attends to the earlier tokens of its own
sequence. On a GPU in 16 bits torch's variable-length FlashAttention does all sequences in one launch, without a mask and
without padding; elsewhere each sequence goes through scaled_dot_product_attention by itself. Right-padded batches [B, T]
need nothing of this: causal attention never sees the padding.

Legend: T tokens, H query heads, H_kv key and value heads, D head width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAME = "epilora_packed"


@dataclass(frozen=True)
class Packing:
    """Where a packed row's sequences lie.

    lengths: tokens of each. bounds, bounds_int64: their cumulative sums from 0, [S + 1] int32 and int64, on the model's
    device (the kernels of different packages want one or the other).
    """

    lengths: tuple[int, ...]
    bounds: torch.Tensor
    bounds_int64: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Packing:
        total = torch.tensor((0, *lengths), dtype=torch.int64).cumsum(0).to(device)
        return cls(lengths, total.int(), total)

    def positions(self) -> torch.Tensor:
        """[1, T] int64: each token's place in its own sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.bounds.device)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    query [B, H, T, D], key and value [B, H_kv, T, D]. packing None: every row is one sequence, right-padded or whole.
    Returns ([B, T, H, D], None). Raises ValueError for a mask: none is made for this implementation.
    """
    if attention_mask is not None:
        raise ValueError(f"attention of {type(module).__name__}: got a mask; packed batches carry none")
    if packing is None or len(packing.lengths) == 1:
        out = _causal(query, key, value, scaling)
        return out.transpose(1, 2), None
    if query.is_cuda and query.dtype != torch.float32:
        return _flash(query, key, value, scaling, packing), None
    parts, start = [], 0
    for length in packing.lengths:
        span = slice(start, start + length)
        parts.append(_causal(query[:, :, span], key[:, :, span], value[:, :, span], scaling))
        start += length
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, packing: Packing
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(packing.lengths)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, H, D]
    grouped: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such switch and groups by itself
        grouped["enable_gqa"] = q.shape[1] != k.shape[1]
    bounds = packing.bounds
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)
    assert isinstance(out, torch.Tensor), "no auxiliary output was asked for"
    return out[None]


def register() -> str:
    """Make `attention` known to transformers; its name there. Repeated calls do nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    return NAME
