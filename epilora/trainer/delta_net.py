"""The gated delta net layers of Qwen3.5 on packed sequences, through flash-linear-attention where it is installed.

    q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_b x),   g = -exp(A_log) softplus(W_a x + dt_bias)
    y = W_out (rmsnorm(delta_rule(q, k, v, g, beta)) * silu(W_z x))

Convolution and recurrent state start anew with each sequence. Without that package (it needs a GPU), and in fp32, each
sequence goes through transformers' own layer by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Packing


class PackedDeltaNet(nn.Module):
    """Stands in for a `Qwen3_5GatedDeltaNet` whose linears and parameters are in place already."""

    def __init__(self, layer: Any, *, fused: bool) -> None:
        """layer: transformers' layer. fused: use flash-linear-attention. Raises ImportError if it is not installed."""
        super().__init__()
        self.layer = layer
        self.fused = fused
        if fused:
            from fla.modules.causal_conv1d import causal_conv1d
            from fla.modules.norm.fused_norm_gate import rms_norm_gated
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            self._conv, self._norm, self._rule = causal_conv1d, rms_norm_gated, chunk_gated_delta_rule

    def forward(self, hidden_states: torch.Tensor, packing: Packing | None = None, **_: Any) -> torch.Tensor:
        """hidden_states: [1, T, K] with `packing`, or [B, T, K] right-padded without. Returns the same shape."""
        if self.fused:
            return self._fused(hidden_states, packing)
        if packing is None:
            return self.layer(hidden_states=hidden_states)
        parts = torch.split(hidden_states, list(packing.lengths), dim=1)
        return torch.cat([self.layer(hidden_states=part) for part in parts], dim=1)

    def _fused(self, x: torch.Tensor, packing: Packing | None) -> torch.Tensor:
        layer, (batch, length, _) = self.layer, x.shape
        bounds = None if packing is None else packing.bounds_int64
        mixed, _ = self._conv(
            layer.in_proj_qkv(x),
            weight=layer.conv1d.weight.squeeze(1),
            bias=layer.conv1d.bias,
            activation=layer.activation,
            cu_seqlens=bounds,
        )
        q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        q, k = (t.reshape(batch, length, -1, layer.head_k_dim) for t in (q, k))
        v = v.reshape(batch, length, -1, layer.head_v_dim)
        gate = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias)
        out, _ = self._rule(
            q,
            k,
            v,
            g=gate,
            beta=layer.in_proj_b(x).sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )
        z = layer.in_proj_z(x).reshape(batch, length, -1, layer.head_v_dim)
        out = self._norm(out, z, layer.norm.weight, None, activation="swish", eps=layer.layer_norm_epsilon)
        return layer.out_proj(out.reshape(batch, length, -1))
