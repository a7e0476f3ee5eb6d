"""The custom operators that the plugin's layers call, and the paths inside them.

    y = x W^T (vLLM's FP8 arithmetic, or W8A16) + bias + (x A^T) B^T          epilora::lora_linear, returns y
    y = x W^T (codes widened, activations unrounded) + bias                   epilora::w8a16_linear, returns y
    y += (x A^T) B^T beside any base layer                                    epilora::lora_add_, changes y

vLLM's compiler sees one opaque node a projection, so graphs are captured whole and never split. Inside, the number of
tokens is real: the path is looked up for it (`path_table`) on every eager call, and once per captured batch size. A batch
without adapters runs vLLM's own base arithmetic and nothing else.

Paths of `lora_linear`:
    decode           `kernels.lora_decode`: prologue and GEMM in two overlapping launches, up to 32 tokens
    hybrid           shrink, vendor GEMM, expand-add, one after another
    hybrid_streams   the shrink on a second stream, beside the GEMM
    fused            K1 (quantise and shrink), then K2 over the tokens in adapter order, any number of them
    vendor           the vendor GEMM, then vLLM's own LoRA kernels (not on a CPU)
With W8A16 there is one: shrink, then one GEMM that adds the up-projection. With batch_invariant=1 there is one too, which runs for
batches without adapters as well (`kernels.batch_invariant`).

What vLLM leaves in its buffers is not trusted: a graph replayed with fewer tokens or without any adapter finds old slots in
`token_slots`; the kernels read it together with the active slots and skip what is out of range.

Legend: M tokens, N out features, K in features, R rank, L adapter slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from epilora.errors import UnsupportedKernel
from epilora.kernels import batch_invariant, w8a16
from epilora.kernels import lora_expand as beside
from epilora.kernels.fused_lora_gemm import fused_lora_gemm
from epilora.kernels.lora_decode import MAX_TOKENS, DecodeWorkspace, config_for, lora_decode
from epilora.kernels.lora_expand import TokenGroups
from epilora.quant.formats import Format, ScaleAxis, format_of_torch_dtype
from epilora.quant.nvfp4 import BLOCK
from epilora.quant.operand import Operand

from . import direct
from .counters import CALLS

# Kernel classes of vLLM whose GEMM can be called on codes that are quantised already; the index is part of the traced graph.
VENDORS = ("CutlassFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel")


class Path(StrEnum):
    """How one projection of a batch runs."""

    DECODE = "decode"
    HYBRID = "hybrid"
    HYBRID_STREAMS = "hybrid_streams"
    VENDOR = "vendor"
    MATCHED = "matched"
    INVARIANT = "invariant"
    FUSED = "fused"


PATHS = tuple(Path)


@dataclass(frozen=True)
class Mode:
    """What is fixed for a layer, packed into one integer so that layers of one shape are one graph to the compiler.

    vendor: index into VENDORS. matched: W8A16. forced: index into PATHS plus one, 0 for the timed choice. batch_invariant:
    one order of sums at every batch size.
    """

    vendor: int = 0
    matched: int = 0
    forced: int = 0
    batch_invariant: int = 0

    def pack(self) -> int:
        return self.vendor | self.matched << 4 | self.forced << 5 | self.batch_invariant << 9

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def unpack(number: int) -> Mode:
        return Mode(number & 15, number >> 4 & 1, number >> 5 & 15, number >> 9 & 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """vLLM's description of the tokens of a step (its LoRAKernelMeta), at addresses that are fixed for the process' life.

    The operators take its `token_lora_mapping` only and find the rest here. Among it are flags in host memory: as
    arguments they would make vLLM's compiler take the operator's result for unaligned, and every kernel that reads it
    would load two bytes at a time.

    no_lora: [1] bool, host: no token has an adapter. num_active: [1] int32, host: what vLLM's own kernels launch for.
    """

    groups: TokenGroups
    no_lora: torch.Tensor
    num_active: torch.Tensor

    @property
    def active_slots(self) -> torch.Tensor:
        return self.groups.active_slots


# by the address of a mapping, which is held beside its description: a freed one's address could become another tensor's
_batches: dict[int, tuple[torch.Tensor, Batch]] = {}


def register_batch(meta: Any, *, exact_count: bool = False) -> torch.Tensor:
    """Make a LoRAKernelMeta known; returns its `token_lora_mapping`, which names it in calls.

    exact_count: vLLM's `specialize_active_lora`. Registered again: replaced.
    """
    count = meta.num_active_loras_cpu if exact_count else meta.default_num_active_loras_cpu
    groups = TokenGroups(
        meta.token_indices_sorted_by_lora_ids,
        meta.active_lora_ids,
        meta.num_tokens_per_lora,
        meta.lora_token_start_loc,
    )
    mapping = meta.token_lora_mapping
    _batches[mapping.data_ptr()] = mapping, Batch(groups, meta.no_lora_flag_cpu, count)
    return mapping


def batch_of(token_slots: torch.Tensor) -> Batch:
    """The description that a mapping belongs to. Raises KeyError for one that was not registered."""
    found = _batches.get(token_slots.data_ptr())
    if found is None:
        raise KeyError(
            f"epilora operator: token_slots at {token_slots.data_ptr():#x} belongs to no registered batch description; "
            "give the whole token_lora_mapping of a LoRAKernelMeta that register_batch has seen"
        )
    return found[1]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one projection, as the operator gets them.

    x: [M, K], 16 bit. codes, x_scale: x in FP8 and one scale a token, where vLLM's compiler quantised it; else None.
    weight: [K, N] e4m3 with strides (1, K). weight_scale: fp32, one or N values. bias: [N] or None.
    lora_a, lora_b: per slice [L, 1, R, K] and [L, 1, N_s, R], x's dtype; or e4m3 with a_scales [L, R] and b_scales [L, N_s]; or NVFP4
    (uint8, two codes a byte) with a_scales and b_scales: the S block scales (e4m3 [L, ., . / 16]), then the S global ones (fp32 [L]).
    token_slots: [>= M] int32, the slot of each token, vLLM's `token_lora_mapping`; batch: the description it belongs to.
    """

    x: torch.Tensor
    codes: torch.Tensor | None
    x_scale: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    lora_a: Sequence[torch.Tensor]
    lora_b: Sequence[torch.Tensor]
    a_scales: Sequence[torch.Tensor]
    b_scales: Sequence[torch.Tensor]
    token_slots: torch.Tensor
    batch: Batch

    @property
    def key(self) -> tuple[int, ...]:
        """What the choice of a path depends on, beside the number of tokens."""
        a, b = self.lora_a[0], self.lora_b[0]
        bits = 4 if a.dtype == torch.uint8 else 8 * a.element_size()
        return (*self.weight.shape, len(self.lora_a), b.shape[-2], a.shape[0], a.shape[-2], bits)

    def adapters(self) -> tuple[list[Operand], list[Operand]]:
        """(A, B) per slice as operands."""
        return _operands(self.lora_a, self.a_scales), _operands(self.lora_b, self.b_scales)

    def base(self) -> Operand:
        """The weight as the [N, K] matrix that lies in memory."""
        axis = ScaleAxis.TENSOR if self.weight_scale.numel() == 1 else ScaleAxis.CHANNEL
        return Operand(self.weight.t(), Format.FP8_E4M3, axis, self.weight_scale)


def _operands(stacks: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
    if stacks[0].dtype == torch.uint8:
        parts = zip(stacks, scales[: len(stacks)], scales[len(stacks) :], strict=True)
        return [
            Operand(s.squeeze(1), Format.NVFP4, ScaleAxis.BLOCK, scale, block=(1, BLOCK), global_scale=whole)
            for s, scale, whole in parts
        ]
    if scales:
        pairs = zip(stacks, scales, strict=True)
        return [Operand(s.squeeze(1), Format.FP8_E4M3, ScaleAxis.CHANNEL, scale) for s, scale in pairs]
    fmt = format_of_torch_dtype(str(stacks[0].dtype).removeprefix("torch."))
    return [Operand(stack.squeeze(1), fmt) for stack in stacks]


# ---- scratch shared by all layers of a device -------------------------------------------------------------------------


class Scratch:
    """Decode workspace and second stream of one device. One forward pass at a time may use them."""

    def __init__(self) -> None:
        self.max_k = self.max_h = 0
        self._made: list[DecodeWorkspace] = []  # older ones stay: captured graphs hold their addresses
        self._stream: torch.cuda.Stream | None = None

    def announce(self, K: int, slices: int, rank: int) -> None:
        """A layer of this size will be run; before the first call that needs it."""
        self.max_k = max(self.max_k, K)
        self.max_h = max(self.max_h, DecodeWorkspace.h_values(slices, rank))

    def workspace(self, device: torch.device) -> DecodeWorkspace:
        newest = self._made[-1] if self._made else None
        if newest is None or newest.h.numel() < self.max_h or newest.codes.numel() < MAX_TOKENS * self.max_k:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("lora_linear: the decode workspace must grow during capture; run a batch before it")
            newest = DecodeWorkspace(device, max_k=self.max_k, max_h=self.max_h)
            self._made.append(newest)
        return newest

    def side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if self._stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        return self._stream


_scratch: dict[torch.device, Scratch] = {}


def scratch(device: torch.device) -> Scratch:
    """The scratch of a device."""
    found = _scratch.get(device)
    if found is None:
        found = _scratch[device] = Scratch()
    return found


# ---- the base alone ---------------------------------------------------------------------------------------------------


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8 by vLLM's own kernel: codes [M, K] and scales [M, 1]. Plain torch on a CPU."""
    if x.device.type == "cpu":
        from epilora.kernels.quantize import quantize_ref

        return quantize_ref(x)
    from vllm import _custom_ops

    return _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)


def vendor_gemm(vendor: int, call: Call) -> torch.Tensor:
    """[M, N] by the GEMM that vLLM chose for the layer, on vLLM's codes if it made them."""
    codes, x_scale = call.codes, call.x_scale
    if codes is None or x_scale is None:
        codes, x_scale = quantise(call.x)
    if vendor == 0:
        from vllm import _custom_ops

        return _custom_ops.cutlass_scaled_mm(
            codes, call.weight, scale_a=x_scale, scale_b=call.weight_scale, out_dtype=call.x.dtype, bias=call.bias
        )
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch

    kernel = getattr(pytorch, VENDORS[vendor])
    shape = [call.x.shape[0], call.weight.shape[1]]
    # Its arithmetic reads nothing of the kernel object; rows past M are vLLM's padding and are cut off.
    return kernel.apply_scaled_mm(
        None, A=codes, B=call.weight, out_dtype=call.x.dtype, As=x_scale, Bs=call.weight_scale, bias=call.bias, output_shape=shape
    )  # fmt: skip


def _implementation(x: torch.Tensor) -> str | None:
    """Plain torch on a CPU, also where Triton's interpreter is on: an engine would take minutes a step in it."""
    return "reference" if x.device.type == "cpu" else None


# ---- paths ------------------------------------------------------------------------------------------------------------


def bucket(M: int) -> int:
    """The power of two that tile sizes are chosen for: few variants to compile, whatever batch sizes come."""
    return 1 << max(0, M - 1).bit_length()


def _decode(call: Call, mode: Mode) -> torch.Tensor:
    M, K = call.x.shape
    a, b = call.adapters()
    L, R, _ = a[0].values.shape
    where = call.x.device
    config = None
    if where.type == "cuda":
        config = config_for(bucket(M), call.weight.shape[1], K, R, L, device_name=torch.cuda.get_device_name(where))
    return lora_decode(
        call.x, call.base(), a, b, call.token_slots, workspace=scratch(where).workspace(where), bias=call.bias,
        active_lora_ids=call.batch.active_slots, config=config, implementation=_implementation(call.x),
    )  # fmt: skip


def _tiles(call: Call) -> tuple[beside.ShrinkConfig, beside.ExpandConfig]:
    K = call.x.shape[1]
    L, R = call.lora_a[0].shape[0], call.lora_a[0].shape[-2]
    N, S, M = sum(b.shape[-2] for b in call.lora_b), len(call.lora_a), bucket(call.x.shape[0])
    return beside.shrink_config_for(M, S, K, R, L), beside.expand_config_for(M, S, N, R, L)


def _hybrid(call: Call, mode: Mode, *, streams: bool) -> torch.Tensor:
    shrink, expand = _tiles(call)
    side = scratch(call.x.device).side_stream(call.x.device) if streams else None

    def gemm() -> torch.Tensor:
        return vendor_gemm(mode.vendor, call)

    plan = direct.plan_for(call, bucket(call.x.shape[0]), shrink, expand, streams=streams)
    if plan is not None:
        return plan.run(call.x, gemm, side)
    a, b = call.adapters()
    return beside.lora_beside_gemm(
        gemm, call.x, a, b, call.batch.groups, side_stream=side, shrink=shrink, expand=expand,
        implementation=_implementation(call.x),
    )  # fmt: skip


def stock_lora(y: torch.Tensor, call: Call) -> torch.Tensor:
    """Add the adapters to y in place with vLLM's own kernels."""
    if call.x.device.type != "cuda":
        raise UnsupportedKernel(f"path vendor: vLLM's LoRA kernels need a GPU, tensors are on {call.x.device}")
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink

    x, M = call.x.contiguous(), call.x.shape[0]
    h = torch.empty(len(call.lora_a), M, call.lora_b[0].shape[-1], dtype=torch.float32, device=x.device)
    groups, batch = call.batch.groups, call.batch
    meta = (
        call.token_slots[:M], groups.sorted_tokens[:M], groups.counts, groups.starts, groups.active_slots, batch.no_lora,
        batch.num_active,
    )  # fmt: skip
    lora_shrink(x, list(call.lora_a), h, *meta, 1.0)
    lora_expand(h, list(call.lora_b), y, *meta, offset_start=0, add_inputs=True)
    return y


def _fused(call: Call, mode: Mode) -> torch.Tensor:
    M, K = call.x.shape
    a, b = call.adapters()
    shrink, _ = _tiles(call)
    how, groups = _implementation(call.x), call.batch.groups
    codes, x_scale, wanted = call.codes, call.x_scale, None
    if codes is None or x_scale is None:
        codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=call.x.device)
        x_scale = torch.empty(M, 1, dtype=torch.float32, device=call.x.device)
        wanted = (codes, x_scale)
    h = beside.lora_shrink_grouped(call.x, a, groups, quantize_to=wanted, config=shrink, implementation=how)
    return fused_lora_gemm(
        codes, x_scale, call.base(), h.permute(0, 2, 1, 3), b, call.token_slots, sorted_tokens=groups.sorted_tokens,
        active_lora_ids=groups.active_slots, bias=call.bias, out_dtype=call.x.dtype, implementation=how,
    )  # fmt: skip


def _vendor(call: Call, mode: Mode) -> torch.Tensor:
    return stock_lora(vendor_gemm(mode.vendor, call), call)


def _matched(call: Call, mode: Mode) -> torch.Tensor:
    a, b = call.adapters()
    shrink, _ = _tiles(call)
    how = _implementation(call.x)
    h = beside.lora_shrink_grouped(call.x, a, call.batch.groups, config=shrink, implementation=how)
    term = w8a16.LoraTerm(h, b, call.token_slots, call.batch.groups)
    return w8a16.w8a16_gemm(call.x, call.base(), bias=call.bias, lora=term, implementation=how)


def _invariant(call: Call, mode: Mode) -> torch.Tensor:
    a, b = call.adapters()
    how = _implementation(call.x)
    if mode.matched:
        return batch_invariant.w8a16_linear(
            call.x, call.base(), a, b, call.token_slots, call.batch.groups, bias=call.bias, implementation=how
        )
    where = call.x.device
    return batch_invariant.lora_linear(
        call.x, call.base(), a, b, call.token_slots, workspace=scratch(where).workspace(where), bias=call.bias,
        active_lora_ids=call.batch.active_slots, implementation=how,
    )  # fmt: skip


_RUN: dict[Path, Callable[[Call, Mode], torch.Tensor]] = {
    Path.DECODE: _decode,
    Path.HYBRID: functools.partial(_hybrid, streams=False),
    Path.HYBRID_STREAMS: functools.partial(_hybrid, streams=True),
    Path.VENDOR: _vendor,
    Path.MATCHED: _matched,
    Path.INVARIANT: _invariant,
    Path.FUSED: _fused,
}


def paths_for(
    capability: tuple[int, int] | None,
    M: int,
    *,
    matched: bool = False,
    batch_invariant: bool = False,
    stored: bool = False,
) -> list[Path]:
    """Paths for M tokens, the default first; which of them is fastest is timed.

    capability: the GPU's compute capability, None on a CPU. matched: 16-bit activations (one fused path on every GPU). stored: slots in
    FP8 or NVFP4, which vLLM's own kernels do not read. Before 9.0 (Ada) there is no programmatic launch for the decode path, and the
    vendor's FP8 GEMM is slow for few tokens: K1 and K2 come first at every size.
    """
    if batch_invariant:
        return [Path.INVARIANT]
    if matched:
        return [Path.MATCHED]
    found = [Path.HYBRID_STREAMS, Path.HYBRID] if M >= 64 else [Path.HYBRID, Path.HYBRID_STREAMS]
    if capability is not None and capability < (9, 0):
        found.insert(0, Path.FUSED)
    if M <= MAX_TOKENS:
        found.insert(0, Path.DECODE)  # before 9.0 the same two steps as Triton kernels
    if capability is not None and not stored:
        found.append(Path.VENDOR)
    return found


def candidates(call: Call, mode: Mode) -> list[Path]:
    """The paths that could run these arguments, the default for their number of tokens first."""
    return paths_for(
        capability_of(call.x.device), call.x.shape[0], matched=bool(mode.matched), batch_invariant=bool(mode.batch_invariant),
        stored=bool(call.a_scales),
    )  # fmt: skip


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def execute(path: Path, call: Call, mode: Mode) -> torch.Tensor:
    """y [M, N] by one path, whatever the table says."""
    return _RUN[path](call, mode)


def base_linear(call: Call, mode: Mode) -> torch.Tensor:
    """The projection without adapters: vLLM's arithmetic, or W8A16. Batch-invariant: the same kernels as with adapters."""
    if mode.batch_invariant:
        return _invariant(call, mode)
    if mode.matched:
        return w8a16.w8a16_gemm(call.x, call.base(), bias=call.bias, implementation=_implementation(call.x))
    return vendor_gemm(mode.vendor, call)


def path_of(call: Call, mode: Mode) -> Path:
    """The path for these arguments: the forced one, else the timed one, else the default. One that takes fewer tokens than
    there are gives way to the default."""
    if mode.matched or mode.batch_invariant:
        return candidates(call, mode)[0]
    from .path_table import lookup

    M = call.x.shape[0]
    found = PATHS[mode.forced - 1] if mode.forced else lookup(call.key, M)
    if found is None or (found is Path.DECODE and M > MAX_TOKENS):
        return candidates(call, mode)[0]
    return found


# ---- registration -----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("epilora", "FRAGMENT")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor? codes, Tensor? x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor[] lora_a, "
    "Tensor[] lora_b, Tensor[] a_scales, Tensor[] b_scales, Tensor token_slots, int mode) -> Tensor"
)
_LIBRARY.define("w8a16_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")
_LIBRARY.define(
    "lora_add_(Tensor(a!) y, Tensor x, Tensor[] lora_a, Tensor[] lora_b, Tensor[] a_scales, Tensor[] b_scales, "
    "Tensor token_slots, int mode) -> ()"
)


def _lora_linear(*arguments: Any) -> torch.Tensor:
    call, mode = Call(*(*arguments[:-1], batch_of(arguments[-2]))), Mode.unpack(arguments[-1])
    M = call.x.shape[0]
    if M == 0:
        return call.x.new_empty(0, call.weight.shape[1])
    if call.batch.no_lora.item():
        CALLS["base_only"] += 1
        return base_linear(call, mode)
    path = path_of(call, mode)
    CALLS[f"lora_{path.value}"] += 1
    return execute(path, call, mode)


def _lora_linear_fake(x: torch.Tensor, codes: Any, x_scale: Any, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _w8a16_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    CALLS["base_w8a16"] += 1
    axis = ScaleAxis.TENSOR if weight_scale.numel() == 1 else ScaleAxis.CHANNEL
    base = Operand(weight.t(), Format.FP8_E4M3, axis, weight_scale)
    return w8a16.w8a16_gemm(x, base, bias=bias, implementation=_implementation(x))


def _w8a16_linear_fake(x: torch.Tensor, weight: torch.Tensor, weight_scale: Any, bias: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _lora_add(y: torch.Tensor, x: torch.Tensor, *arguments: Any) -> None:
    mode = Mode.unpack(arguments[-1])
    call = Call(*(x, None, None, y, y, None, *arguments[:-1], batch_of(arguments[-2])))
    if x.shape[0] == 0 or call.batch.no_lora.item():
        return
    forced = PATHS[mode.forced - 1] if mode.forced else None
    if forced is Path.VENDOR or y.dtype != x.dtype:
        CALLS["lora_vendor"] += 1
        stock_lora(y, call)
        return
    CALLS["lora_beside"] += 1
    a, b = call.adapters()
    shrink, expand = _tiles(call)
    how = _implementation(x)
    h = beside.lora_shrink_grouped(x, a, call.batch.groups, config=shrink, implementation=how)
    beside.lora_expand_add(y, h, b, call.batch.groups, config=expand, implementation=how)


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("lora_linear", _lora_linear, _key)
    _LIBRARY.impl("w8a16_linear", _w8a16_linear, _key)
    _LIBRARY.impl("lora_add_", _lora_add, _key)
torch.library.register_fake("epilora::lora_linear", _lora_linear_fake, lib=_LIBRARY)
torch.library.register_fake("epilora::w8a16_linear", _w8a16_linear_fake, lib=_LIBRARY)
torch.library.register_fake("epilora::lora_add_", lambda *_: None, lib=_LIBRARY)
