"""The transformer that computes on mapped weights.

transformers' own model class is built on the meta device, so that it allocates nothing; then every `nn.Linear` is
replaced by a `LoraLinear` over a row slice of the engine's packed codes (q, k, v lie in `qkv_proj`; gate, up in
`gate_up_proj`), and embedding, norms and the output head refer to the mapped tensors in place. Nothing of the base is
copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attach import MappedBase
from .linear import AdapterContext, BaseProjection, LoraLinear, slice_rows

# transformers model types whose linear layers, embedding and norms are all that has weights.
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class MappedEmbedding(nn.Module):
    """Rows of a mapped [V, K] table, in the trainer's dtype."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = weight  # not a parameter: it belongs to the mapping
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64, any shape. Returns [..., K]."""
        return F.embedding(ids, self.table).to(self.dtype)


@dataclass
class BaseModel:
    """The model, its output table [V, K] and the names of the modules an adapter may target (name -> (N, K))."""

    body: Any
    head: torch.Tensor
    context: AdapterContext
    linear_shapes: dict[str, tuple[int, int]]
    dtype: torch.dtype
    vocab_size: int

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, T, K] of right-padded ids [B, T]: causal attention never sees the padding."""
        return self.body(input_ids=ids, use_cache=False).last_hidden_state

    @contextlib.contextmanager
    def adapter(self, pairs: Any) -> Iterator[None]:
        """Apply `pairs` (module name -> LoraPair; None: plain base) to every forward and backward pass inside."""
        before, self.context.active = self.context.active, pairs
        try:
            yield
        finally:
            self.context.active = before


def build_model(base: MappedBase, dtype: torch.dtype, *, checkpoint_activations: bool = False) -> BaseModel:
    """The model of `base.manifest.model_path` over the mapped weights.

    dtype: of activations (fp32, bf16 or fp16). checkpoint_activations: keep only each layer's input and recompute the
    rest.
    Raises ValueError for a model type that is not supported, KeyError naming a weight the manifest lacks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base.manifest.model_path)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"model_type={config.model_type!r} is not supported; allowed: {SUPPORTED_MODEL_TYPES}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    body = model.model
    context = AdapterContext()
    where = _checkpoint_modules(base)
    linear_shapes: dict[str, tuple[int, int]] = {}
    for name, module in list(body.named_modules()):
        full = f"model.{name}"
        if isinstance(module, nn.Linear):
            if full not in where:
                raise KeyError(f"the manifest of engine {base.manifest.engine!r} has no weight for {full}")
            entry, start, stop = where[full]
            bias = base.operands.get(f"{entry}.bias")
            if (bias is None) != (module.bias is None):
                raise KeyError(
                    f"{full}: bias is {'missing from' if bias is None else 'unexpected in'} the manifest ({entry}.bias)"
                )
            projection = BaseProjection(
                slice_rows(base.operands[entry], start, stop),
                None if bias is None else bias.values[start:stop],
                context,
            )
            replacement = LoraLinear(full, projection)
            linear_shapes[full] = (replacement.out_features, replacement.in_features)
            body.set_submodule(name, replacement)
        elif isinstance(module, nn.Embedding):
            body.set_submodule(name, MappedEmbedding(_plain(base, full), dtype))
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            weight = _plain(base, full)
            # A norm wider than the activations would widen them; these vectors alone are converted then.
            weight = weight if weight.dtype in (dtype, torch.bfloat16, torch.float16) else weight.to(dtype)
            module.weight = nn.Parameter(weight, requires_grad=False)
    body.rotary_emb = type(body.rotary_emb)(config=config)  # its buffers are computed, not stored
    left = [name for name, p in (*body.named_parameters(), *body.named_buffers()) if p.is_meta]
    if left:
        raise KeyError(f"the manifest of engine {base.manifest.engine!r} lacks weights for {left[:5]}")
    head = _plain(base, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")[: config.vocab_size]
    if checkpoint_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
        body.train()
    else:
        body.eval()
    return BaseModel(body, head, context, linear_shapes, dtype, config.vocab_size)


def _checkpoint_modules(base: MappedBase) -> dict[str, tuple[str, int, int]]:
    """Checkpoint module name -> (manifest entry, first row, end row)."""
    where = {}
    for entry in base.manifest.entries:
        parent, start = entry.name.rpartition(".")[0], 0
        for leaf, rows in entry.slices:
            where[f"{parent}.{leaf}" if parent else leaf] = (entry.name, start, start + rows)
            start += rows
    return where


def _plain(base: MappedBase, name: str) -> torch.Tensor:
    """The mapped tensor of a parameter that is not quantised. Raises KeyError naming similar entries."""
    if name not in base.operands:
        base.manifest.entry(name)  # raises with the nearest names
    operand = base.operands[name]
    if operand.scales is not None:
        raise ValueError(
            f"{name} is stored as {operand.format.value}; embeddings, norms and the head must be 16 or 32 bit"
        )
    return operand.values
