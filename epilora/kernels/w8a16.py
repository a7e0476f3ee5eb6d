"""W8A16 and W4A16: a GEMM that reads FP8 or NVFP4 codes and unrounded 16-bit activations. Codes are widened in registers; no
16-bit copy exists.

    y[m, n] = (sum_k x[m, k] code[n, k]) * scale[n] + bias[n] + sum_r h[m, s(n), r] B[slot(m), n, r]      scale a tensor or channel
    y[m, n] = sum_g scale[n / 128, g] (sum_{k in g} x[m, k] code[n, k]) + ...                              scale a 128 x 128 block
    y[m, n] = (sum_k x[m, k] e2m1[n, k] e4m3[n, k / 16]) * global_scale + ...                              NVFP4

Every e4m3 code, and every e2m1 code times its e4m3 block scale, is exact in bf16 and fp16, so the products are those of x with the
stored numbers, accumulated in fp32; the other scales, the bias and the adapter's term (`lora_epilogue.py`) are applied in fp32 and y
is rounded once. This is the arithmetic of the matched engine and of the trainer (`training.py` launches the same kernel). NaN
codes stay NaN.

Two orientations of one kernel. `swap` (W is the 64-row side of the MMA, tokens its narrow side; widened codes go from
registers straight into wgmma) serves few tokens and, with wide token tiles, large batches; without it widened codes
pass through shared memory. Few tokens leave few output tiles, so K may be split: every part writes its fp32 tile to a
workspace and the block that arrives last adds the parts in the order of K. The counter decides who adds, never the
order, and its last user sets it back to zero: a captured graph replays without resets and no block ever waits for
another.

NVFP4 takes twice the codes a byte and eight at a time (`nvfp4_tile.py`); their tiles come by ordinary loads.

Left out: activations in FP8 or NVFP4 (the fused GEMMs have files of their own).

Legend: M tokens, N out features, K in features, S output slices, R rank, L adapter slots.
Source: sections 3.1 and 3.3 of the EpiLoRA paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..quant.block_fp8 import BLOCK
from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import HOPPER_SHARED_BYTES, WeightKind, check_tokens, check_weight, scales_of, shared_limit, weight_kind
from .dispatch import Implementation, choose
from .lora_epilogue import LoraTerm, add_lora_term, add_lora_term_ref, check_lora_term, term_arguments
from .nvfp4_tile import fragment_order, nvfp4_unit, widen_halves, widen_nvfp4
from .tiles import NVFP4, PER_BLOCK, PER_CHANNEL, PER_TENSOR, scale_kind, widen_e4m3

MAX_SPLIT_K = 8
_COUNTERS = 8192  # output tiles a split-K launch may have


@dataclass(frozen=True)
class W8A16Config:
    """Tiles of the GEMM. swap: W on the MMA's row side. split_k: parts of K summed in order. group_m: tiles of M that
    share W in L2.

    use_tma: weight tiles by the bulk tensor copy engine (compute capability 9.0 or more, K a multiple of 16, codes that start
    on 16 bytes).
    """

    block_m: int
    block_n: int
    block_k: int
    swap: bool
    split_k: int = 1
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 4
    use_tma: bool = False


def w8a16_gemm_ref(
    x: torch.Tensor, weight: Operand, *, bias: torch.Tensor | None = None, lora: LoraTerm | None = None
) -> torch.Tensor:
    """The formula above in plain torch: [M, N] fp32. h is rounded once to x's dtype, as the kernel does."""
    if weight.axis in (ScaleAxis.TENSOR, ScaleAxis.CHANNEL):
        y = (x.float() @ weight.values.float().t()) * scales_of(weight).float().reshape(1, -1)
    else:
        y = x.float() @ dequantize(weight).t()
    if bias is not None:
        y = y + bias.float()
    return y if lora is None else add_lora_term_ref(y, x.dtype, lora)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "num_entries", "num_slots"])
def _w8a16_kernel(
    x_ptr,
    w_ptr,  # pointer, or tensor descriptor of [N, K] with block [BLOCK_N, BLOCK_K]
    ws_ptr,
    wg_ptr,
    bias_ptr,
    y_ptr,
    part_ptr,
    counter_ptr,
    h_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    b3_ptr,
    bs0_ptr,
    bs1_ptr,
    bs2_ptr,
    bs3_ptr,
    bg0_ptr,
    bg1_ptr,
    bg2_ptr,
    bg3_ptr,
    slots_ptr,
    active_ptr,
    M,
    N,
    K,
    n0,
    n1,
    n2,
    n3,
    num_entries,
    num_slots,
    stride_xm,
    stride_ym,
    R: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    LORA: tl.constexpr,  # 0 none, 1 slot 0 for every row, 2 by slots and groups
    B_SCALED: tl.constexpr,  # FP8 with row scales
    B_NVFP4: tl.constexpr,
    SPLIT_H: tl.constexpr,
    W_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    pid_k = pid % SPLIT_K
    tile = pid // SPLIT_K
    band = GROUP_M * tiles_n
    first_m = (tile // band) * GROUP_M
    rows_here = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (tile % band) % rows_here
    pid_n = (tile % band) // rows_here
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    k_from = pid_k * steps * BLOCK_K
    w_row = offs_n if EVEN_N else tl.minimum(offs_n, N - 1)
    if W_SCALE == NVFP4:
        row_bytes = K // 2
        w_tile = w_ptr + w_row.to(tl.int64)[:, None] * row_bytes + (k_from // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
        s_tile = (
            ws_ptr + w_row.to(tl.int64)[:, None] * (K // 16) + (k_from // 16 + tl.arange(0, BLOCK_K // 16))[None, :]
        )
    elif not TMA:
        row_bytes = K
        w_tile = w_ptr + w_row.to(tl.int64)[:, None] * K + (k_from + offs_k)[None, :]  # [BLOCK_N, BLOCK_K]
    if W_SCALE == PER_BLOCK:
        num_groups = tl.cdiv(K, 128)
        s_row = ws_ptr + (w_row // 128) * num_groups
    if USE_PDL:
        # Weights never change: start them to L2, then wait for the launch that wrote x.
        if PREFETCH > 0 and not TMA:
            lines = tl.arange(0, PREFETCH) * 128
            first = k_from // 2 if W_SCALE == NVFP4 else k_from
            line = w_ptr + w_row.to(tl.int64)[:, None] * row_bytes + (first + lines)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    x_row = offs_m if BLOCK_M <= 64 else tl.minimum(offs_m, M - 1)  # wide tiles: clamped rows cost no mask
    x_tile = x_ptr + x_row.to(tl.int64)[:, None] * stride_xm + (k_from + offs_k)[None, :]  # [BLOCK_M, BLOCK_K]
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, steps):
        if TMA:
            w = w_ptr.load([pid_n * BLOCK_N, k_from + step * BLOCK_K])  # zeros beyond N and K
        elif W_SCALE == NVFP4:
            if EVEN_K:
                packed = tl.load(w_tile)
                scale = tl.load(s_tile)
            else:
                left = K - k_from - step * BLOCK_K
                packed = tl.load(w_tile, mask=(tl.arange(0, BLOCK_K // 2) * 2 < left)[None, :], other=0)
                scale = tl.load(s_tile, mask=(tl.arange(0, BLOCK_K // 16) * 16 < left)[None, :], other=0.0)
            s_tile += BLOCK_K // 16
        elif EVEN_K:
            w = tl.load(w_tile)
        else:
            w = tl.load(w_tile, mask=(k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        if BLOCK_M <= 64:
            if EVEN_K:
                x = tl.load(x_tile, mask=mask_m[:, None], other=0.0)
            else:
                x = tl.load(x_tile, mask=mask_m[:, None] & (k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        elif EVEN_K:
            x = tl.load(x_tile)
        else:
            x = tl.load(x_tile, mask=(k_from + step * BLOCK_K + offs_k < K)[None, :], other=0.0)
        if W_SCALE == NVFP4 and SWAP:
            HALF: tl.constexpr = BLOCK_K // 2
            low, high = widen_halves(packed, scale, BLOCK_N, BLOCK_K, dtype)
            x_low, x_high = tl.split(tl.reshape(x, (BLOCK_M, HALF, 2)))
            wide = fragment_order(low, BLOCK_N, HALF)
            acc = tl.dot(wide, tl.trans(fragment_order(x_low, BLOCK_M, HALF)), acc, input_precision="ieee")
            wide = fragment_order(high, BLOCK_N, HALF)
            acc = tl.dot(wide, tl.trans(fragment_order(x_high, BLOCK_M, HALF)), acc, input_precision="ieee")
        elif W_SCALE == NVFP4:
            wide = widen_nvfp4(packed, scale, BLOCK_N, BLOCK_K, dtype)
            acc = tl.dot(x, tl.trans(wide), acc, input_precision="ieee")
        elif W_SCALE == PER_BLOCK:  # the step lies inside one block of K
            wide = widen_e4m3(w, dtype)
            group = tl.minimum((k_from + step * BLOCK_K) // 128, num_groups - 1)
            scale = tl.load(s_row + group)  # [BLOCK_N]
            if SWAP:
                acc += tl.dot(wide, tl.trans(x), input_precision="ieee") * scale[:, None]
            else:
                acc += tl.dot(x, tl.trans(wide), input_precision="ieee") * scale[None, :]
        elif SWAP:
            acc = tl.dot(widen_e4m3(w, dtype), tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(widen_e4m3(w, dtype)), acc, input_precision="ieee")
        x_tile += BLOCK_K
        if W_SCALE == NVFP4:
            w_tile += BLOCK_K // 2
        elif not TMA:
            w_tile += BLOCK_K
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # this block's weights are read: the next launch may begin with its own
    if SPLIT_K > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        if SWAP:
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        base = part_ptr + tile.to(tl.int64) * SPLIT_K * TILE
        tl.store(base + pid_k * TILE + inside, acc)
        tl.debug_barrier()
        ticket = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if ticket != SPLIT_K - 1:
            return
        tl.store(counter_ptr + tile, 0)
        acc = tl.load(base + inside, cache_modifier=".cg")
        for part in tl.static_range(1, SPLIT_K):
            acc += tl.load(base + part * TILE + inside, cache_modifier=".cg")
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if W_SCALE == PER_CHANNEL:
        scale = tl.load(ws_ptr + offs_n, mask=mask_n, other=0.0)
        if SWAP:
            acc = acc * scale[:, None]
        else:
            acc = acc * scale[None, :]
    if W_SCALE == PER_TENSOR:
        acc = acc * tl.load(ws_ptr)
    if W_SCALE == NVFP4:
        acc = acc * (tl.load(wg_ptr) * nvfp4_unit(dtype))
    if HAS_BIAS:
        if SWAP:
            acc += bias[:, None]
        else:
            acc += bias[None, :]
    if LORA > 0:
        acc = add_lora_term(
            acc, h_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr, bs0_ptr, bs1_ptr, bs2_ptr, bs3_ptr, bg0_ptr, bg1_ptr, bg2_ptr, bg3_ptr,
            slots_ptr, active_ptr, M, n0, n1, n2, n3, num_entries, num_slots, offs_m, mask_m, offs_n, pid_n * BLOCK_N,
            R, NUM_SLICES, LORA, B_SCALED, B_NVFP4, SPLIT_H, BLOCK_N, BLOCK_R, SWAP, dtype,
        )  # fmt: skip
    out = acc.to(y_ptr.dtype.element_ty)
    if SWAP:
        out = tl.trans(out)
    y_tile = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    if EVEN_N:
        tl.store(y_tile, out, mask=mask_m[:, None])
    else:
        tl.store(y_tile, out, mask=mask_m[:, None] & mask_n[None, :])


# ---- launch configurations -------------------------------------------------------------------------------------------


def is_legal_w8a16(
    config: W8A16Config, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES, kind: WeightKind | None = None
) -> bool:
    """Whether the config covers K, fits shared memory, and keeps the fp32 tile within 192 registers a thread.

    kind: how the weight is stored; None: FP8 with a scale a tensor or channel. Block scales: a step lies inside a block, and the step's
    own sum takes as many registers as the tile. NVFP4: no copy engine, at least 64 values of K a step.
    """
    powers = all(
        v >= 1 and v & (v - 1) == 0
        for v in (config.block_m, config.block_n, config.block_k, config.num_warps, config.split_k)
    )
    if not powers or config.block_k < 32 or config.block_m < 8 or config.block_n < 16 or config.split_k > MAX_SPLIT_K:
        return False
    steps = triton.cdiv(triton.cdiv(K, config.block_k), config.split_k)
    covered = steps * config.block_k * (config.split_k - 1) < K
    shared = config.num_stages * config.block_k * (2 * config.block_m + config.block_n)
    if not config.swap:
        shared += 2 * config.block_k * config.block_n
    registers = config.block_m * config.block_n // (config.num_warps * 32)
    fits = not config.use_tma or K % 16 == 0
    if kind is ScaleAxis.BLOCK:
        fits = fits and BLOCK % config.block_k == 0
        registers *= 2
    elif kind is Format.NVFP4:
        fits = not config.use_tma and config.block_k >= 64
    return covered and shared <= shared_bytes and registers <= 192 and fits


def w8a16_config_for(
    M: int, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES, kind: WeightKind | None = None
) -> W8A16Config:
    """Default tiles, from searches on an H200: K is split until 256 programs stream weights; wide tiles for many tokens.

    Up to 8 tokens and up to 16 take mma.sync (8-token tiles, or two warps), which beat wgmma there; weight tiles of wide
    tiles come by the copy engine where K allows it. kind: see `is_legal_w8a16`; its tiles are bounded by registers, and only
    NVFP4's for up to 16 tokens have been searched.
    """
    if M <= 64:
        smallest = 16 if kind is Format.NVFP4 else 8  # 8-token tiles take twice as long on NVFP4
        block_m = max(smallest, 8 if M <= 8 else 16 if M <= 16 else 32 if M <= 32 else 64)
        warps = 2 if block_m == 16 and kind is not Format.NVFP4 else 4  # two warps spill on NVFP4
        block_k = 256 if block_m <= 16 else 128
        if kind is ScaleAxis.BLOCK:
            block_k = min(block_k, BLOCK)
        while block_k > (64 if kind is Format.NVFP4 else 32) and block_k > K:
            block_k //= 2
        split_k = 1
        while split_k < 4 and triton.cdiv(N, 64) * split_k < 256 and triton.cdiv(K, block_k) // (split_k * 2) >= 2:
            split_k *= 2
        config = W8A16Config(block_m, 64, block_k, True, split_k, 1, warps, 3)
        while not is_legal_w8a16(config, N, K, shared_bytes, kind) and config.split_k > 1:
            config = replace(config, split_k=config.split_k // 2)
        return config
    if M <= 128 or shared_bytes < HOPPER_SHARED_BYTES:
        return W8A16Config(128, 64, 64, True, 1, 8, 8 if kind is ScaleAxis.BLOCK else 4, 4)
    if kind is not None:
        return W8A16Config(128, 128, 64, True, 1, 16, 8, 4)
    return W8A16Config(256, 128, 64, True, 1, 16, 8, 4, use_tma=K % 16 == 0)


class W8A16Workspace:
    """Scratch of split-K launches on one device: fp32 parts and tile counters. One launch at a time may use it.

    parts: fp32 [elements]; counters: int32 [tiles], zero between launches.
    """

    def __init__(self, device: torch.device, elements: int = 1 << 22) -> None:
        self.parts = torch.empty(elements, dtype=torch.float32, device=device)
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


_workspaces: dict[torch.device, list[W8A16Workspace]] = {}


def _workspace(device: torch.device, elements: int, tiles: int) -> W8A16Workspace:
    """A device's newest workspace, or a larger one. Older ones stay: captured graphs hold their addresses."""
    if tiles > _COUNTERS:
        raise ValueError(
            f"w8a16_gemm: {tiles} output tiles with split_k; "
            f"allowed: at most {_COUNTERS}; take split_k=1 or larger tiles"
        )
    held = _workspaces.setdefault(device, [])
    if not held or held[-1].parts.numel() < elements:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"w8a16_gemm: the workspace must grow to {elements} values during capture; run the same call once "
                "before capturing"
            )
        held.append(W8A16Workspace(device, max(elements, 1 << 22)))
    return held[-1]


def w8a16_gemm(
    x: torch.Tensor,
    weight: Operand,
    *,
    bias: torch.Tensor | None = None,
    lora: LoraTerm | None = None,
    out: torch.Tensor | None = None,
    config: W8A16Config | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """y = x W^T on FP8 or NVFP4 codes and 16-bit activations, with the adapters' up-projections added in the epilogue.

    x: [M, K] bf16 or fp16, rows contiguous. weight: [N, K] e4m3 codes with one fp32 scale, one a row or one a 128 x 128 block, or NVFP4.
    bias: [N] in x's dtype.
    lora: see `LoraTerm`; rows whose slot is not among the groups' active slots get none. out: [M, N] in x's dtype to
    write.
    use_pdl: launch as the programmatic dependent of the launch before (compute capability 9.0 or more); weights start
    moving before x is complete. Off by default: in a chain of projections on an H200 it cost 1 to 2 %.
    The default config comes from `w8a16_config_for`.
    Returns y [M, N]. M = 0 launches nothing. Split-K launches on one device share a workspace: do not run two at once
    on different streams. Raises TypeError, ValueError or UnsupportedKernel naming argument, value and what is allowed.
    """
    name = "w8a16_gemm"
    picked = choose(name, x.device, implementation)
    check_tokens(name, "x", x, picked)
    check_weight(name, weight, x.device, blocks=True, nvfp4=True)
    M, K = x.shape
    N = weight.shape[0]
    if weight.columns != K:
        raise ValueError(f"{name}: weight {weight.shape} does not fit x {tuple(x.shape)}; allowed: [N, {K}]")
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; "
            f"allowed: {x.dtype} ({N},) on {x.device}"
        )
    if out is None:
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (M, N) or out.dtype != x.dtype or out.stride(1) != 1 or out.device != x.device:
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}; allowed: {x.dtype} {(M, N)} on {x.device}"
        )
    if lora is not None:
        check_lora_term(name, lora, x, N)
    kind = weight_kind(weight)
    shared = shared_limit(x.device)
    config = config or w8a16_config_for(M, N, K, shared, kind)
    if not is_legal_w8a16(config, N, K, shared, kind):
        raise ValueError(f"{name}: {config} is not legal for N={N}, K={K}; see is_legal_w8a16")
    if M == 0:
        return out
    if picked is Implementation.REFERENCE:
        return out.copy_(w8a16_gemm_ref(x, weight, bias=bias, lora=lora))
    pdl = use_pdl and picked is Implementation.TRITON
    if pdl and torch.cuda.get_device_capability(x.device)[0] < 9:
        raise ValueError(
            f"{name}: use_pdl=True on compute capability {torch.cuda.get_device_capability(x.device)}; "
            f"allowed: 9.0 or more"
        )
    codes = weight.values
    if config.use_tma and codes.data_ptr() % 16:
        config = replace(
            config, use_tma=False
        )  # a view the copy engine cannot address: the same tiles by ordinary loads
    if config.use_tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        codes = TensorDescriptor.from_tensor(weight.values, [config.block_n, config.block_k])
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    nothing = scales_of(weight)
    parts = counters = nothing
    if config.split_k > 1:
        space = _workspace(x.device, tiles * config.split_k * config.block_m * config.block_n, tiles)
        parts, counters = space.parts, space.counters
    pointers, sizes, constants = term_arguments(lora, N, nothing)
    _w8a16_kernel[(tiles * config.split_k,)](
        x,
        codes,
        weight.scales,
        nothing if weight.global_scale is None else weight.global_scale,
        bias if bias is not None else nothing,
        out,
        parts,
        counters,
        *pointers,
        M,
        N,
        K,
        *sizes,
        x.stride(0),
        out.stride(0),
        **constants,
        W_SCALE=scale_kind(weight),
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        GROUP_M=config.group_m,
        EVEN_N=N % config.block_n == 0,
        EVEN_K=K % (config.block_k * config.split_k) == 0,
        SWAP=config.swap,
        TMA=config.use_tma,
        USE_PDL=pdl,
        PREFETCH=prefetched_lines(config, kind),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def prefetched_lines(config: W8A16Config, kind: WeightKind | None) -> int:
    """Lines of 128 bytes of a weight row that a dependent launch asks for ahead: those of two steps."""
    return 2 * config.block_k // (256 if kind is Format.NVFP4 else 128)
