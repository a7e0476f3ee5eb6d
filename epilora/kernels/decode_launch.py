"""The decode path's launches on the GPU: scratch memory, compiled kernels, parameters. Nothing is checked here; `lora_decode` does.

Legend: M tokens, N out features, K in features, R rank, S slices, L adapter slots.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..quant.block_fp8 import BLOCK as GROUP
from ..quant.formats import ScaleAxis
from ..quant.operand import Operand
from .cuda import driver
from .decode_config import (
    MAX_TOKENS,
    QUANTISE_WARPS,
    DecodeConfig,
    config_for,
    epilogue_bytes,
    gemm_macros,
    gemm_threads,
    is_legal,
    num_stages,
    prologue_macros,
    stage_bytes,
    token_tiles,
)
from .dispatch import interpreter_is_on
from .tiles import check, pad4

_tokens = itertools.count()  # names each launch pair, so that flags an interrupted call left behind match no other call


class DecodeWorkspace:
    """Scratch of the decode path, shared by all projections of one stream: codes, token or group scales, partial h, flags.

    One projection's prologue writes it only after the previous projection's GEMM is complete.
    max_k: largest K; max_h: largest splits * S * M * R (fp32 values).
    """

    def __init__(self, device: torch.device | str, *, max_k: int, max_h: int) -> None:
        self.codes = torch.zeros(MAX_TOKENS * max_k, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(MAX_TOKENS * max(1, -(-max_k // GROUP)), dtype=torch.float32, device=device)
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


@functools.lru_cache(maxsize=512)
def kernel(function: str, macros: tuple[tuple[str, int], ...], num_threads: int, device_index: int) -> driver.Kernel:
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
    if not is_legal(config, M, K, slices, R, device_facts(device.index or 0)[2]):
        return 0
    warps = config.shrink_warps if R else QUANTISE_WARPS
    wanted = [("gemm", gemm_macros(fp16, config, M, R, fp8_adapters), gemm_threads(config, R))]
    if not config.fused:
        wanted.append(("prologue", prologue_macros(fp16, warps, M, fp8_adapters), warps * 32))
    for function, macros, threads in wanted:
        kernel(function, tuple(macros.items()), threads, device.index or 0)
    return len(wanted)


@functools.lru_cache(maxsize=16)
def device_facts(device_index: int) -> tuple[int, int, int]:
    """(compute capability as 90, multiprocessors, bytes of shared memory a block may have)."""
    p = torch.cuda.get_device_properties(device_index)
    return p.major * 10 + p.minor, p.multi_processor_count, getattr(p, "shared_memory_per_block_optin", 99 * 1024)


def supports_cuda(device: torch.device) -> str:
    """Empty when the CUDA decode kernels can run on `device`, else the reason why not."""
    if device.type != "cuda":
        return f"tensors are on {device}"
    capability = device_facts(device.index or 0)[0]
    if capability < 90:
        return f"compute capability {capability / 10} has no bulk copies or programmatic launch (9.0 needed)"
    if interpreter_is_on():
        return "the interpreter is on"
    return "" if driver.compiler_name() else "neither libnvrtc nor nvcc was found"


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
    launch(
        x, weight, lora_a, lora_b, indices, workspace, None, None, out, config, slices, False, False, parts=(part,)
    )  # fmt: skip


def launch(
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
    _, num_sms, limit = device_facts(index)
    splits = config.shrink_splits if has_lora else 1
    needed = splits * len(lora_a) * M * rank
    check(
        needed <= workspace.h.numel(),
        "lora_decode",
        f"workspace.h has {workspace.h.numel()} values, {needed} needed; raise max_h",
    )
    padded = token_tiles(M) * 8
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
        prologue = kernel("prologue", tuple(prologue_macros(fp16, warps, M, fp8_adapters).items()), warps * 32, index)
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
    gemm = kernel(
        "gemm", tuple(gemm_macros(fp16, config, M, rank, fp8_adapters).items()), gemm_threads(config, rank), index
    )
    stages = num_stages(config, M, len(slices), rank, limit, K)
    rows, tokens = config.row_tiles * 16, token_tiles(M) * 8
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
        shared_bytes=stages * stage_bytes(config, M) + epilogue_bytes(config, M, len(slices), rank, K),
        dependent=dependent,
    )  # fmt: skip
