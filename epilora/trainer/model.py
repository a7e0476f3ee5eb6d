"""The transformer that computes on mapped weights.

transformers' own model class is built on the meta device, so that it allocates nothing; then every `nn.Linear` is
replaced by a `LoraLinear` over a row slice of the engine's packed codes (q, k, v lie in `qkv_proj`; gate, up in
`gate_up_proj`), and embedding, norms and the output head refer to the mapped tensors in place. Nothing of the base is
copied. The model lives where the base's tensors do; on a GPU its linears run the training GEMMs (`gemm_linear.py`).

As one of several ranks (`ranks.py`) it has a rank's part of every linear layer, of the embedding and of the head; hidden states
are whole between the layers, the same bits on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from epilora.errors import UnsupportedKernel

from . import attention
from .attention import Packing
from .base import BaseWeights
from .delta_net import PackedDeltaNet
from .linear import AdapterContext, BaseProjection, LoraLinear, LoraPair, Segment, slice_rows
from .ranks import Cut, RankGroup, Ranks, VocabCut

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_5_text")


class MappedEmbedding(nn.Module):
    """Rows of a mapped [V, K] table, in the trainer's dtype. cut: what of the vocabulary the table holds, None: all."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, cut: VocabCut | None = None) -> None:
        super().__init__()
        self.table = weight  # not a parameter: it belongs to the mapping
        self.dtype = dtype
        self.cut = cut

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64, any shape. Returns [..., K]."""
        if self.cut is None:
            return F.embedding(ids, self.table).to(self.dtype)
        local = ids - self.cut.start
        here = (local >= 0) & (local < self.table.shape[0])
        found = torch.zeros(*ids.shape, self.table.shape[1], dtype=self.dtype, device=self.table.device)
        found[here] = F.embedding(local[here], self.table).to(self.dtype)
        return self.cut.group.sum_(found)  # each row comes from one rank


@dataclass
class BaseModel:
    """The model, its output table [V, K] and the names of the modules an adapter may target (name -> (N, K)).

    head_cut, cuts: on one of several ranks, which rows of the table `head` is, and its part of each of those modules.
    """

    body: Any
    head: torch.Tensor
    context: AdapterContext
    linear_shapes: dict[str, tuple[int, int]]
    dtype: torch.dtype
    vocab_size: int
    head_cut: VocabCut | None = None
    cuts: dict[str, Cut] = field(default_factory=dict)

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
    base: BaseWeights,
    dtype: torch.dtype,
    *,
    checkpoint_activations: bool = False,
    gemm_mode: str | None = None,
    ranks: Ranks | None = None,
) -> BaseModel:
    """The model of `base.manifest.model_path` over the base's weights.

    dtype: of activations (fp32, bf16 or fp16). checkpoint_activations: keep only each layer's input and recompute the
    rest. gemm_mode: None for plain torch in fp32, else the mode of `gemm_linear.GemmProjection`. ranks: the others, if `base`
    is one rank's part.
    Raises ValueError for a model type that is not supported, KeyError naming a weight the manifest lacks, UnsupportedKernel
    for a model that cannot be cut.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base.manifest.model_path)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"model_type={config.model_type!r} is not supported; allowed: {SUPPORTED_MODEL_TYPES}")
    if ranks is not None and config.model_type == "qwen3_5_text":
        raise UnsupportedKernel(
            "model_type='qwen3_5_text': a sharded trainer has no delta net layers; start the engine with tensor_parallel=1"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    body = model.model
    placing = _Placing(base, dtype, gemm_mode, ranks, config.vocab_size)
    placing.fill(body)
    head_name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    head = _plain(base, head_name)[: config.vocab_size]
    body.rotary_emb = type(body.rotary_emb)(config=config).to(head.device)  # its buffers are computed, not stored
    left = [name for name, p in (*body.named_parameters(), *body.named_buffers()) if p.is_meta]
    if left:
        raise KeyError(f"the manifest of engine {base.manifest.engine!r} lacks weights for {left[:5]}")
    for name, module in list(body.named_modules()):
        if type(module).__name__.endswith("GatedDeltaNet"):
            body.set_submodule(name, PackedDeltaNet(module, fused=head.is_cuda and dtype != torch.float32))
    if ranks is not None:
        _sum_gradients_of_inputs(body, placing.cuts, ranks.group)
    for index, layer in enumerate(body.layers):
        layer.register_forward_pre_hook(functools.partial(_wait_for_layer, base, index))
        if checkpoint_activations:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    body.eval()
    return BaseModel(
        body,
        head,
        placing.context,
        placing.linear_shapes,
        dtype,
        config.vocab_size,
        placing.vocab(head_name),
        placing.cuts,
    )


def _wait_for_layer(base: BaseWeights, index: int, *_: Any) -> None:
    base.wait_for_layer(index)


def _sum_gradients_of_inputs(body: nn.Module, cuts: Mapping[str, Cut], group: RankGroup) -> None:
    """What enters the column-parallel linears of one parent module enters them once: one sum of gradients for all."""

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (group.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": group.enter(kwargs["hidden_states"])}

    for parent in sorted({name.rpartition(".")[0] for name, cut in cuts.items() if cut.by_rows}):
        body.get_submodule(parent.removeprefix("model.")).register_forward_pre_hook(enter, with_kwargs=True)


class _Placing:
    """Puts the base's tensors into a model's modules.

    linear_shapes: of the whole linears put in place, name -> (N, K). cuts: this rank's part of each, if there are several.
    """

    def __init__(
        self, base: BaseWeights, dtype: torch.dtype, gemm_mode: str | None, ranks: Ranks | None, vocab_size: int
    ) -> None:
        self.base, self.dtype, self.gemm_mode, self.ranks, self.vocab_size = base, dtype, gemm_mode, ranks, vocab_size
        self.context = AdapterContext()
        self.linear_shapes: dict[str, tuple[int, int]] = {}
        self.cuts: dict[str, Cut] = {}
        self._where = _checkpoint_modules(base)

    def vocab(self, name: str) -> VocabCut | None:
        return None if self.ranks is None else self.ranks.vocab(name, self.vocab_size)

    def fill(self, body: nn.Module) -> None:
        for name, module in list(body.named_modules()):
            full = f"model.{name}"
            if isinstance(module, nn.Linear):
                body.set_submodule(name, self._linear(module, full))
            elif isinstance(module, nn.Embedding):
                body.set_submodule(name, MappedEmbedding(_plain(self.base, full), self.dtype, self.vocab(full)))
            else:
                for leaf, _ in list(module.named_parameters(recurse=False)):
                    weight = _plain(self.base, full if leaf == "weight" else f"{full}.{leaf}")
                    if leaf == "weight" and weight.dtype not in (self.dtype, torch.bfloat16, torch.float16):
                        weight = weight.to(self.dtype)  # a norm wider than the activations would widen them
                    setattr(module, leaf, nn.Parameter(weight, requires_grad=False))

    def _linear(self, linear: nn.Linear, name: str) -> LoraLinear:
        engine = self.base.manifest.engine
        if name not in self._where:
            raise KeyError(f"the manifest of engine {engine!r} has no weight for {name}")
        entry, start, stop = self._where[name]
        bias = self.base.operands.get(f"{entry}.bias")
        if (bias is None) != (linear.bias is None):
            raise KeyError(
                f"{name}: bias is {'missing from' if bias is None else 'unexpected in'} the manifest ({entry}.bias)"
            )
        operand = slice_rows(self.base.operands[entry], start, stop)
        rows = None if bias is None else bias.values[start:stop]
        self.linear_shapes[name] = (linear.out_features, linear.in_features)
        group = None
        if self.ranks is not None:
            cut = self.cuts[name] = self.ranks.cut(name, *self.linear_shapes[name])
            if not cut.by_rows:  # every rank has a part of the sum, the first one adds the bias
                group = self.ranks.group
                rows = rows if group.rank == 0 else None
        if self.gemm_mode is None:
            return LoraLinear(name, BaseProjection(operand, rows, self.context), group)
        from .gemm_linear import GemmProjection

        return LoraLinear(name, GemmProjection(operand, rows, self.context, self.gemm_mode), group)


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
