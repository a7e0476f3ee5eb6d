"""vLLM's LoRA linear layers with our arithmetic, and FP8 linear layers with unrounded activations.

Two choices, each made once per layer after loading and never changed (vLLM's compiler drops guards):

- activations. "w8a8": vLLM quantises activations per token (stock). "w8a16" ("matched"): the same FP8 codes, widened,
  times unrounded activations. `match_activations` swaps the quantisation method of every FP8 linear layer, with or
  without LoRA.
- the LoRA path. "cpu": grouped rows in plain torch; "stock": vLLM's own code. A GPU path is a third value of `LoRAPath`
  and one more branch in `apply`.

A layer's own collectives (tensor parallelism) stay vLLM's: only `apply` is replaced, whose output is a partial sum
there too.
"""

from __future__ import annotations

import collections
import logging
from enum import StrEnum
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from epilora.errors import UnsupportedKernel
from epilora.kernels.cpu_reference import ACCUMULATE_DTYPE, w8a16_linear

from .cpu_lora import NO_ROWS, RowGroups, add_lora, group_rows

logger = logging.getLogger(__name__)

ACTIVATIONS = ("w8a8", "w8a16")
# Calls per path since the process started; keys: lora_cpu, lora_stock, base_w8a16 and base_other (under a LoRA layer).
CALLS: collections.Counter[str] = collections.Counter()


class LoRAPath(StrEnum):
    """Who adds the adapter's delta."""

    CPU = "lora_cpu"
    STOCK = "lora_stock"


def requested_activations(vllm_config: Any) -> str:
    """`additional_config["epilora"]["activations"]`, "w8a8" if not given. Raises ValueError for an unknown value."""
    extra = getattr(vllm_config, "additional_config", None) or {}
    ours = extra.get("epilora") or {} if isinstance(extra, dict) else {}
    value = ours.get("activations", "w8a8")
    if value not in ACTIVATIONS:
        raise ValueError(f"additional_config epilora.activations={value!r}; allowed are {', '.join(ACTIVATIONS)}")
    return value


class MatchedLinearMethod(LinearMethodBase):
    """W8A16 on a layer whose weight is float8_e4m3fn [K, N] with strides (1, K) and one scale per channel or tensor.

    Wraps the method that loaded the layer; everything but `apply` is still that method's.
    """

    def __init__(self, inner: LinearMethodBase) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.inner.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.inner.process_weights_after_loading(layer)

    def accumulate(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., N] in fp32, not yet rounded to the dtype of x."""
        return w8a16_linear(x, layer.weight.t(), layer.weight_scale, bias, out_dtype=ACCUMULATE_DTYPE)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.accumulate(layer, x, bias).to(x.dtype)


def _matched_problem(layer: torch.nn.Module) -> str | None:
    """Why a layer with FP8 weights cannot run W8A16; None if it can."""
    weight, scale = layer.weight, getattr(layer, "weight_scale", None)
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}; only the CPU path exists so far"
    if weight.dim() != 2 or weight.stride(0) != 1:
        has = f"shape {tuple(weight.shape)}, strides {tuple(weight.stride())}"
        return f"its weight has {has}; expected [K, N] with strides (1, K)"
    if scale is None or scale.numel() not in (1, weight.shape[1]):
        found = None if scale is None else tuple(scale.shape)
        return f"its weight_scale is {found}; expected one value or {weight.shape[1]}"
    return None


def match_activations(model: torch.nn.Module, activations: str) -> int:
    """Give every FP8 linear layer of a loaded model the requested activations; returns how many were switched.

    Raises UnsupportedKernel if one cannot be switched (naming it), or if w8a16 is asked of a model without FP8 layers:
    a model never runs half matched in silence.
    """
    if activations == "w8a8":
        return 0
    switched = 0
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None) if isinstance(layer, LinearBase) else None
        if weight is None or weight.dtype != torch.float8_e4m3fn:
            continue
        if not isinstance(layer.quant_method, MatchedLinearMethod):
            problem = _matched_problem(layer)
            if problem:
                raise UnsupportedKernel(
                    f"activations=w8a16: layer {name!r} cannot run it: {problem}; use activations=w8a8"
                )
            layer.quant_method = MatchedLinearMethod(layer.quant_method)
        switched += 1
    if not switched:
        raise UnsupportedKernel(
            "activations=w8a16: the model has no FP8 linear layer; set quantization='fp8_per_channel'"
        )
    return switched


def fp8_activations(model: torch.nn.Module) -> dict[str, int]:
    """How many FP8 linear layers run which activations, e.g. {"w8a16": 8}."""
    found: collections.Counter[str] = collections.Counter()
    for layer in model.modules():
        weight = getattr(layer, "weight", None) if isinstance(layer, LinearBase) else None
        if weight is not None and weight.dtype == torch.float8_e4m3fn:
            found["w8a16" if isinstance(layer.quant_method, MatchedLinearMethod) else "w8a8"] += 1
    return dict(found)


def _decide(layer: BaseLinearLayerWithLoRA) -> LoRAPath:
    """The LoRA path of a layer whose buffers exist."""
    if layer.lora_a_stacked[0].device.type != "cpu":
        return LoRAPath.STOCK
    if layer.tp_size > 1 and layer.lora_config.fully_sharded_loras:
        return LoRAPath.STOCK  # a collective sits between A and B
    return LoRAPath.CPU


def _used_rank(b_NR: torch.Tensor) -> int:
    """One past the last column of B that is not all zero."""
    used = torch.nonzero(b_NR.any(dim=0)).flatten()
    return int(used[-1]) + 1 if used.numel() else 0


class EpiloraLinear:
    """Mixed in before a vLLM LoRA linear class. Attributes of its own start with `_epilora`: the layer forwards other
    names.
    """

    _epilora_path: LoRAPath | None = None
    _epilora_forward = False  # the stock class runs base_layer.forward instead of its quantisation method
    _epilora_ranks: list[list[int]]  # [slice][slot]
    _epilora_a: torch.Tensor  # [L, S * R, K], CPU path only

    def create_lora_weights(self, max_loras: int, *args: Any, **kwargs: Any) -> None:
        super().create_lora_weights(max_loras, *args, **kwargs)  # type: ignore[misc]
        self._epilora_ranks = [[0] * max_loras for _ in self.lora_a_stacked]  # type: ignore[has-type]
        self._epilora_path = _decide(self)  # type: ignore[arg-type]
        self._epilora_forward = _runs_base_forward(self)
        if self._epilora_path is LoRAPath.CPU:
            # One buffer for the A of all slices; vLLM's tuple becomes views of it.
            self._epilora_a = torch.cat([a_LRK[:, 0] for a_LRK in self.lora_a_stacked], dim=1)  # type: ignore[has-type]
            widths = [a_LRK.shape[2] for a_LRK in self.lora_a_stacked]  # type: ignore[has-type]
            self.lora_a_stacked = tuple(part.unsqueeze(1) for part in self._epilora_a.split(widths, dim=1))

    def reset_lora(self, index: int) -> None:
        super().reset_lora(index)  # type: ignore[misc]
        for ranks in self._epilora_ranks:
            ranks[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        if self._epilora_path is LoRAPath.CPU:
            for ranks, b_LNR in zip(self._epilora_ranks, self.lora_b_stacked, strict=True):  # type: ignore[attr-defined]
                ranks[index] = _used_rank(b_LNR[index, 0])

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._epilora_path is not LoRAPath.CPU:
            CALLS[LoRAPath.STOCK.value] += 1
            return super().apply(x, bias)  # type: ignore[misc]
        CALLS[LoRAPath.CPU.value] += 1
        base_layer = self.base_layer  # type: ignore[attr-defined]
        if self._epilora_forward:
            out = base_layer(x)
            y = out[0] if isinstance(out, tuple) else out
            CALLS["base_other"] += 1
        else:
            method = self._get_quant_method()  # type: ignore[attr-defined]
            if isinstance(method, MatchedLinearMethod):
                y = method.accumulate(base_layer, x, bias)
                CALLS["base_w8a16"] += 1
            else:
                y = method.apply(base_layer, x, bias)
                CALLS["base_other"] += 1
        rows = batch_rows(self.punica_wrapper, x.shape[:-1].numel())  # type: ignore[attr-defined]
        if rows.groups:
            y = y.to(ACCUMULATE_DTYPE)  # rows without an adapter come back from it unchanged
            y_MN, x_MK = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            add_lora(y_MN, x_MK, self._epilora_a, self.lora_b_stacked, rows=rows, ranks=self._epilora_ranks)  # type: ignore[attr-defined]
        return y.to(x.dtype)


def _runs_base_forward(layer: Any) -> bool:
    """Whether the stock `apply` of this layer calls `base_layer.forward`: replicated layers, merged layers with a
    forward of their own.
    """
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA, ReplicatedLinearWithLoRA
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    if isinstance(layer, ReplicatedLinearWithLoRA):
        return True
    if not isinstance(layer, MergedColumnParallelLinearWithLoRA) or not isinstance(
        layer.base_layer, MergedColumnParallelLinear
    ):
        return False
    return layer.tp_size == 1 and type(layer.base_layer).forward is not MergedColumnParallelLinear.forward


def batch_rows(punica_wrapper: Any, num_rows: int) -> RowGroups:
    """The groups of the batch now running. num_rows: rows the layer got; more than the mapping has are padding."""
    rows: RowGroups = getattr(punica_wrapper, "_epilora_rows", NO_ROWS)
    if rows.num_rows > num_rows:  # a dummy batch smaller than the last mapping
        return group_rows(punica_wrapper.token_lora_indices[:num_rows])
    return rows


def swapped_class(stock: type) -> type:
    """Our subclass of a vLLM LoRA linear class; other classes come back as they are."""
    if not issubclass(stock, BaseLinearLayerWithLoRA) or issubclass(stock, EpiloraLinear):
        return stock
    return type(f"Epilora{stock.__name__}", (EpiloraLinear, stock), {"__module__": __name__, "__doc__": stock.__doc__})
