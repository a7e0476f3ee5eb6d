"""Which of our paths a vLLM LoRA layer takes on a GPU, and why not a faster one: decided once, after loading.

    fused      base and adapters in one operator (`gpu_ops.lora_linear`): FP8 bases whose activations vLLM quantises per
               token, and W8A16
    beside     vLLM computes the base, our kernels add the adapters (`gpu_ops.lora_add_`): any other base
    stock      vLLM's own code

The decision is traced by vLLM's compiler, which drops its guards: it never changes while a layer lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epilora.kernels.lora_expand import MAX_RANK
from epilora.kernels.tiles import MAX_SLICES
from epilora.quant.formats import Format
from epilora.quant.nvfp4 import BLOCK, quantize_nvfp4_ref
from epilora.quant.reference import quantize_rows_ref

from .compat import KERNEL_META_FIELDS
from .gpu_ops import PATHS, VENDORS, Mode, Path, capability_of, scratch
from .settings import Kind, Settings

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Decision:
    """kind and the operator's mode; reason: why not a faster kind, empty if there is none."""

    kind: Kind
    mode: Mode
    reason: str = ""


def fp8_kernel(method: Any, base_layer: Any) -> Any:
    """The kernel object of a layer's FP8 GEMM (`quant_method.fp8_linear`, compressed-tensors: `scheme.fp8_linear`) or None."""
    for owner in (method, getattr(base_layer, "scheme", None)):
        found = getattr(owner, "fp8_linear", None)
        if found is not None:
            return found
    return None


def weight_problem(base_layer: Any, dtype: torch.dtype) -> str:
    """Why a base layer's weight is not the FP8 matrix our kernels read; empty if it is."""
    weight, scale = getattr(base_layer, "weight", None), getattr(base_layer, "weight_scale", None)
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return f"the base is {'packed' if weight is None else weight.dtype}, not float8_e4m3fn"
    if weight.dim() != 2 or weight.stride(0) != 1 or weight.stride(1) != weight.shape[0]:
        return f"its weight has shape {tuple(weight.shape)}, strides {tuple(weight.stride())}; needed: [K, N] with strides (1, K)"
    if scale is None or scale.dtype != torch.float32 or scale.numel() not in (1, weight.shape[1]):
        found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        return f"its weight_scale is {found}; needed: float32, 1 or {weight.shape[1]} values"
    if dtype not in _SIXTEEN_BIT:
        return f"activations are {dtype}; needed: bfloat16 or float16"
    return ""


def fp8_problem(base_layer: Any, method: Any, dtype: torch.dtype) -> tuple[int, str]:
    """(index of the vendor kernel, why the fused W8A8 operator cannot run this base; empty if it can)."""
    kernel = fp8_kernel(method, base_layer)
    if kernel is None:
        return 0, f"its base runs {type(method).__name__}, which has no FP8 GEMM to call on codes"
    name = type(kernel).__name__
    if name not in VENDORS:
        return 0, f"vLLM chose {name} for its base; known are {', '.join(VENDORS)}"
    config = kernel.config
    scale = config.activation_quant_key.scale
    if scale.static or not scale.group_shape.is_per_token() or getattr(base_layer, "input_scale", None) is not None:
        return 0, "its activations are not quantised per token at run time"
    if getattr(base_layer, "input_scale_ub", None) is not None:
        return 0, "its activation scales have an upper bound"
    if config.out_dtype not in (None, dtype):
        return 0, f"its base returns {config.out_dtype}, activations are {dtype}"
    return VENDORS.index(name), weight_problem(base_layer, dtype)


def common_problem(layer: Any, settings: Settings) -> str:
    """Why a layer must stay vLLM's altogether; empty if some path of ours can serve it."""
    a = layer.lora_a_stacked[0]
    capability = capability_of(a.device)
    if settings.path == "stock":
        return "path=stock is set"
    if a.device.type not in ("cuda", "cpu"):
        return f"its adapters are on {a.device}"
    if capability is not None and capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; 8.0 is needed"
    if a.dtype not in _SIXTEEN_BIT:
        return f"adapters are {a.dtype}; needed: bfloat16 or float16"
    if getattr(layer, "_enable_aux_cuda_stream", False):
        return "VLLM_LORA_ENABLE_DUAL_STREAM is set: vLLM runs base and adapters on two streams itself"
    if layer.tp_size > 1 and layer.lora_config.fully_sharded_loras:
        return "fully sharded adapters have a collective between A and B"
    if layer.lora_b_stacked[0].shape[-1] > MAX_RANK:
        return f"max_lora_rank is {layer.lora_b_stacked[0].shape[-1]}; up to {MAX_RANK} is supported"
    if len(layer.lora_a_stacked) > MAX_SLICES:
        return f"it packs {len(layer.lora_a_stacked)} projections; up to {MAX_SLICES} are supported"
    return ""


def decide(layer: Any, settings: Settings, *, runs_base_forward: bool, parallel_config: Any = None) -> Decision:
    """The kind, mode and reason of a LoRA layer whose base is loaded and whose slots exist.

    runs_base_forward: vLLM calls the base layer's own forward here (replicated layers, subclasses).
    """
    reason = common_problem(layer, settings)
    if reason:
        return Decision(Kind.STOCK, Mode(), reason)
    base_layer, method = layer.base_layer, layer.base_layer.quant_method
    dtype = layer.lora_a_stacked[0].dtype
    matched = hasattr(method, "accumulate")  # layers.MatchedLinearMethod
    forced = 0 if settings.path in ("auto", "op") else PATHS.index(Path(settings.path)) + 1
    vendor, reason = 0, "vLLM calls the base layer's own forward here" if runs_base_forward else ""
    if not reason and matched:
        reason = weight_problem(base_layer, dtype)
    elif not reason:
        vendor, reason = fp8_problem(base_layer, method, dtype)
    capability = capability_of(layer.lora_a_stacked[0].device)
    if not reason and capability is not None and capability < (8, 9):
        reason = f"the GPU has compute capability {capability[0]}.{capability[1]}; FP8 needs 8.9"
    if not reason and getattr(parallel_config, "use_ubatching", False):
        reason = "two batches run at once (use_ubatching) and would share the decode workspace"
    if not reason and sum(b.shape[-2] for b in layer.lora_b_stacked) != base_layer.weight.shape[1]:
        widths = [b.shape[-2] for b in layer.lora_b_stacked]
        reason = f"its slices {widths} do not cover the base's {base_layer.weight.shape[1]} columns (padded?)"
    if not reason and layer.lora_a_stacked[0].shape[-1] != base_layer.weight.shape[0]:
        reason = f"its adapters read {layer.lora_a_stacked[0].shape[-1]} columns, the base {base_layer.weight.shape[0]}"
    mode = Mode(vendor, int(matched), forced, int(settings.batch_invariant))
    if not reason:
        where = layer.lora_a_stacked[0].device
        scratch(where).announce(
            base_layer.weight.shape[0], len(layer.lora_a_stacked), layer.lora_b_stacked[0].shape[-1]
        )
        return Decision(Kind.FUSED, mode)
    return Decision(Kind.BESIDE, mode, reason)


def meta_problem(punica_wrapper: Any) -> str:
    """Why a wrapper's batch description cannot be read; empty if it can."""
    meta = getattr(punica_wrapper, "token_mapping_meta", None)
    if meta is None:
        return f"{type(punica_wrapper).__name__} has no token_mapping_meta"
    missing = [name for name in KERNEL_META_FIELDS if not isinstance(getattr(meta, name, None), torch.Tensor)]
    return f"token_mapping_meta has no {', '.join(missing)}" if missing else ""


class StoredSlots:
    """A layer's adapter slots in FP8 (one scale a row of A [R, K] and of B [N, R]; half the bytes of 16 bit) or NVFP4 (little over a
    quarter; a global scale a slot).

    a, b: what the operators take: the stacks' codes [L, 1, R, K] and [L, 1, N_s, R]; a_scales, b_scales: see `gpu_ops.Call`. vLLM's own 16-bit stacks move to host memory: `set_lora` and read-back go there, the GPU holds the codes only.
    """

    def __init__(
        self, fmt: Format, lora_a: tuple[torch.Tensor, ...], lora_b: tuple[torch.Tensor, ...], device: torch.device
    ) -> None:
        """Raises ValueError where K or the largest rank is no multiple of 16 (nvfp4)."""
        self.format, self.device = fmt, device
        for stack in (*lora_a, *lora_b):
            if fmt is Format.NVFP4 and stack.shape[-1] % BLOCK:
                raise ValueError(
                    f"adapters=nvfp4: a stack has {stack.shape[-1]} columns; needed: multiples of {BLOCK} (features and "
                    "max_lora_rank); use adapters=fp8"
                )
        self.host_a = tuple(torch.zeros_like(a, device="cpu") for a in lora_a)
        self.host_b = tuple(torch.zeros_like(b, device="cpu") for b in lora_b)
        self.a, self.a_scales = self._make(lora_a)
        self.b, self.b_scales = self._make(lora_b)

    def _make(self, stacks: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        where = self.device
        if self.format is Format.FP8_E4M3:
            codes = [torch.zeros(s.shape, dtype=torch.float8_e4m3fn, device=where) for s in stacks]
            return codes, [torch.ones(s.shape[0], s.shape[2], dtype=torch.float32, device=where) for s in stacks]
        codes = [torch.zeros(*s.shape[:-1], s.shape[-1] // 2, dtype=torch.uint8, device=where) for s in stacks]
        shapes = [(s.shape[0], s.shape[2], s.shape[3] // BLOCK) for s in stacks]
        blocks = [torch.zeros(shape, dtype=torch.uint8, device=where).view(torch.float8_e4m3fn) for shape in shapes]
        return codes, blocks + [torch.ones(s.shape[0], dtype=torch.float32, device=where) for s in stacks]

    def clear(self, index: int) -> None:
        """Empty slot `index`, as it was made. Without quantising zeros: vLLM empties every slot it fills, and all of them at start."""
        for codes, scales in ((self.a, self.a_scales), (self.b, self.b_scales)):
            for code in codes:
                code[index].view(torch.uint8).zero_()
            for scale in scales:
                if scale.dtype == torch.float32:
                    scale[index : index + 1].fill_(1.0)
                else:  # a block's scale in e4m3
                    scale[index].view(torch.uint8).zero_()

    def store(self, index: int) -> None:
        """Quantise slot `index` of the host stacks into the GPU's codes."""
        for stacks, codes, scales in ((self.host_a, self.a, self.a_scales), (self.host_b, self.b, self.b_scales)):
            for s, (stack, code) in enumerate(zip(stacks, codes, strict=True)):
                matrix = stack[index, 0].to(self.device)
                if self.format is Format.NVFP4:
                    stored = quantize_nvfp4_ref(matrix)
                    assert stored.global_scale is not None, "NVFP4 carries a global scale"
                    scales[len(stacks) + s][index : index + 1].copy_(stored.global_scale)
                else:
                    stored = quantize_rows_ref(matrix)
                assert stored.scales is not None, "both formats carry scales"
                code[index, 0].copy_(stored.values)
                scales[s][index].copy_(stored.scales)
