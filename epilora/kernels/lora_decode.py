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

import ctypes
import dataclasses
import functools
import itertools
import json
import logging
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedKernel
from ..quant.formats import ScaleAxis
from ..quant.operand import Operand
from . import fused_lora_gemm as k2
from . import lora_shrink as k1
from .cuda import driver
from .dispatch import Implementation, choose, interpreter_is_on
from .quantize import ACTIVATION_DTYPES, quantize_ref
from .tiles import MAX_SLICES, check, check_tensor, pad4

logger = logging.getLogger(__name__)

MAX_TOKENS = 32
SHARED_BYTES = 227 * 1024  # a Hopper block's limit
QUANTISE_WARPS = 8  # of a prologue block that only quantises
_tokens = itertools.count()  # names each launch pair, so that flags an interrupted call left behind match no other call
_STATIC_SHARED = 2048  # barriers and token scales beside the dynamic part


@dataclass(frozen=True)
class DecodeConfig:
    """Launch of the CUDA decode path.

    row_tiles: weight tiles of 16 rows a block. k_warps: warps along K a tile. stage_k: bytes of K a ring stage (a multiple of
    128 * k_warps). lora_warps: warps that do the up-projection. window_kib: weights a block has under way at most.
    wgmma: warpgroup MMAs (sm_90 only; k_warps counts warpgroups, at most 4 row tiles). early: start at the tokens' flags.
    shared_kib: shared memory of a GEMM block; the ring takes what the epilogue leaves. blocks_per_sm: of the GEMM, at most.
    shrink_warps, shrink_splits: warps a shrink block and parts of K. shrink_groups: groups of blocks that share the distinct adapters;
    0: one for every eight tokens (each needs processors that the GEMM's blocks then get later).
    fused: 0: two launches; n: one launch for up to 8 tokens, every block quantises all tokens for itself, n at a time; lora_warps do
    the shrink too, and shrink_warps, shrink_groups, early do not count.
    one_order: a row's sums have one order at every number of tokens (two launches without wgmma).
    """

    row_tiles: int = 2
    k_warps: int = 4
    stage_k: int = 1024
    shared_kib: int = 200
    blocks_per_sm: int = 1
    lora_warps: int = 4
    window_kib: int = 72
    wgmma: bool = False
    early: bool = True
    shrink_warps: int = 4
    shrink_splits: int = 4
    shrink_groups: int = 4
    fused: int = 0
    one_order: bool = False


def is_legal(
    config: DecodeConfig, M: int, K: int, slices: Sequence[int], rank: int, shared_limit: int = SHARED_BYTES
) -> bool:
    """Whether the CUDA kernels can run a shape: 16-byte rows, slices of whole 16-row tiles, at least two ring stages."""
    rows_fit = K % 16 == 0 and all(n % 16 == 0 for n in slices) and rank % 8 == 0 and rank <= k1.MAX_RANK
    c, warps = config, multiplying_warps(config) + 2 + config.lora_warps
    steps = c.stage_k % (128 * c.k_warps) == 0 and c.stage_k <= 4096
    threads = warps <= 24 and c.lora_warps >= 1 and 1 <= c.shrink_warps <= 16
    shape = c.row_tiles <= (4 if c.wgmma else 16)
    one_launch = not c.fused or (
        M <= 8 and not c.wgmma and 1 <= c.fused <= multiplying_warps(c) and c.blocks_per_sm == 1
    )
    return (
        rows_fit
        and steps
        and threads
        and shape
        and one_launch
        and not (c.one_order and (c.fused or c.wgmma))
        and 1 <= M <= MAX_TOKENS
        and num_stages(config, M, len(slices), rank, shared_limit, K) >= 2
    )


def num_stages(config: DecodeConfig, M: int, num_slices: int, rank: int, shared_limit: int, K: int) -> int:
    """Ring stages that fit beside the epilogue's buffers, at most 32."""
    budget = min(config.shared_kib * 1024, shared_limit) - _STATIC_SHARED
    return min(32, (budget - _epilogue_bytes(config, M, num_slices, rank, K)) // _stage_bytes(config, M))


def _stage_bytes(config: DecodeConfig, M: int) -> int:
    return (config.row_tiles * 16 + (0 if config.fused else _token_tiles(M) * 8)) * config.stage_k


def _token_tiles(M: int) -> int:
    return 1 if M <= 8 else 2 if M <= 16 else 4


def _epilogue_bytes(config: DecodeConfig, M: int, num_slices: int, rank: int, K: int) -> int:
    tokens, rows = _token_tiles(M) * 8, config.row_tiles * 16
    lora = rows * tokens * 4 + num_slices * tokens * (-(-rank // 32) * 32 + 8) * 2 if rank else 0
    if rank and config.fused:
        lora += config.lora_warps * tokens * 8 * 4  # the shrink's reduction
    local = M * (-(-K // config.stage_k) * config.stage_k + 16) if config.fused else 0  # the tokens' codes
    return 1024 + config.k_warps * rows * tokens * 4 + 2 * rows * 4 + lora + local  # 1024: the ring is aligned to that


@functools.cache
def tuned_entries(device_name: str) -> tuple[dict, ...]:
    """Entries of the committed table of a GPU (found by `benchmarks.kernels.tune`); empty where there is none."""
    path = pathlib.Path(__file__).parent / "tables" / f"decode_{device_name.replace(' ', '_')}.json"
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()


def config_for(
    M: int, N: int, K: int, R: int, L: int, *, device_name: str = "", distinct_adapters: int | None = None
) -> DecodeConfig:
    """The table's entry for this shape, else a stated default: one launch for one token, else two with 128 blocks of equal height
    where N allows it.

    M, N, K, R, L: tokens, out features, in features, rank (0: none), slots. device_name: as torch names the GPU.
    distinct_adapters: how many adapters the batch is expected to hold (speed only); None: one is expected, and a group of blocks for
    every eight tokens shares what others there are.
    An entry serves up to its number of tokens and adapters; beyond the largest, the largest serves.
    """
    adapters = max(1, min(M, L, distinct_adapters or 1))
    groups = 0 if distinct_adapters is None else adapters
    same = [e for e in tuned_entries(device_name) if (e["N"], e["K"]) == (N, K) and (e["rank"] > 0 or R == 0)]
    if same:
        near = min((e["rank"] for e in same), key=lambda rank: abs(rank - R))
        enough = [e for e in same if e["rank"] == near and e["M"] >= min(M, max(x["M"] for x in same))]
        enough = [e for e in enough if e["M"] == min(x["M"] for x in enough)]
        best = min(enough, key=lambda e: (e["adapters"] < adapters, abs(e["adapters"] - adapters)))
        tuned = dataclasses.replace(DecodeConfig(**best["config"]), shrink_groups=groups)
        if is_legal(tuned, M, K, [N] + [16] * (MAX_SLICES - 1), R):  # a much larger rank may leave the ring no room
            return tuned
    if M == 1:
        return DecodeConfig(
            row_tiles=2, k_warps=4, stage_k=512, window_kib=48, shrink_splits=8, shrink_groups=groups, fused=1
        )
    return DecodeConfig(
        row_tiles=3 if -(-N // 16) % 384 == 0 else 2,
        stage_k=512 if M > 16 else 1024,
        shrink_warps=8,
        shrink_splits=6 if K >= 8192 else 4,
        shrink_groups=groups,
    )


def invariant_config(N: int, K: int) -> DecodeConfig:
    """The one configuration of the batch-invariant mode for a shape: nothing in it depends on the number of tokens."""
    return DecodeConfig(
        row_tiles=3 if -(-N // 16) % 384 == 0 else 2,
        k_warps=4,
        stage_k=512,
        shrink_warps=8,
        shrink_splits=8 if K >= 8192 else 4,
        shrink_groups=0,
        one_order=True,
    )


class DecodeWorkspace:
    """Scratch of the decode path, shared by all projections of one stream: codes, token scales, partial h, flags.

    One projection's prologue writes it only after the previous projection's GEMM is complete.
    max_k: largest K; max_h: largest splits * S * M * R (fp32 values).
    """

    def __init__(self, device: torch.device | str, *, max_k: int, max_h: int) -> None:
        self.codes = torch.zeros(MAX_TOKENS * max_k, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(MAX_TOKENS, dtype=torch.float32, device=device)
        self.h = torch.zeros(max(1, max_h), dtype=torch.float32, device=device)
        self.ready = torch.zeros(MAX_TOKENS + 1, dtype=torch.int32, device=device)
        # Of the single launch: calls' numbers, and h as its blocks hand it to each other, every value beside its call's number.
        self.calls = torch.zeros(2, dtype=torch.int32, device=device)
        self.h_pairs = torch.zeros(max(1, max_h), dtype=torch.int64, device=device)

    @staticmethod
    def h_values(slices: int, rank: int, *, tokens: int = MAX_TOKENS, splits: int = 16) -> int:
        """fp32 values that h of one projection can need."""
        return splits * slices * tokens * rank


class _Adapters(ctypes.Structure):
    """Mirror of `struct Adapters` in decode.cu."""

    _fields_ = [
        ("a", ctypes.c_void_p * 4),
        ("b", ctypes.c_void_p * 4),
        ("a_scale", ctypes.c_void_p * 4),
        ("b_scale", ctypes.c_void_p * 4),
        ("stride_al", ctypes.c_longlong),
        ("stride_ar", ctypes.c_longlong),
        ("stride_bl", ctypes.c_longlong * 4),
        ("stride_bn", ctypes.c_longlong),
        ("slot_of_token", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("num_active", ctypes.c_int),
        ("num_slots", ctypes.c_int),
        ("num_slices", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("slice_end", ctypes.c_int * 4),
    ]


def prologue_macros(fp16: bool, warps: int, M: int, fp8_adapters: bool = False) -> dict[str, int]:
    """Macros of the prologue for M tokens."""
    return {"DT_FP16": int(fp16), "ADAPTERS8": int(fp8_adapters), "WARPS": warps, **_token_macros(M)}


def _token_macros(M: int) -> dict[str, int]:
    return {"M_TILES": 1 if M <= 16 else 2, "HALVES": 1 if M <= 8 else 2}


def gemm_macros(fp16: bool, config: DecodeConfig, M: int, rank: int, fp8_adapters: bool = False) -> dict[str, int]:
    """Macros of the GEMM for M tokens; rank 0 means no adapters."""
    return {
        "DT_FP16": int(fp16),
        "ADAPTERS8": int(fp8_adapters),
        "NT": _token_tiles(M),
        "TN": config.row_tiles,
        "WK": config.k_warps,
        "KC": config.stage_k,
        "RB": -(-rank // 32),
        "LW": config.lora_warps if rank else 0,
        "WGMMA": int(config.wgmma),
        "EARLY": int(config.early and not config.fused),
        "FUSED": config.fused,
        "ONE_ORDER": int(config.one_order),
        **_token_macros(M),
    }


def gemm_threads(config: DecodeConfig, rank: int) -> int:
    """Threads of a GEMM block: multiplying warps, two producers, the up-projection's warps."""
    return (multiplying_warps(config) + 2 + (config.lora_warps if rank else 0)) * 32


def multiplying_warps(config: DecodeConfig) -> int:
    """Warps of the main loop: one a row tile and part of K, or whole warpgroups."""
    return (4 if config.wgmma else config.row_tiles) * config.k_warps


@functools.lru_cache(maxsize=512)
def _kernel(function: str, macros: tuple[tuple[str, int], ...], num_threads: int, device_index: int) -> driver.Kernel:
    return driver.Kernel("decode.cu", function, dict(macros), num_threads, torch.device("cuda", device_index))


def compile_kernels(
    M: int,
    slices: Sequence[int],
    K: int,
    R: int,
    L: int,
    *,
    device: torch.device,
    fp16: bool,
    fp8_adapters: bool = False,
) -> int:
    """Compile and load what `lora_decode` launches for M tokens without a config of its own; safe to call from several threads.

    slices: out features of each slice. R, L: rank (0: no adapters), slots. Returns how many kernels that are, 0 where the CUDA
    kernels cannot run.
    """
    if supports_cuda(device):
        return 0
    config = config_for(M, sum(slices), K, R, L, device_name=torch.cuda.get_device_name(device))
    if not is_legal(config, M, K, slices, R, _device_facts(device.index or 0)[2]):
        return 0
    warps = config.shrink_warps if R else QUANTISE_WARPS
    wanted = [("gemm", gemm_macros(fp16, config, M, R, fp8_adapters), gemm_threads(config, R))]
    if not config.fused:
        wanted.append(("prologue", prologue_macros(fp16, warps, M, fp8_adapters), warps * 32))
    for function, macros, threads in wanted:
        _kernel(function, tuple(macros.items()), threads, device.index or 0)
    return len(wanted)


@functools.lru_cache(maxsize=16)
def _device_facts(device_index: int) -> tuple[int, int, int]:
    """(compute capability as 90, multiprocessors, bytes of shared memory a block may have)."""
    p = torch.cuda.get_device_properties(device_index)
    return p.major * 10 + p.minor, p.multi_processor_count, getattr(p, "shared_memory_per_block_optin", 99 * 1024)


def supports_cuda(device: torch.device) -> str:
    """Empty when the CUDA decode kernels can run on `device`, else the reason why not."""
    if device.type != "cuda":
        return f"tensors are on {device}"
    capability = _device_facts(device.index or 0)[0]
    if capability < 90:
        return f"compute capability {capability / 10} has no bulk copies or programmatic launch (9.0 needed)"
    if interpreter_is_on():
        return "the interpreter is on"
    return "" if driver.compiler_name() else "neither libnvrtc nor nvcc was found"


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
    codes, scale = quantize_ref(x)
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

    x: [M, K] bf16 or fp16, 1 <= M <= 32 (0 returns at once). weight: FP8 operand [N, K] contiguous, scale per tensor or channel.
    lora_a, lora_b: one operand per slice, [L, R, K] and [L, N_s, R] in x's dtype or FP8 with row scales; empty: no adapters.
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
            _launch_cuda(
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
    codes = workspace.codes[: M * K].view(M, K).view(torch.float8_e4m3fn)
    scale = workspace.scale[:M]
    pdl = use_pdl and picked is Implementation.TRITON and x.is_cuda and _device_facts(x.device.index or 0)[0] >= 90
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
            x, lora_a, token_lora_indices, active_lora_ids=active_lora_ids, out=h, quantize_to=(codes, scale), config=shrink,
            use_pdl=pdl and overlap_previous, implementation=picked,
        )  # fmt: skip
    else:
        from .quantize import quantize

        quantize(x, codes_out=codes, scale_out=scale.view(M, 1), implementation=picked)
    tiles = k2.config_for(MAX_TOKENS, slices, K, k2.shared_bytes_of(x.device)) if batch_invariant else None
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
    capability, _, limit = _device_facts(x.device.index or 0)
    if config.wgmma and capability != 90:
        return f"warpgroup MMAs exist on compute capability 9.0 only, this is {capability / 10}"
    if not is_legal(config, M, K, slices, rank, limit):
        return (
            f"M={M}, K={K}, slices={slices}, rank={rank} with {config} is not legal (K and slices in 16s, rank in 8s)"
        )
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
    k2.check_weight(name, weight, K, x.device)
    check_tensor(name, "weight.scales", weight.scales, dtypes=(torch.float32,), device=x.device)
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


def launch_part(
    part: str,
    x: torch.Tensor,
    weight: Operand,
    lora_a: Sequence[Operand],
    lora_b: Sequence[Operand],
    indices: torch.Tensor,
    *,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    config: DecodeConfig,
) -> None:
    """One of the two launches by itself, for measurements: "prologue" leaves codes and h in the workspace, "gemm" reads them there.

    Arguments as in `lora_decode`; CUDA only; config with two launches. Raises ValueError for another part or a fused config.
    """
    check(part in ("prologue", "gemm"), "launch_part", f"part={part!r}; allowed: 'prologue', 'gemm'")
    check(not config.fused, "launch_part", f"fused={config.fused} is one launch; give a config with fused=0")
    config = dataclasses.replace(config, early=False)  # nobody sets the tokens' flags
    slices = [o.values.shape[1] for o in lora_b]
    _launch_cuda(
        x, weight, lora_a, lora_b, indices, workspace, None, None, out, config, slices, False, False, parts=(part,)
    )  # fmt: skip


def _launch_cuda(
    x,
    weight,
    lora_a,
    lora_b,
    indices,
    workspace,
    active,
    bias,
    y,
    config,
    slices,
    overlap_previous,
    use_pdl,
    parts=("prologue", "gemm"),
) -> None:
    M, K = x.shape
    N = weight.values.shape[0]
    has_lora = len(lora_a) > 0
    rank = lora_a[0].values.shape[1] if has_lora else 0
    fp16, fp8_adapters = x.dtype == torch.float16, has_lora and lora_a[0].scales is not None
    index = x.device.index or 0
    _, num_sms, limit = _device_facts(index)
    splits = config.shrink_splits if has_lora else 1
    needed = splits * len(lora_a) * M * rank
    check(
        needed <= workspace.h.numel(),
        "lora_decode",
        f"workspace.h has {workspace.h.numel()} values, {needed} needed; raise max_h",
    )
    padded = _token_tiles(M) * 8
    check(
        padded * K <= workspace.codes.numel() and workspace.scale.numel() >= M,
        "lora_decode",
        f"workspace holds {workspace.codes.numel()} codes, {padded * K} needed; raise max_k",
    )
    ad = _Adapters()
    if has_lora:
        a, b = [o.values for o in lora_a], [o.values for o in lora_b]
        if fp8_adapters:
            ad.a_scale[:] = [o.scales.data_ptr() for o in pad4(list(lora_a))]
            ad.b_scale[:] = [o.scales.data_ptr() for o in pad4(list(lora_b))]
        ad.a[:] = [t.data_ptr() for t in pad4(a)]
        ad.b[:] = [t.data_ptr() for t in pad4(b)]
        ad.stride_al, ad.stride_ar = a[0].stride(0), a[0].stride(1)
        ad.stride_bl[:] = [t.stride(0) for t in pad4(b)]
        ad.stride_bn = b[0].stride(1)
        ad.slot_of_token = indices.data_ptr()
        if active is not None:
            ad.active, ad.num_active = active.data_ptr(), active.numel()
        ad.num_slots, ad.num_slices, ad.rank = a[0].shape[0], len(a), rank
        ends = [sum(slices[: i + 1]) for i in range(len(slices))]
        ad.slice_end[:] = pad4(ends)
    p, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    codes, scale, h = p(workspace.codes.data_ptr()), p(workspace.scale.data_ptr()), p(workspace.h.data_ptr())
    ready, token = workspace.calls if config.fused else workspace.ready, ctypes.c_uint(0)
    x_args: list[Any] = [p(x.data_ptr()), i64(x.stride(0))]
    if not config.fused and "prologue" in parts:
        token = ctypes.c_uint(next(_tokens) % 0x7FFFFFFF + 1)
        one_group = splits * len(lora_a) * -(-rank // 8)
        most = min(M, lora_a[0].values.shape[0]) if has_lora else 1
        groups = config.shrink_groups or min(most, -(-M // 8))
        shrink_blocks = one_group * groups
        warps = config.shrink_warps if has_lora else QUANTISE_WARPS
        prologue = _kernel("prologue", tuple(prologue_macros(fp16, warps, M, fp8_adapters).items()), warps * 32, index)
        prologue.launch(
            M + shrink_blocks,
            [
                *x_args,
                i32(M),
                i32(K),
                codes,
                scale,
                h,
                ad,
                i32(M),
                i32(splits),
                i32(groups),
                p(ready.data_ptr()),
                token,
            ],
            dependent=use_pdl and overlap_previous,
        )
    if "gemm" not in parts:
        return
    gemm = _kernel(
        "gemm", tuple(gemm_macros(fp16, config, M, rank, fp8_adapters).items()), gemm_threads(config, rank), index
    )
    stages = num_stages(config, M, len(slices), rank, limit, K)
    rows, tokens = config.row_tiles * 16, _token_tiles(M) * 8
    window = max(1, min(stages, config.window_kib * 1024 // (rows * config.stage_k)))
    tiles = -(-N // rows)
    rounds = -(-tiles // (num_sms * config.blocks_per_sm))
    w_map, deep = driver.byte_matrix_map(weight.values.data_ptr(), N, K, rows, config.stage_k)
    # Rows past M hold old codes: their columns are never stored. Rows outside a tensor would be slower to copy than real ones.
    x_map, _ = driver.byte_matrix_map(workspace.codes.data_ptr(), tokens, K, tokens, config.stage_k)
    dependent = use_pdl and (overlap_previous or not config.fused)
    gemm.launch(
        -(-tiles // rounds),
        [
            w_map.value, x_map.value, i32(int(deep)), scale, p(weight.scales.data_ptr()), i32(int(weight.axis is ScaleAxis.CHANNEL)),
            p(0 if bias is None else bias.data_ptr()), h, i32(splits), ad, p(y.data_ptr()), i64(y.stride(0)), i32(M), i32(N), i32(K),
            i32(stages), i32(window), p(ready.data_ptr()), token, *x_args, p(workspace.h_pairs.data_ptr()), i32(int(dependent)),
        ],
        shared_bytes=stages * _stage_bytes(config, M) + _epilogue_bytes(config, M, len(slices), rank, K),
        dependent=dependent,
    )  # fmt: skip
