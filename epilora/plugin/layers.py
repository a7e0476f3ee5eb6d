"""vLLM's LoRA linear layers with our arithmetic, and FP8 linear layers with unrounded activations.

Two choices, each made once per layer after loading and never changed (vLLM's compiler drops guards):

- activations. "w8a8": vLLM quantises activations per token (stock). "w8a16" ("matched"): the same FP8 codes, widened,
  times unrounded activations. `match_activations` swaps the quantisation method of every FP8 linear layer, with or
  without LoRA.
- the kind of LoRA layer (`settings.Kind`): on a CPU grouped rows in plain torch, on a GPU the operators of `gpu_ops`, and
  vLLM's own code for what neither can serve, with the reason.

A layer's own collectives (tensor parallelism) stay vLLM's: only `apply` is replaced, whose output is a partial sum
there too.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from epilora.errors import UnsupportedKernel
from epilora.kernels.cpu_reference import ACCUMULATE_DTYPE, w8a16_linear

from .counters import CALLS
from .cpu_lora import NO_ROWS, RowGroups, add_lora, group_rows
from .settings import SLOT_FORMATS, Kind, Settings, settings_of

if TYPE_CHECKING:
    from .gpu_lora import Decision, StoredSlots

logger = logging.getLogger(__name__)

_told: set[str] = set()


def requested_activations(vllm_config: Any) -> str:
    """`additional_config["epilora"]["activations"]`, "w8a8" if not given. Raises ValueError for an unknown value."""
    return settings_of(vllm_config).activations


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

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda:
            y_MN = torch.ops.epilora.w8a16_linear(x.reshape(-1, x.shape[-1]), layer.weight, layer.weight_scale, bias)
            return y_MN.view(*x.shape[:-1], y_MN.shape[-1])
        return self.accumulate(layer, x, bias).to(x.dtype)


def _matched_problem(layer: torch.nn.Module) -> str | None:
    """Why a layer with FP8 weights cannot run W8A16; None if it can."""
    weight, scale = layer.weight, getattr(layer, "weight_scale", None)
    if weight.device.type not in ("cpu", "cuda"):
        return f"its weight is on {weight.device}; allowed: cpu, cuda"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return "its GPU is older than compute capability 8.9, which the widening of e4m3 codes needs"
    if weight.dim() != 2 or weight.stride(0) != 1:
        has = f"shape {tuple(weight.shape)}, strides {tuple(weight.stride())}"
        return f"its weight has {has}; expected [K, N] with strides (1, K)"
    if scale is None or scale.numel() not in (1, weight.shape[1]):
        found = None if scale is None else tuple(scale.shape)
        return f"its weight_scale is {found}; expected one value or {weight.shape[1]}"
    return None


def match_activations(model: torch.nn.Module, activations: str, quantization: str | None) -> int:
    """Give every FP8 linear layer of a loaded model the requested activations; returns how many were switched.

    quantization: what vLLM resolved for the model; None is a base in 16 or 32 bits, which rounds no activations anyway.
    Raises UnsupportedKernel if a layer cannot be switched (naming it), or if w8a16 is asked of a quantised model without FP8
    layers: a model never runs half matched in silence.
    """
    if activations == "w8a8" or quantization is None:
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
            if weight.is_cuda:
                from . import gpu_ops  # noqa: F401  # registers the operator
        switched += 1
    if not switched:
        raise UnsupportedKernel(
            f"activations=w8a16: the model, quantization {quantization!r}, has no FP8 linear layer; allowed are FP8 and unquantised "
            "bases; set quantization='fp8_per_channel', or activations=w8a8 for what vLLM does"
        )
    return switched


def fp8_activations(model: torch.nn.Module) -> dict[str, int]:
    """How many FP8 linear layers run which activations, e.g. {"w8a16": 8}."""
    found: collections.Counter[str] = collections.Counter()
    for layer in model.modules():
        weight = getattr(layer, "weight", None) if isinstance(layer, LinearBase) else None
        if weight is not None and weight.dtype == torch.float8_e4m3fn:
            found["w8a16" if isinstance(layer.quant_method, MatchedLinearMethod) else "w8a8"] += 1
        elif weight is not None and weight.dtype == torch.int32:  # vLLM's Marlin packs four codes into one
            found["marlin"] += 1
    return dict(found)


def _used_rank(b_NR: torch.Tensor) -> int:
    """One past the last column of B that is not all zero."""
    used = torch.nonzero(b_NR.any(dim=0)).flatten()
    return int(used[-1]) + 1 if used.numel() else 0


class EpiloraLinear:
    """Mixed in before a vLLM LoRA linear class. Attributes of its own start with `_epilora`: the layer forwards other
    names.
    """

    _epilora_kind: Kind | None = None
    _epilora_reason = ""  # why no faster kind
    _epilora_forward = False  # the stock class runs base_layer.forward instead of its quantisation method
    _epilora_settings: Settings
    _epilora_mode = 0  # of the operators, see gpu_ops.Mode
    _epilora_ranks: list[list[int]]  # [slice][slot], CPU kind only
    _epilora_a: torch.Tensor  # [L, S * R, K], CPU kind only
    _epilora_stored: StoredSlots | None = None  # slots in FP8 or NVFP4

    def create_lora_weights(self, max_loras: int, *args: Any, **kwargs: Any) -> None:
        super().create_lora_weights(max_loras, *args, **kwargs)  # type: ignore[misc]
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        self._epilora_settings = settings_of(config)
        self._epilora_forward = _runs_base_forward(self)
        stacks = self.lora_a_stacked  # type: ignore[attr-defined]
        self._epilora_ranks = [[0] * max_loras for _ in stacks]
        on_cpu = stacks[0].device.type == "cpu"
        if on_cpu and self._epilora_settings.path not in ("op", "stock"):
            self._epilora_create_cpu()
        else:
            self._epilora_create_op(getattr(config, "parallel_config", None))
        if self._epilora_kind is Kind.STOCK:
            self._epilora_refuse()

    def _epilora_create_cpu(self) -> None:
        layer: Any = self
        if layer.tp_size > 1 and layer.lora_config.fully_sharded_loras:
            self._epilora_kind = Kind.STOCK
            self._epilora_reason = "fully sharded adapters have a collective between A and B"
            return
        if self._epilora_settings.batch_invariant:
            raise UnsupportedKernel(
                "EPILORA_BATCH_INVARIANT=1: this CPU's layers are plain torch, whose sums depend on the batch; unset it, or use"
                " EPILORA_PATH=op to run the GPU's code here"
            )
        self._epilora_kind = Kind.CPU
        # One buffer for the A of all slices; vLLM's tuple becomes views of it.
        self._epilora_a = torch.cat([a_LRK[:, 0] for a_LRK in layer.lora_a_stacked], dim=1)
        widths = [a_LRK.shape[2] for a_LRK in layer.lora_a_stacked]
        layer.lora_a_stacked = tuple(part.unsqueeze(1) for part in self._epilora_a.split(widths, dim=1))

    def _epilora_create_op(self, parallel_config: Any) -> None:
        from .gpu_lora import StoredSlots, decide

        layer: Any = self
        chosen: Decision = decide(
            layer,
            self._epilora_settings,
            runs_base_forward=self._epilora_forward,
            parallel_config=parallel_config,
        )
        self._epilora_kind, self._epilora_reason = chosen.kind, chosen.reason
        self._epilora_mode = chosen.mode.pack()
        if self._epilora_settings.batch_invariant and chosen.kind is not Kind.FUSED:
            raise UnsupportedKernel(
                f"EPILORA_BATCH_INVARIANT=1: {getattr(layer.base_layer, 'prefix', '') or type(layer).__name__} cannot run it:"
                f" {chosen.reason}; unset it, or use an FP8 base (quantization='fp8_per_channel')"
            )
        fmt = SLOT_FORMATS.get(self._epilora_settings.adapters)
        if chosen.kind is not Kind.STOCK and fmt is not None:
            slots = StoredSlots(fmt, layer.lora_a_stacked, layer.lora_b_stacked, layer.lora_a_stacked[0].device)
            layer.lora_a_stacked, layer.lora_b_stacked = slots.host_a, slots.host_b
            self._epilora_stored = slots

    def _epilora_refuse(self) -> None:
        """A layer is left to vLLM: an error if that is not allowed, else one log line a reason."""
        layer: Any = self
        name = getattr(layer.base_layer, "prefix", "") or type(layer.base_layer).__name__
        if self._epilora_settings.require:
            raise UnsupportedKernel(
                f"EPILORA_REQUIRE=1, but layer {name} would run vLLM's own LoRA code: {self._epilora_reason}"
            )
        if self._epilora_reason not in _told:
            _told.add(self._epilora_reason)
            logger.warning("EpiLoRA: %s and layers like it run vLLM's own LoRA code: %s", name, self._epilora_reason)

    def set_mapping(self, punica_wrapper: Any) -> None:
        super().set_mapping(punica_wrapper)  # type: ignore[misc]
        if self._epilora_kind not in (Kind.FUSED, Kind.BESIDE):
            return
        from .cpu_lora import describe_batch
        from .gpu_lora import meta_problem

        layer: Any = self
        if layer.lora_a_stacked[0].device.type == "cpu" and self._epilora_settings.path == "op":
            describe_batch(punica_wrapper, layer.lora_config.max_loras)
        problem = meta_problem(punica_wrapper)
        if problem and self._epilora_stored is not None:
            raise UnsupportedKernel(f"adapters={self._epilora_settings.adapters}: {problem}; use adapters=16bit")
        if problem:
            self._epilora_kind, self._epilora_reason = Kind.STOCK, problem
            self._epilora_refuse()
            return
        from .gpu_ops import register_batch

        register_batch(punica_wrapper.token_mapping_meta, exact_count=layer.lora_config.specialize_active_lora)

    def reset_lora(self, index: int) -> None:
        super().reset_lora(index)  # type: ignore[misc]
        for ranks in self._epilora_ranks:
            ranks[index] = 0
        if self._epilora_stored is not None:
            self._epilora_stored.clear(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        if self._epilora_kind is Kind.CPU:
            for ranks, b_LNR in zip(self._epilora_ranks, self.lora_b_stacked, strict=True):  # type: ignore[attr-defined]
                ranks[index] = _used_rank(b_LNR[index, 0])
        if self._epilora_stored is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # copies from the GPU into the host stacks may be under way
            self._epilora_stored.store(index)

    def _epilora_adapters(self) -> tuple[Any, ...]:
        """The operators' adapter arguments and the mapping that names the batch description."""
        layer: Any = self
        slots = self._epilora_stored
        stacks: tuple[Any, ...] = (layer.lora_a_stacked, layer.lora_b_stacked, (), ())
        if slots is not None:
            stacks = (slots.a, slots.b, slots.a_scales, slots.b_scales)
        return (*[list(part) for part in stacks], layer.punica_wrapper.token_mapping_meta.token_lora_mapping)

    def _epilora_quantise(self, x_MK: torch.Tensor) -> tuple[Any, Any]:
        """x in FP8 as vLLM quantises it for this layer, in sight of its compiler; (None, None) where the operator does it."""
        layer: Any = self
        method = layer.base_layer.quant_method
        settings = self._epilora_settings
        if isinstance(method, MatchedLinearMethod) or settings.quantise == "op" or settings.batch_invariant:
            return None, None
        from .gpu_lora import fp8_kernel

        return fp8_kernel(method, layer.base_layer).quant_fp8(x_MK, None, None)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._epilora_kind is Kind.FUSED:
            return self._epilora_apply_fused(x, bias)
        if self._epilora_kind is Kind.BESIDE:
            return self._epilora_apply_beside(x, bias)
        if self._epilora_kind is Kind.CPU:
            return self._epilora_apply_cpu(x, bias)
        return super().apply(x, bias)  # type: ignore[misc]

    def _epilora_apply_fused(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        base_layer = self.base_layer  # type: ignore[attr-defined]
        x_MK = x.reshape(-1, x.shape[-1])
        codes, x_scale = self._epilora_quantise(x_MK)
        y_MN = torch.ops.epilora.lora_linear(
            x_MK,
            codes,
            x_scale,
            base_layer.weight,
            base_layer.weight_scale,
            bias,
            *self._epilora_adapters(),
            self._epilora_mode,
        )
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    def _epilora_base(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        base_layer = self.base_layer  # type: ignore[attr-defined]
        if self._epilora_forward:
            out = base_layer(x)
            return out[0] if isinstance(out, tuple) else out
        return self._get_quant_method().apply(base_layer, x, bias)  # type: ignore[attr-defined]

    def _epilora_apply_beside(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._epilora_base(x, bias)
        torch.ops.epilora.lora_add_(
            y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), *self._epilora_adapters(), self._epilora_mode
        )
        return y

    def _epilora_apply_cpu(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        CALLS[Kind.CPU.value] += 1
        method = None if self._epilora_forward else self._get_quant_method()  # type: ignore[attr-defined]
        if isinstance(method, MatchedLinearMethod):
            y = method.accumulate(self.base_layer, x, bias)  # type: ignore[attr-defined]
            CALLS["base_w8a16"] += 1
        else:
            y = self._epilora_base(x, bias)
            CALLS["base_other"] += 1
        rows = batch_rows(self.punica_wrapper, x.shape[:-1].numel())  # type: ignore[attr-defined]
        if rows.groups:
            y = y.to(ACCUMULATE_DTYPE)  # rows without an adapter come back from it unchanged
            y_MN, x_MK = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            add_lora(y_MN, x_MK, self._epilora_a, self.lora_b_stacked, rows=rows, ranks=self._epilora_ranks)  # type: ignore[attr-defined]
        return y.to(x.dtype)


def layer_kinds(model: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """LoRA layer -> (kind, why not a faster one); layers that vLLM serves with classes of its own count as stock."""
    from vllm.lora.layers import BaseLayerWithLoRA

    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, EpiloraLinear):
            kind = layer._epilora_kind
            found[name] = ("unset" if kind is None else kind.value, layer._epilora_reason)
        elif isinstance(layer, BaseLayerWithLoRA):
            found[name] = (Kind.STOCK.value, f"{type(layer).__name__} is left to vLLM")
    return found


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


def kind_counts(model: torch.nn.Module) -> dict[str, int]:
    """LoRA layers by kind, for metrics: {"layers_lora_fused": 144, ...}; what is left to vLLM shows as layers_lora_stock."""
    return dict(collections.Counter(f"layers_{kind}" for kind, _ in layer_kinds(model).values()))
