"""The decode path: one projection with adapters for 1 to 32 tokens, in two launches.

    xq, x_scale = quantise(x);  h = x A^T          prologue (extra blocks of the shrink quantise)
    y = (xq W^T) w_scale x_scale + bias + h B^T    GEMM, a programmatic dependent of the prologue

For one token (and without adapters up to four, where that is faster) both steps are one launch: every block quantises for itself, does
a share of the shrink and gets the others' shares as values beside the number of the call. Its blocks wait for each other, so all
of them must be resident at once: at most one a multiprocessor, and not on more than one stream at a time.

On sm_90 and newer the kernels are CUDA C++ (`cuda/decode.cu`): the GEMM fills a ring of shared memory with weights while
the prologue still runs, starts to multiply when the tokens' codes are there (one flag a token), and waits for the prologue's
end only in the warps that do the up-projection, beside the main loop. With `overlap_previous` the prologue is itself a
dependent of whatever ran before, waiting before it reads x, so that the weights of this projection start to stream in the
tail of the previous kernel. Flags hold a number of the call, are cleared by the last block that saw them, and are set by
blocks that started before the waiting ones could: they neither go stale nor deadlock. Elsewhere (sm_89, odd shapes) the same two steps
run as Triton kernels. Which one ran shows in `dispatch.calls()`.

Legend: M tokens, N out features, K in features, R rank, S slices, L adapter slots.
Source: section 3.1 of the EpiLoRA paper.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from ..errors import UnsupportedKernel
from ..quant.block_fp8 import BLOCK as GROUP
from ..quant.block_fp8 import quantize_groups_ref
from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand
from . import fused_lora_gemm as k2
from . import lora_shrink as k1
from .arguments import check_weight, shared_limit, weight_kind
from .decode_config import MAX_TOKENS, DecodeConfig, config_for, invariant_config, is_legal
from .decode_launch import DecodeWorkspace, compile_kernels, device_facts, launch, supports_cuda
from .dispatch import Implementation, choose, interpreter_is_on
from .quantize import ACTIVATION_DTYPES, quantize, quantize_groups, quantize_ref
from .tiles import check, check_tensor

__all__ = [
    "MAX_TOKENS",
    "DecodeConfig",
    "DecodeWorkspace",
    "compile_kernels",
    "config_for",
    "is_legal",
    "lora_decode",
    "lora_decode_ref",
    "supports_cuda",
]

logger = logging.getLogger(__name__)


def lora_decode_ref(
    x: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[Operand] = (),
    lora_b: Sequence[Operand] = (),
    token_lora_indices: torch.Tensor | None = None,
    *,
    active_lora_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N] in fp32: quantise, GEMM, shrink and expand one after another, h not rounded."""
    codes, scale = quantize_groups_ref(x) if weight.axis is ScaleAxis.BLOCK else quantize_ref(x)
    h = None
    if len(lora_a):
        assert token_lora_indices is not None, "adapters need token_lora_indices"
        h = k1.lora_shrink_ref(x, lora_a, token_lora_indices[: x.shape[0]], active_lora_ids)[None]
    return k2.fused_lora_gemm_ref(
        codes, scale, weight, h, lora_b, token_lora_indices, active_lora_ids=active_lora_ids, bias=bias
    )


def lora_decode(
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
    config: DecodeConfig | None = None,
    distinct_adapters: int | None = None,
    overlap_previous: bool = True,
    use_pdl: bool = True,
    batch_invariant: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """One projection of a decode batch, with or without adapters.

    x: [M, K] bf16 or fp16, 1 <= M <= 32 (0 returns at once). weight: FP8 operand [N, K] contiguous, scale per tensor, channel
    or 128 x 128 block.
    lora_a, lora_b: one operand per slice, [L, R, K] and [L, N_s, R] in x's dtype, FP8 with row scales or NVFP4; empty: no adapters.
    token_lora_indices: [>= M] int32; entries outside 0 .. L-1 (stale, padded) mean none. active_lora_ids: see `lora_shrink`.
    bias: [N] in x's dtype. out: [M, N] in x's dtype. workspace: shared scratch, see `DecodeWorkspace`.
    config, distinct_adapters: launch configuration, or the number of adapters to choose one for; see `config_for`.
    overlap_previous: the prologue may start before the previous kernel of the stream has ended; it waits before it reads x, slot
    ids or adapters, and only weights, which no kernel of a forward pass writes, are read earlier.
    use_pdl: False launches both kernels as ordinary ones (for comparison).
    batch_invariant: the configuration depends on the shape alone, so that a row's bits are the same at every M; see `batch_invariant`.
    implementation: "cuda", "triton", "interpreter" or "reference"; default: cuda where the device and shape allow it.
    Returns out. Allocates only when `out` is None; never synchronises. Raises TypeError, ValueError or UnsupportedKernel.
    """
    name = "lora_decode"
    if str(getattr(implementation, "value", implementation)) != "reference":
        check_tensor(name, "x", x, dim=2, dtypes=ACTIVATION_DTYPES)
    M, K = x.shape
    check(M <= MAX_TOKENS, name, f"x has {M} tokens; allowed: 0 to {MAX_TOKENS} (use the hybrid path above)")
    if weight.format is Format.NVFP4:
        raise UnsupportedKernel(
            f"{name}: weight is nvfp4; use w8a16_gemm (16-bit activations), or quantize_nvfp4 and fused_lora_gemm"
        )
    N = weight.values.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device) if out is None else out
    check(
        y.shape == (M, N) and y.dtype == x.dtype, name, f"out is {y.dtype} {tuple(y.shape)}; needed: {x.dtype} {(M, N)}"
    )
    has_lora = len(lora_a) > 0
    check(
        len(lora_a) == len(lora_b), name, f"{len(lora_a)} slices of lora_a, {len(lora_b)} of lora_b; they come in pairs"
    )
    check(not has_lora or token_lora_indices is not None, name, "lora_a is given without token_lora_indices")
    if M == 0:
        return y
    rank = lora_a[0].values.shape[1] if has_lora else 0
    num_slots = lora_a[0].values.shape[0] if has_lora else 0
    slices = [o.values.shape[1] for o in lora_b] if has_lora else [N]
    asked = None if implementation is None else str(getattr(implementation, "value", implementation))
    if asked in (None, "cuda"):
        why = supports_cuda(x.device)
        if not why:
            name_of_gpu = torch.cuda.get_device_name(x.device)
            if batch_invariant and config is None:
                config = invariant_config(N, K)
            config = config or config_for(
                M, N, K, rank, num_slots, device_name=name_of_gpu, distinct_adapters=distinct_adapters
            )
        why = why or _unsupported_shape(config, x, y, weight, lora_a, lora_b, slices, rank)
        if not why:
            choose(name, x.device, "cuda")
            _check_all(name, x, weight, lora_a, lora_b, token_lora_indices, active_lora_ids, bias, y)
            launch(
                x,
                weight,
                lora_a,
                lora_b,
                token_lora_indices,
                workspace,
                active_lora_ids,
                bias,
                y,
                config,
                slices,
                overlap_previous,
                use_pdl,
            )
            return y
        if asked == "cuda":
            raise UnsupportedKernel(f"{name}: implementation=cuda asked, but {why}; use implementation='triton'")
        if x.is_cuda and not interpreter_is_on():
            _tell_once(f"{name} runs as Triton kernels: {why}")
    picked = choose(name, x.device, asked)
    if picked is Implementation.REFERENCE:
        return y.copy_(
            lora_decode_ref(x, weight, lora_a, lora_b, token_lora_indices, active_lora_ids=active_lora_ids, bias=bias)
        )
    grouped = weight.axis is ScaleAxis.BLOCK
    G = -(-K // GROUP) if grouped else 1
    codes = workspace.codes[: M * K].view(M, K).view(torch.float8_e4m3fn)
    scale = workspace.scale[: M * G].view(M, G)
    pdl = use_pdl and picked is Implementation.TRITON and x.is_cuda and device_facts(x.device.index or 0)[0] >= 90
    h = None
    if has_lora:
        assert token_lora_indices is not None, "checked above: lora_a needs them"
        shrink = k1.config_for(MAX_TOKENS if batch_invariant else M, K, rank, num_slots)
        shape = (shrink.splits, len(lora_a), M, rank)
        needed = shape[0] * shape[1] * shape[2] * shape[3]
        check(
            needed <= workspace.h.numel(),
            name,
            f"workspace.h has {workspace.h.numel()} values, {needed} needed; raise max_h",
        )
        h = workspace.h[:needed].view(shape)
        k1.lora_shrink(
            x, lora_a, token_lora_indices, active_lora_ids=active_lora_ids, out=h, quantize_to=(codes, scale),
            quantize_by_groups=grouped, config=shrink, use_pdl=pdl and overlap_previous, implementation=picked,
        )  # fmt: skip
    else:
        (quantize_groups if grouped else quantize)(x, codes_out=codes, scale_out=scale, implementation=picked)
    tiles = None
    if batch_invariant:
        tiles = k2.config_for(MAX_TOKENS, slices, K, shared_limit(x.device), kind=weight_kind(weight))
    return k2.fused_lora_gemm(
        codes, scale, weight, h, lora_b, token_lora_indices, active_lora_ids=active_lora_ids, bias=bias, out=y,
        config=tiles, use_pdl=pdl and has_lora, implementation=picked,
    )  # fmt: skip


@functools.cache
def _tell_once(message: str) -> None:
    logger.warning(message)


def _unsupported_shape(config, x, y, weight, lora_a, lora_b, slices, rank) -> str:
    """Why the CUDA kernels cannot run these operands; empty when they can."""
    M, K = x.shape
    capability, _, limit = device_facts(x.device.index or 0)
    if config.wgmma and capability != 90:
        return f"warpgroup MMAs exist on compute capability 9.0 only, this is {capability / 10}"
    if not is_legal(config, M, K, slices, rank, limit):
        return (
            f"M={M}, K={K}, slices={slices}, rank={rank} with {config} is not legal (K and slices in 16s, rank in 8s)"
        )
    if weight.axis is ScaleAxis.BLOCK:
        return "the base has a scale a block, which the CUDA kernels do not read"
    if any(o.format is Format.NVFP4 for o in (*lora_a, *lora_b)):
        return "adapters are stored in nvfp4, which the CUDA kernels do not read"
    if len({o.scales is None for o in (*lora_a, *lora_b)}) > 1:
        return "lora_a and lora_b are stored in different formats"
    aligned = [x, y, weight.values, *(o.values for o in (*lora_a, *lora_b))]
    if any(t.data_ptr() % 16 for t in aligned) or x.stride(0) % 8 or y.stride(0) % 2:
        return "a tensor does not start at a 16-byte boundary, or x's rows are not 16 bytes apart"
    if any(s % 8 for o in (*lora_a, *lora_b) for s in o.values.stride()[:2]):
        return "adapter rows are not 16 bytes apart"
    return ""


def _check_all(name, x, weight, lora_a, lora_b, indices, active, bias, y) -> None:
    M, K = x.shape
    N = weight.values.shape[0]
    check_weight(name, weight, x.device, K)
    check_tensor(name, "out", y, dim=2, device=x.device)
    if bias is not None:
        check_tensor(name, "bias", bias, dim=1, dtypes=(x.dtype,), device=x.device)
        check(bias.numel() == N, name, f"bias has {bias.numel()} values; needed: {N}")
    if not lora_a:
        return
    num_slots, rank = k1.check_adapters(name, "lora_a", lora_a, x, K)
    k2.check_up_projection(name, lora_b, rank, N, x)
    for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
        check(
            a.values.shape[1] == rank and b.values.shape[0] == num_slots,
            name,
            f"slice {i}: A {tuple(a.values.shape)}, B {tuple(b.values.shape)} do not fit {num_slots} slots of rank {rank}",
        )
        check(
            a.values.stride() == lora_a[0].values.stride(),
            name,
            f"lora_a[{i}] has strides {a.values.stride()}; all slices share strides",
        )
    check_tensor(name, "token_lora_indices", indices, dim=1, dtypes=(torch.int32,), device=x.device)
    check(indices.numel() >= M, name, f"token_lora_indices has {indices.numel()} entries for {M} tokens")
    if active is not None:
        check_tensor(name, "active_lora_ids", active, dim=1, dtypes=(torch.int32,), device=x.device)
