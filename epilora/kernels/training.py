"""The four GEMMs of a LoRA layer over a frozen FP8 or NVFP4 base: forward, input gradient, and the gradients of A and B.

    y  = x W^T + h B^T,         h  = x A^T           (h B^T in the epilogue of the W8A16 GEMM)
    dx = dy W + dh A,           dh = dy B            (dh A in the epilogue of the same kind of GEMM)
    dA = dh^T x                 dB = dy^T h

W stays codes; they are widened in registers, tile by tile (`w8a16.py`). In the forward the channel scale multiplies
the fp32 sum. In dx the channel is what is summed over, so the scale multiplies the widened code and the product is
rounded once to dy's dtype, exactly the weight a 16-bit trainer would hold; so does a scale a 128 x 128 block. A per-tensor scale, and
NVFP4's global one, stay outside the sum; an NVFP4 code times its block scale is exact in 16 bits.

Two ways to run the products with W, chosen by name, never in silence:
- `registers`: the kernels of this package. No 16-bit form of W exists outside registers and shared memory, and the forward
  is the matched engine's arithmetic. On an H200 under sustained load 1.24x (forward) and 1.37x (dx, dA, dB) the time of
  bf16 cuBLAS with LoRA as GEMMs of its own.
- `panel`: the codes of at most PANEL_BYTES of 16-bit values are widened into one scratch buffer, the vendor's GEMM
  multiplies with it, and the next panel overwrites it. The buffer's size does not depend on the model. 1.09x and 1.09x. In
  the forward each weight is then rounded to 16 bits after its scale (RMS error 2.9e-3 instead of 1.7e-3, that of a bf16
  trainer), so an engine that widens in registers differs from it by that rounding.

h, dh, dA and dB touch no base weight: they are the vendor's GEMMs (torch.mm), fp32 accumulation, rounded once.
Autograd wiring lives with the trainer. One adapter per call (training); many adapters are `lora_expand.py`'s.

Legend: M tokens, N = sum of N_s out features, S slices, K in features, R rank.
Source: section 3.3 of the EpiLoRA paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..quant.block_fp8 import BLOCK
from ..quant.formats import Format, ScaleAxis
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import (
    HOPPER_SHARED_BYTES,
    MAX_RANK,
    WeightKind,
    check_tokens,
    check_weight,
    scales_of,
    shared_limit,
    weight_kind,
)
from .dispatch import Implementation, choose
from .lora_epilogue import LoraTerm
from .nvfp4_tile import nvfp4_unit, widen_nvfp4
from .tiles import NVFP4, PER_BLOCK, PER_CHANNEL, PER_TENSOR, scale_kind, widen_e4m3
from .w8a16 import W8A16Config, w8a16_gemm, w8a16_gemm_ref

PANEL_BYTES = 32 * 2**20  # of widened 16-bit values at a time; 16, 32 and 64 MiB measured on an H200: within 5 %
MODES = ("registers", "panel")


@dataclass(frozen=True)
class DxConfig:
    """Tiles of the input-gradient GEMM: block_m tokens x block_k in features, block_n channels summed a step."""

    block_m: int
    block_k: int
    block_n: int
    swap: bool = False
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    use_tma: bool = False


# ---- references ------------------------------------------------------------------------------------------------------


def train_forward_ref(
    x: torch.Tensor, weight: Operand, lora_a: Sequence[torch.Tensor] = (), lora_b: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """y [M, N] fp32 in plain torch. lora_a: S tensors [R, K]; lora_b: S tensors [N_s, R]."""
    y = x.float() @ dequantize(weight).t()
    column = 0
    for a, b in zip(lora_a, lora_b, strict=True):
        y[:, column : column + b.shape[0]] += (x.float() @ a.float().t()) @ b.float().t()
        column += b.shape[0]
    return y


def train_dx_ref(
    dy: torch.Tensor, weight: Operand, lora_a: Sequence[torch.Tensor] = (), lora_b: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """dx [M, K] fp32 in plain torch."""
    dx = dy.float() @ dequantize(weight)
    column = 0
    for a, b in zip(lora_a, lora_b, strict=True):
        dx += (dy[:, column : column + b.shape[0]].float() @ b.float()) @ a.float()
        column += b.shape[0]
    return dx


def lora_grads_ref(
    x: torch.Tensor, dy: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(dA, dB) fp32 in plain torch."""
    grads_a, grads_b, column = [], [], 0
    for a, b in zip(lora_a, lora_b, strict=True):
        part = dy[:, column : column + b.shape[0]].float()
        grads_a.append((part @ b.float()).t() @ x.float())
        grads_b.append(part.t() @ (x.float() @ a.float().t()))
        column += b.shape[0]
    return grads_a, grads_b


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _train_dx_kernel(
    g_ptr,  # dy: pointer, or tensor descriptor of [M, N] with block [BLOCK_M, BLOCK_N]
    w_ptr,  # pointer, or tensor descriptor of [N, K] with block [BLOCK_N, BLOCK_K]
    ws_ptr,
    wg_ptr,
    dx_ptr,
    dh_ptr,
    a_ptr,
    M,
    N,
    K,
    stride_gm,
    stride_dm,
    WIDTH: tl.constexpr,  # S * R, the summed width of dh A
    BLOCK_W: tl.constexpr,
    W_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
):
    dtype = dx_ptr.dtype.element_ty
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_k = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    band = GROUP_M * tiles_k
    first_m = (pid // band) * GROUP_M
    rows_here = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % band) % rows_here
    pid_k = (pid % band) // rows_here
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_k = offs_k < K
    k_column = offs_k if EVEN_K else tl.minimum(offs_k, K - 1)
    if not TMA:
        g_tile = (
            g_ptr + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * stride_gm + offs_n[None, :]
        )  # [BLOCK_M, BLOCK_N]
    if W_SCALE == NVFP4:
        half = pid_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        block = pid_k * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
        w_tile = w_ptr + offs_n.to(tl.int64)[:, None] * (K // 2) + half[None, :]
        s_tile = ws_ptr + offs_n.to(tl.int64)[:, None] * (K // 16) + block[None, :]
        step_w = BLOCK_N * (K // 2).to(tl.int64)
        step_s = BLOCK_N * (K // 16).to(tl.int64)
    elif not TMA:
        w_tile = w_ptr + offs_n.to(tl.int64)[:, None] * K + k_column[None, :]  # [BLOCK_N, BLOCK_K]
        step_w = BLOCK_N * K.to(tl.int64)
    if W_SCALE == PER_BLOCK:
        s_column = ws_ptr + k_column // 128
    if SWAP:
        acc = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        if TMA:
            w = w_ptr.load([n, pid_k * BLOCK_K])
            g = g_ptr.load([pid_m * BLOCK_M, n])
        elif EVEN_N:
            g = tl.load(g_tile)
            if W_SCALE != NVFP4:
                w = tl.load(w_tile)
        else:
            inside = n + offs_n < N
            g = tl.load(g_tile, mask=inside[None, :], other=0.0)
            if W_SCALE != NVFP4:
                w = tl.load(w_tile, mask=inside[:, None], other=0.0)
        if W_SCALE == NVFP4:
            mask_w = (n + offs_n < N)[:, None]
            packed = tl.load(w_tile, mask=mask_w & (half * 2 < K)[None, :], other=0)
            scale = tl.load(s_tile, mask=mask_w & (block * 16 < K)[None, :], other=0.0)
            wide = widen_nvfp4(packed, scale, BLOCK_N, BLOCK_K, dtype)
            s_tile += step_s
        elif W_SCALE == PER_BLOCK:  # the step's rows lie inside one block
            scale = tl.load(s_column + (n // 128) * tl.cdiv(K, 128))  # [BLOCK_K]
            wide = (w.to(tl.float32) * scale[None, :]).to(dtype)
        elif W_SCALE == PER_CHANNEL:
            if EVEN_N:
                scale = tl.load(ws_ptr + n + offs_n)
            else:
                scale = tl.load(ws_ptr + n + offs_n, mask=n + offs_n < N, other=0.0)
            wide = (w.to(tl.float32) * scale[:, None]).to(dtype)
        else:
            wide = widen_e4m3(w, dtype)
        if SWAP:
            acc = tl.dot(tl.trans(wide), tl.trans(g), acc, input_precision="ieee")
        else:
            acc = tl.dot(g, wide, acc, input_precision="ieee")
        if not TMA:
            g_tile += BLOCK_N
            w_tile += step_w
    if W_SCALE == PER_TENSOR:
        acc = acc * tl.load(ws_ptr)
    if W_SCALE == NVFP4:
        acc = acc * (tl.load(wg_ptr) * nvfp4_unit(dtype))
    for w_from in tl.static_range(0, WIDTH, BLOCK_W):  # dh A, [BLOCK_M, WIDTH] x [WIDTH, BLOCK_K]
        offs_w = w_from + tl.arange(0, BLOCK_W)
        dh = tl.load(
            dh_ptr + offs_m.to(tl.int64)[:, None] * WIDTH + offs_w[None, :],
            mask=mask_m[:, None] & (offs_w < WIDTH)[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + offs_w.to(tl.int64)[:, None] * K + offs_k[None, :],
            mask=(offs_w < WIDTH)[:, None] & mask_k[None, :],
            other=0.0,
        )
        if SWAP:
            acc = tl.dot(tl.trans(a), tl.trans(dh), acc, input_precision="ieee")
        else:
            acc = tl.dot(dh, a, acc, input_precision="ieee")
    out = acc.to(dtype)
    if SWAP:
        out = tl.trans(out)
    dx_tile = dx_ptr + offs_m.to(tl.int64)[:, None] * stride_dm + offs_k[None, :]
    tl.store(dx_tile, out, mask=mask_m[:, None] & mask_k[None, :])


@triton.jit
def _widen_panel_kernel(
    w_ptr, ws_ptr, wg_ptr, out_ptr, rows, columns, stride_wn, stride_sn,
    W_SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = code * scale, rounded to out's dtype; a BLOCK_N x BLOCK_K tile a program. Block scales: the first row and
    column begin a block, BLOCK_N divides 128.
    """
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_n = offs_n < rows
    mask = mask_n[:, None] & (offs_k < columns)[None, :]
    at = offs_n.to(tl.int64)[:, None]
    dtype = out_ptr.dtype.element_ty
    if W_SCALE == NVFP4:
        half = tl.program_id(0) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        block = tl.program_id(0) * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
        packed = tl.load(
            w_ptr + at * stride_wn + half[None, :], mask=mask_n[:, None] & (half * 2 < columns)[None, :], other=0
        )
        block_scale = tl.load(
            ws_ptr + at * stride_sn + block[None, :], mask=mask_n[:, None] & (block * 16 < columns)[None, :], other=0.0
        )
        exact = widen_nvfp4(packed, block_scale, BLOCK_N, BLOCK_K, dtype).to(tl.float32)
        wide = (exact * (tl.load(wg_ptr) * nvfp4_unit(dtype))).to(dtype)
    else:
        if EVEN:
            codes = tl.load(w_ptr + at * stride_wn + offs_k[None, :])
        else:
            codes = tl.load(w_ptr + at * stride_wn + offs_k[None, :], mask=mask, other=0.0)
        if W_SCALE == PER_CHANNEL:
            scale = tl.load(ws_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
        elif W_SCALE == PER_BLOCK:
            s_row = ws_ptr + (tl.program_id(1) * BLOCK_N // 128) * stride_sn
            scale = tl.load(s_row + offs_k // 128, mask=offs_k < columns, other=0.0)[None, :]
        else:
            scale = tl.load(ws_ptr)
        wide = (codes.to(tl.float32) * scale).to(dtype)
    if EVEN:
        tl.store(out_ptr + at * columns + offs_k[None, :], wide)
    else:
        tl.store(out_ptr + at * columns + offs_k[None, :], wide, mask=mask)


# ---- launch configurations -------------------------------------------------------------------------------------------


def is_legal_dx(
    config: DxConfig, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES, kind: WeightKind | None = None
) -> bool:
    """Whether the tiles are powers of two, fit shared memory and keep the fp32 tile within 192 registers a thread.

    kind: as in `w8a16.is_legal_w8a16`. Block scales: the channels of a step lie inside a block. NVFP4: no copy engine.
    """
    if (kind is ScaleAxis.BLOCK and config.block_n > BLOCK) or (kind is Format.NVFP4 and config.use_tma):
        return False
    sizes = (config.block_m, config.block_k, config.block_n, config.num_warps)
    powers = all(v >= 1 and v & (v - 1) == 0 for v in sizes)
    if not powers or config.block_m < 16 or config.block_k < 16 or config.block_n < 32:
        return False
    shared = config.num_stages * config.block_n * (2 * config.block_m + config.block_k + 4)
    if not config.swap:
        shared += 2 * config.block_n * config.block_k
    tma = not config.use_tma or (K % 16 == 0 and N % 8 == 0 and N % config.block_n == 0)
    return shared <= shared_bytes and config.block_m * config.block_k // (config.num_warps * 32) <= 192 and tma


def dx_config_for(
    M: int, N: int, K: int, shared_bytes: int = HOPPER_SHARED_BYTES, kind: WeightKind | None = None
) -> DxConfig:
    """Default tiles, from searches on an H200: wide for many tokens, narrow where a wide tile would be mostly padding."""
    if M <= 128:
        return DxConfig(64, 128, 64, num_warps=4, num_stages=3)
    if shared_bytes < HOPPER_SHARED_BYTES:
        return DxConfig(64, 128, 64, num_warps=8, num_stages=2)
    if kind is Format.NVFP4:
        return DxConfig(128, 128, 64, num_warps=8, num_stages=3)
    return DxConfig(256, 128, 64, swap=True, num_warps=8, num_stages=3, use_tma=K % 16 == 0 and N % 64 == 0)


# ---- wrappers --------------------------------------------------------------------------------------------------------


def _check_mode(name: str, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"{name}: mode={mode!r} is unknown; allowed: {', '.join(MODES)}")


def _check_pair(
    name: str, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor], N: int, K: int
) -> int:
    """Checks one adapter's matrices; returns its rank (0: no adapter)."""
    if len(lora_a) != len(lora_b) or len(lora_a) > 4:
        raise ValueError(f"{name}: {len(lora_a)} lora_a and {len(lora_b)} lora_b; allowed: equal numbers, 0 to 4")
    if not lora_a:
        return 0
    R = lora_a[0].shape[0]
    for which, items in (("lora_a", lora_a), ("lora_b", lora_b)):
        for s, item in enumerate(items):
            fits = item.dim() == 2 and (tuple(item.shape) == (R, K) if which == "lora_a" else item.shape[1] == R)
            if not fits or not item.is_contiguous() or item.dtype != x.dtype or item.device != x.device:
                raise ValueError(
                    f"{name}: {which}[{s}] is {item.dtype} {tuple(item.shape)} on {item.device}; "
                    f"allowed: contiguous {x.dtype} {(R, K) if which == 'lora_a' else f'[N_s, {R}]'} on {x.device}"
                )
    if sum(b.shape[0] for b in lora_b) != N or not 1 <= R <= MAX_RANK:
        raise ValueError(
            f"{name}: lora_b widths {[b.shape[0] for b in lora_b]}, rank {R}; "
            f"allowed: widths that sum to {N}, rank 1 to {MAX_RANK}"
        )
    return R


def _stacked(lora_a: Sequence[torch.Tensor]) -> torch.Tensor:
    """[S * R, K]; the matrix itself when there is one slice."""
    return lora_a[0] if len(lora_a) == 1 else torch.cat(list(lora_a))


def _format(dtype: torch.dtype) -> Format:
    return {torch.bfloat16: Format.BF16, torch.float16: Format.FP16, torch.float32: Format.FP32}[dtype]


_panels: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


def widen_panel(weight: Operand, rows: slice, columns: slice, out: torch.Tensor) -> torch.Tensor:
    """out [rows, columns] = code * scale, rounded to out's dtype (contiguous). One Triton launch; returns out.

    rows, columns: begin at multiples of 128 where the weight has scales a block.
    """
    kind, scales, n, k = scale_kind(weight), scales_of(weight), *out.shape
    codes = weight.values[rows, columns]
    if kind == PER_CHANNEL.value:
        scales = scales.reshape(-1)[rows]
    elif kind == PER_BLOCK.value:
        scales = scales[rows.start // BLOCK :, columns.start // BLOCK :]
    elif kind == NVFP4.value:
        codes = weight.values[rows, columns.start // 2 :]
        scales = scales[rows, columns.start // 16 :]
    grid = (triton.cdiv(k, 512), triton.cdiv(n, 16))
    _widen_panel_kernel[grid](
        codes,
        scales,
        scales if weight.global_scale is None else weight.global_scale,
        out,
        n,
        k,
        codes.stride(0),
        scales.stride(0),
        W_SCALE=kind,
        BLOCK_N=16,
        BLOCK_K=512,
        EVEN=n % 16 == 0 and k % 512 == 0,
        num_warps=4,
    )
    return out


def _panel(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    key = (like.device, like.dtype)
    if key not in _panels:
        _panels[key] = torch.empty(PANEL_BYTES // like.element_size(), dtype=like.dtype, device=like.device)
    return _panels[key][: rows * columns].view(rows, columns)


def _spans(total: int, other: int, element_size: int, step: int = 128) -> list[slice]:
    """Slices of `total` so that slice x other values fit the panel, in equal multiples of `step`."""
    most = max(step, PANEL_BYTES // element_size // other // step * step)
    parts = triton.cdiv(total, most)
    size = triton.cdiv(triton.cdiv(total, parts), step) * step
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def train_forward(
    x: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[torch.Tensor] = (),
    lora_b: Sequence[torch.Tensor] = (),
    *,
    mode: str = "registers",
    config: W8A16Config | None = None,
    implementation: Implementation | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y = x W^T + h B^T and h, for one adapter over every token.

    x: [M, K] bf16 or fp16, rows contiguous. weight: FP8 codes [N, K] with one scale, one a channel or one a 128 x 128 block, or NVFP4.
    lora_a: S tensors [R, K];
    lora_b: S tensors [N_s, R], scaling folded in; both in x's dtype; none of them: the plain base.
    mode: see the module. Returns (y [M, N], h [M, S * R] to keep for `lora_grads`, None without an adapter), x's dtype.
    M = 0 gives empty tensors. Raises TypeError, ValueError or UnsupportedKernel naming argument, value and what is
    allowed.
    """
    name = "train_forward"
    picked = choose(name, x.device, implementation)
    _check_mode(name, mode)
    check_tokens(name, "x", x, picked)
    check_weight(name, weight, x.device, blocks=True, nvfp4=True)
    M, K = x.shape
    N = weight.shape[0]
    if weight.columns != K:
        raise ValueError(f"{name}: weight {weight.shape} does not fit x {tuple(x.shape)}; allowed: [N, {K}]")
    R = _check_pair(name, x, lora_a, lora_b, N, K)
    S = len(lora_a)
    h = x @ _stacked(lora_a).t() if R else None  # [M, S * R]
    if mode == "panel" and picked is not Implementation.REFERENCE:
        y = torch.empty(M, N, dtype=x.dtype, device=x.device)
        for rows in _spans(N, K, x.element_size()) if M else ():
            panel = widen_panel(weight, rows, slice(0, K), _panel(rows.stop - rows.start, K, x))
            torch.mm(x, panel.t(), out=y[:, rows])
        column = 0
        for s, b in enumerate(lora_b):
            assert h is not None, "an adapter was given"
            y[:, column : column + b.shape[0]].addmm_(h[:, s * R : (s + 1) * R], b.t())
            column += b.shape[0]
        return y, h
    term = None
    if h is not None:
        term = LoraTerm(h.view(1, M, S, R), [Operand(b.unsqueeze(0), _format(b.dtype)) for b in lora_b])
    if picked is Implementation.REFERENCE:
        return w8a16_gemm_ref(x, weight, lora=term).to(x.dtype), h
    return w8a16_gemm(x, weight, lora=term, config=config, implementation=picked), h


def _registers_seen_right(dy: torch.Tensor, *, has_adapter: bool) -> bool:
    """Whether the register kernel of dx has been seen right on a GPU for such a call.

    On an H200 it agreed with fp32 with an adapter from 2,048 tokens on; without one, at 256 tokens, it was off by 3.8 %
    (`attach` rows of results/rl_h200.json), cause not found. The panels round the same numbers in the same place.
    """
    return not dy.is_cuda or (has_adapter and dy.shape[0] >= 2048)


def train_dx(
    dy: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[torch.Tensor] = (),
    lora_b: Sequence[torch.Tensor] = (),
    *,
    mode: str = "registers",
    config: DxConfig | None = None,
    implementation: Implementation | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx = dy W + dh A and dh = dy B, for one adapter over every token.

    dy: [M, N] bf16 or fp16, rows contiguous. weight, lora_a, lora_b, mode: as `train_forward`; with mode="registers" and no `config`,
    calls for which that kernel was not seen right on a GPU take the panels.
    Returns (dx [M, K], dh [M, S * R] for `lora_grads`, None without an adapter), dy's dtype. M = 0 gives empty tensors.
    Raises as `train_forward`.
    """
    name = "train_dx"
    picked = choose(name, dy.device, implementation)
    _check_mode(name, mode)
    check_tokens(name, "dy", dy, picked)
    check_weight(name, weight, dy.device, blocks=True, nvfp4=True)
    M, N = dy.shape
    K = weight.columns
    if weight.shape[0] != N:
        raise ValueError(f"{name}: weight {weight.shape} does not fit dy {tuple(dy.shape)}; allowed: [{N}, K]")
    R = _check_pair(name, dy, lora_a, lora_b, N, K)
    dh = None
    if R:
        dh = torch.empty(M, len(lora_b) * R, dtype=dy.dtype, device=dy.device)
        column = 0
        for s, b in enumerate(lora_b):
            torch.mm(dy[:, column : column + b.shape[0]], b, out=dh[:, s * R : (s + 1) * R])
            column += b.shape[0]
    if picked is Implementation.REFERENCE:
        dx = train_dx_ref(dy, weight)
        return (dx if dh is None else dx + dh.float() @ _stacked(lora_a).float()).to(dy.dtype), dh
    dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
    if M == 0:
        return dx, dh
    if mode == "panel" or (config is None and not _registers_seen_right(dy, has_adapter=dh is not None)):
        for columns in _spans(K, N, dy.element_size()):
            panel = widen_panel(weight, slice(0, N), columns, _panel(N, columns.stop - columns.start, dy))
            torch.mm(dy, panel, out=dx[:, columns])
        if dh is not None:
            dx.addmm_(dh, _stacked(lora_a))
        return dx, dh
    shared = shared_limit(dy.device)
    kind = weight_kind(weight)
    config = config or dx_config_for(M, N, K, shared, kind)
    if not is_legal_dx(config, N, K, shared, kind):
        raise ValueError(f"{name}: {config} is not legal for N={N}, K={K}; see is_legal_dx")
    codes, gradient = weight.values, dy
    aligned = codes.data_ptr() % 16 == 0 and dy.data_ptr() % 16 == 0 and dy.stride(0) * dy.element_size() % 16 == 0
    if config.use_tma and not aligned:
        config = replace(
            config, use_tma=False
        )  # views the copy engine cannot address: the same tiles by ordinary loads
    if config.use_tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        codes = TensorDescriptor.from_tensor(weight.values, [config.block_n, config.block_k])
        gradient = TensorDescriptor.from_tensor(dy, [config.block_m, config.block_n])
    width = 0 if dh is None else dh.shape[1]
    grid = (triton.cdiv(M, config.block_m) * triton.cdiv(K, config.block_k),)
    _train_dx_kernel[grid](
        gradient,
        codes,
        weight.scales,
        weight.scales if weight.global_scale is None else weight.global_scale,
        dx,
        dh if dh is not None else dx,
        _stacked(lora_a) if dh is not None else dx,
        M,
        N,
        K,
        dy.stride(0),
        dx.stride(0),
        WIDTH=width,
        BLOCK_W=64 if width > 32 else 32,
        W_SCALE=scale_kind(weight),
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        BLOCK_N=config.block_n,
        GROUP_M=config.group_m,
        EVEN_N=N % config.block_n == 0,
        EVEN_K=K % config.block_k == 0,
        SWAP=config.swap,
        TMA=config.use_tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return dx, dh


def lora_grads(
    x: torch.Tensor, dy: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, widths: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """dA = dh^T x and dB = dy^T h of one adapter, from what forward and dx kept. Vendor GEMMs; no base weight takes
    part.

    x: [M, K]; dy: [M, N]; h, dh: [M, S * R]; widths: N_s of the S slices. Returns (S tensors [R, K], S tensors [N_s,
    R]) in x's dtype. M = 0 gives zeros. Raises ValueError for shapes that do not fit.
    """
    S = len(widths)
    if (
        S == 0
        or h.shape != dh.shape
        or h.shape[1] % S
        or sum(widths) != dy.shape[1]
        or not x.shape[0] == dy.shape[0] == h.shape[0]
    ):
        raise ValueError(
            f"lora_grads: x {tuple(x.shape)}, dy {tuple(dy.shape)}, h {tuple(h.shape)}, dh {tuple(dh.shape)}, "
            f"widths {list(widths)} do not fit; "
            "allowed: equal rows, h and dh [M, S * R], widths that sum to dy's columns"
        )
    R = h.shape[1] // S
    grads_a = list((dh.t() @ x).split(R))
    grads_b, column = [], 0
    for s, width in enumerate(widths):
        grads_b.append(dy[:, column : column + width].t() @ h[:, s * R : (s + 1) * R])
        column += width
    return grads_a, grads_b
