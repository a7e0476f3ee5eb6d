"""The transformer that computes on mapped weights.

transformers' own model class is built on the meta device, so that it allocates nothing; then every `nn.Linear` is
replaced by a `LoraLinear` over a row slice of the engine's packed codes (q, k, v lie in `qkv_proj`; gate, up in
`gate_up_proj`), and embedding, norms and the output head refer to the mapped tensors in place. Nothing of the base is
copied. The model lives where the base's tensors do; on a GPU its linears run the training GEMMs (`gemm_linear.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import attention
from .attention import Packing
from .base import BaseWeights
from .delta_net import PackedDeltaNet
from .linear import AdapterContext, BaseProjection, LoraLinear, LoraPair, Segment, slice_rows

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_5_text")


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

    @property
    def device(self) -> torch.device:
        return self.head.device

    def hidden(self, ids: torch.Tensor, lengths: tuple[int, ...] = ()) -> torch.Tensor:
        """Last hidden states [B, T, K] of ids [B, T], right-padded (causal layers never see the padding), or packed
        sequences of `lengths`.
        """
        ids = ids.to(self.device)
        if not lengths:
            return self.body(input_ids=ids, use_cache=False).last_hidden_state
        packing = Packing.of(lengths, self.device)
        return self.body(
            input_ids=ids, position_ids=packing.positions(), packing=packing, use_cache=False
        ).last_hidden_state

    @contextlib.contextmanager
    def adapters(self, *segments: Segment) -> Iterator[None]:
        """Apply adapters to their rows in every forward and backward pass inside; rows are those of ids.flatten()."""
        before, self.context.segments = self.context.segments, segments
        try:
            yield
        finally:
            self.context.segments = before

    def adapter(self, pairs: Mapping[str, LoraPair] | None) -> contextlib.AbstractContextManager[None]:
        """One adapter for all rows; None: the plain base."""
        return self.adapters() if pairs is None else self.adapters(Segment(0, None, pairs))


def build_model(
    base: BaseWeights, dtype: torch.dtype, *, checkpoint_activations: bool = False, gemm_mode: str | None = None
) -> BaseModel:
    """The model of `base.manifest.model_path` over the base's weights.

    dtype: of activations (fp32, bf16 or fp16). checkpoint_activations: keep only each layer's input and recompute the
    rest. gemm_mode: None for plain torch in fp32, else the mode of `gemm_linear.GemmProjection`.
    Raises ValueError for a model type that is not supported, KeyError naming a weight the manifest lacks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base.manifest.model_path)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"model_type={config.model_type!r} is not supported; allowed: {SUPPORTED_MODEL_TYPES}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    body = model.model
    context = AdapterContext()
    linear_shapes = _place_weights(base, body, context, dtype, gemm_mode)
    head = _plain(base, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")[: config.vocab_size]
    body.rotary_emb = type(body.rotary_emb)(config=config).to(head.device)  # its buffers are computed, not stored
    left = [name for name, p in (*body.named_parameters(), *body.named_buffers()) if p.is_meta]
    if left:
        raise KeyError(f"the manifest of engine {base.manifest.engine!r} lacks weights for {left[:5]}")
    for name, module in list(body.named_modules()):
        if type(module).__name__.endswith("GatedDeltaNet"):
            body.set_submodule(name, PackedDeltaNet(module, fused=head.is_cuda and dtype != torch.float32))
    for index, layer in enumerate(body.layers):
        layer.register_forward_pre_hook(functools.partial(_wait_for_layer, base, index))
        if checkpoint_activations:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    body.eval()
    return BaseModel(body, head, context, linear_shapes, dtype, config.vocab_size)


def _wait_for_layer(base: BaseWeights, index: int, *_: Any) -> None:
    base.wait_for_layer(index)


def _place_weights(
    base: BaseWeights, body: nn.Module, context: AdapterContext, dtype: torch.dtype, gemm_mode: str | None
) -> dict[str, tuple[int, int]]:
    """Put the base's tensors into the model's modules; the linears' shapes (name -> (N, K))."""
    where = _checkpoint_modules(base)
    linear_shapes: dict[str, tuple[int, int]] = {}
    for name, module in list(body.named_modules()):
        full = f"model.{name}"
        if isinstance(module, nn.Linear):
            replacement = LoraLinear(full, _projection(base, where, module, full, context, gemm_mode))
            linear_shapes[full] = (replacement.out_features, replacement.in_features)
            body.set_submodule(name, replacement)
        elif isinstance(module, nn.Embedding):
            body.set_submodule(name, MappedEmbedding(_plain(base, full), dtype))
        else:
            for leaf, _ in list(module.named_parameters(recurse=False)):
                weight = _plain(base, full if leaf == "weight" else f"{full}.{leaf}")
                if leaf == "weight" and weight.dtype not in (dtype, torch.bfloat16, torch.float16):
                    weight = weight.to(dtype)  # a norm wider than the activations would widen them
                setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
    return linear_shapes


def _projection(
    base: BaseWeights,
    where: Mapping[str, tuple[str, int, int]],
    linear: nn.Linear,
    name: str,
    context: AdapterContext,
    gemm_mode: str | None,
) -> BaseProjection:
    if name not in where:
        raise KeyError(f"the manifest of engine {base.manifest.engine!r} has no weight for {name}")
    entry, start, stop = where[name]
    bias = base.operands.get(f"{entry}.bias")
    if (bias is None) != (linear.bias is None):
        raise KeyError(
            f"{name}: bias is {'missing from' if bias is None else 'unexpected in'} the manifest ({entry}.bias)"
        )
    operand = slice_rows(base.operands[entry], start, stop)
    bias_rows = None if bias is None else bias.values[start:stop]
    if gemm_mode is None:
        return BaseProjection(operand, bias_rows, context)
    from .gemm_linear import GemmProjection

    return GemmProjection(operand, bias_rows, context, gemm_mode)


def _checkpoint_modules(base: BaseWeights) -> dict[str, tuple[str, int, int]]:
    """Checkpoint module name -> (manifest entry, first row, end row)."""
    where = {}
    for entry in base.manifest.entries:
        parent, start = entry.name.rpartition(".")[0], 0
        for leaf, rows in entry.slices:
            where[f"{parent}.{leaf}" if parent else leaf] = (entry.name, start, start + rows)
            start += rows
    return where


def _plain(base: BaseWeights, name: str) -> torch.Tensor:
    """The mapped tensor of a parameter that is not quantised. Raises KeyError naming similar entries."""
    if name not in base.operands:
        base.manifest.entry(name)  # raises with the nearest names
    operand = base.operands[name]
    if operand.scales is not None:
        raise ValueError(
            f"{name} is stored as {operand.format.value}; embeddings, norms and the head must be 16 or 32 bit"
        )
    return operand.values
