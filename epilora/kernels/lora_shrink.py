"""Down-projection for decode batches (K1): every token with its own adapter, any order, split over K.

    h[p, s, m, :] = sum over the p-th part of K of x[m, k] A[s, slot(m)][:, k]

Partial sums stay apart in fp32 and are added in the order of p by whoever reads h, so results do not depend on timing. One
program handles one part of K, one slice, one tile of tokens and every `groups`-th distinct adapter of that tile; an
adapter's A is read once a tile however many of its tokens are there. Rows without an adapter are not written. With
`quantize_to`, extra programs of the same launch quantise x (`quantize.py`): they are done when the launch is done, so the
GEMM's one wait covers both and there are no flags to reset.

For large batches grouped by adapter see `lora_expand.lora_shrink_grouped`.
Legend: M tokens, S slices, K in features, R rank, L adapter slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quant.block_fp8 import BLOCK as GROUP
from ..quant.block_fp8 import OP_SMALLEST_SCALE, quantize_groups_ref
from ..quant.formats import Format
from ..quant.operand import Operand
from ..quant.reference import dequantize
from .arguments import MAX_RANK, check_nvfp4_stack, stack_pointers
from .dispatch import Implementation, choose
from .nvfp4_tile import nvfp4_unit, widen_nvfp4
from .quantize import ACTIVATION_DTYPES, groups_at_once, quantize_ref, quantize_row, quantize_row_groups
from .tiles import INTERPRETED, any_active, check, check_tensor, pick4


def valid_slots_ref(
    token_lora_indices: torch.Tensor, num_slots: int, active_lora_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """[M] int64 slots with everything outside 0 .. num_slots-1 (stale or padded rows) turned into -1.

    active_lora_ids: when given and without an entry >= 0, nobody has an adapter.
    """
    slots = token_lora_indices.long()
    slots = torch.where((slots >= 0) & (slots < num_slots), slots, torch.full_like(slots, -1))
    if active_lora_ids is not None and not bool((active_lora_ids >= 0).any()):
        slots = torch.full_like(slots, -1)
    return slots


def lora_shrink_ref(
    x: torch.Tensor,
    lora_a: Sequence[Operand],
    token_lora_indices: torch.Tensor,
    active_lora_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """h [S, M, R] fp32, summed over all of K; zero rows for tokens without an adapter."""
    num_slots, rank, _ = lora_a[0].values.shape
    slots = valid_slots_ref(token_lora_indices, num_slots, active_lora_ids)
    h = torch.zeros((len(lora_a), x.shape[0], rank), dtype=torch.float32, device=x.device)
    for s, operand in enumerate(lora_a):
        stack = dequantize(operand)
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows = slots == slot
                h[s, rows] = x[rows].float() @ stack[slot].t()
    return h


@dataclass(frozen=True)
class ShrinkConfig:
    """Launch of the decode shrink. splits: parts of K. groups: programs that share a tile's distinct adapters."""

    splits: int = 8
    groups: int = 4
    block_m: int = 16
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3


def is_legal(config: ShrinkConfig) -> bool:
    """Whether a config can be launched: powers of two that tl.dot accepts."""
    powers = all(v > 0 and v & (v - 1) == 0 for v in (config.block_m, config.block_k, config.num_warps))
    return powers and config.block_m >= 16 and config.block_k >= 32 and config.splits >= 1 and config.groups >= 1


def config_for(M: int, K: int, R: int, L: int) -> ShrinkConfig:
    """Stated default: 8 parts of K; one program per four distinct adapters at most (no table: the CUDA path is tuned instead)."""
    return ShrinkConfig(splits=8 if K >= 1024 else 2, groups=max(1, min(M, L, 32) // 4), block_m=32 if M > 16 else 16)


@triton.jit
def _lora_shrink_kernel(
    x_ptr, stride_xm, xq_ptr, x_scale_ptr,
    a0_ptr, a1_ptr, a2_ptr, a3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, stride_al, stride_ar,
    slot_ptr, active_ptr, num_active, h_ptr,
    M, K, R, num_slots, num_quant, m_tiles, smallest_scale,
    NUM_SLICES: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, A_IS_FP8: tl.constexpr, A_IS_NVFP4: tl.constexpr, HAS_ACTIVE: tl.constexpr, ACTIVE_BLOCK: tl.constexpr, QUANT_BLOCK: tl.constexpr,
    QUANT_GROUP: tl.constexpr, ROUND_FIRST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # for x, the slot ids and the adapters
    pid = tl.program_id(0)
    if pid < num_quant:
        row = pid.to(tl.int64)
        if QUANT_GROUP > 0:
            x_scale_row = x_scale_ptr + row * tl.cdiv(K, QUANT_GROUP)
            quantize_row_groups(
                x_ptr + row * stride_xm, xq_ptr + row * K, x_scale_row, K, smallest_scale, QUANT_BLOCK, QUANT_GROUP, ROUND_FIRST
            )  # fmt: skip
        else:
            quantize_row(x_ptr + row * stride_xm, xq_ptr + row * K, x_scale_ptr + row, K, QUANT_BLOCK, ROUND_FIRST)
    else:
        pid -= num_quant
        split = pid % SPLITS
        sl = (pid // SPLITS) % NUM_SLICES
        group = (pid // (SPLITS * NUM_SLICES)) % GROUPS
        tile = pid // (SPLITS * NUM_SLICES * GROUPS)
        rows = tl.arange(0, BLOCK_M)
        offs_m = tile * BLOCK_M + rows
        offs_r = tl.arange(0, BLOCK_R)
        offs_k = tl.arange(0, BLOCK_K)
        slots = tl.load(slot_ptr + offs_m, mask=offs_m < M, other=-1)
        slots = tl.where((slots >= 0) & (slots < num_slots), slots, -1)
        if HAS_ACTIVE:
            slots = tl.where(any_active(active_ptr, num_active, ACTIVE_BLOCK) > 0, slots, -1)
        a_ptr = pick4(sl, a0_ptr, a1_ptr, a2_ptr, a3_ptr)
        per = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
        k_from = split * per
        k_to = tl.minimum(K, k_from + per)
        ordinal = 0
        for m in range(tl.minimum(BLOCK_M, M - tile * BLOCK_M)):
            slot = tl.sum(tl.where(rows == m, slots, 0), axis=0)
            earlier = tl.sum(((slots == slot) & (rows < m)).to(tl.int32), axis=0)
            leads = (slot >= 0) & (earlier == 0)
            if leads & (ordinal % GROUPS == group):
                mine = slots == slot  # [BLOCK_M]
                acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                a_rows = a_ptr + slot.to(tl.int64) * stride_al + offs_r[None, :] * stride_ar  # [1, BLOCK_R]
                for k in range(k_from, k_to, BLOCK_K):
                    kk = k + offs_k
                    x = tl.load(
                        x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + kk[None, :],
                        mask=mine[:, None] & (kk[None, :] < k_to), other=0.0,
                    )  # fmt: skip  # [BLOCK_M, BLOCK_K]
                    if A_IS_NVFP4:
                        half = k // 2 + tl.arange(0, BLOCK_K // 2)
                        blocks = k // 16 + tl.arange(0, BLOCK_K // 16)
                        packed = tl.load(
                            a_ptr + slot.to(tl.int64) * stride_al + offs_r[:, None] * stride_ar + half[None, :],
                            mask=(offs_r[:, None] < R) & (half[None, :] * 2 < k_to), other=0,
                        )  # fmt: skip  # [BLOCK_R, BLOCK_K / 2]
                        scale = tl.load(
                            pick4(sl, s0_ptr, s1_ptr, s2_ptr, s3_ptr)
                            + (slot.to(tl.int64) * R + offs_r[:, None]) * (K // 16) + blocks[None, :],
                            mask=(offs_r[:, None] < R) & (blocks[None, :] * 16 < k_to), other=0.0,
                        )  # fmt: skip  # [BLOCK_R, BLOCK_K / 16]
                        a = tl.trans(widen_nvfp4(packed, scale, BLOCK_R, BLOCK_K, x.dtype))
                    else:
                        a = tl.load(
                            a_rows + kk[:, None], mask=(offs_r[None, :] < R) & (kk[:, None] < k_to), other=0.0
                        )  # [BLOCK_K, BLOCK_R]
                    acc = tl.dot(x, a.to(x.dtype), acc)
                if A_IS_FP8:
                    s_ptr = pick4(sl, s0_ptr, s1_ptr, s2_ptr, s3_ptr)
                    acc *= tl.load(s_ptr + slot * R + offs_r, mask=offs_r < R, other=0.0)[None, :]
                if A_IS_NVFP4:
                    whole = tl.load(pick4(sl, g0_ptr, g1_ptr, g2_ptr, g3_ptr) + slot)
                    acc *= whole * nvfp4_unit(x_ptr.dtype.element_ty)
                h_rows = h_ptr + ((split * NUM_SLICES + sl) * M + offs_m[:, None]).to(tl.int64) * R
                tl.store(h_rows + offs_r[None, :], acc, mask=mine[:, None] & (offs_r[None, :] < R))
            ordinal += leads.to(tl.int32)


def check_adapters(
    function: str, name: str, operands: Sequence[Operand], x: torch.Tensor, last: int | None
) -> tuple[int, int]:
    """Check one adapter stack per slice ([L, rows, last] real values, all of one format). Returns (L, rows of the first)."""
    check(1 <= len(operands) <= 4, function, f"{name} has {len(operands)} slices; allowed: 1 to 4")
    first = operands[0].values
    for i, operand in enumerate(operands):
        v = operand.values
        stored = (x.dtype, torch.float8_e4m3fn, torch.uint8)
        check_tensor(function, f"{name}[{i}]", v, dim=3, dtypes=stored, device=x.device)
        check(
            v.dtype == first.dtype,
            function,
            f"{name}[{i}] is {v.dtype}, {name}[0] is {first.dtype}; slices share one dtype",
        )
        check(
            v.shape[0] == first.shape[0],
            function,
            f"{name}[{i}] has {v.shape[0]} slots, {name}[0] has {first.shape[0]}",
        )
        if last is not None:
            shape = (*v.shape[:2], operand.columns)
            check(shape[2] == last, function, f"{name}[{i}] has shape {shape}; its last axis must be {last}")
        if operand.format is Format.NVFP4:
            check_nvfp4_stack(function, f"{name}[{i}]", operand)
        if v.dtype == torch.float8_e4m3fn:
            good = operand.scales is not None and operand.scales.shape == v.shape[:2] and operand.scales.is_contiguous()
            check(good, function, f"{name}[{i}] is fp8: needs contiguous scales of shape {tuple(v.shape[:2])}")
    return first.shape[0], first.shape[1]


def lora_shrink(
    x: torch.Tensor,
    lora_a: Sequence[Operand],
    token_lora_indices: torch.Tensor,
    *,
    active_lora_ids: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    quantize_to: tuple[torch.Tensor, torch.Tensor] | None = None,
    quantize_by_groups: bool = False,
    config: ShrinkConfig | None = None,
    use_pdl: bool = False,
    implementation: Implementation | str | None = None,
) -> torch.Tensor:
    """Partial down-projections of a decode batch.

    x: [M, K] bf16 or fp16. lora_a: one operand per slice, [L, R, K] in x's dtype, FP8 with scales [L, R], or NVFP4.
    token_lora_indices: [>= M] int32; entries outside 0 .. L-1 mean no adapter. active_lora_ids: int32 list as vLLM keeps it; with no
    entry >= 0 nobody has an adapter. out: [splits, S, M, R] fp32 contiguous (rows without an adapter stay as they are).
    quantize_to: (codes [M, K] float8_e4m3fn, scale [M] or [M, 1] fp32) to fill in the same launch; quantize_by_groups: scale is
    [M, ceil(K / 128)], as `quantize_groups` would fill it.
    use_pdl: launch with programmatic serialisation; the kernel waits before it reads anything.
    Returns out. Allocates only when `out` is None; never synchronises. M = 0 launches nothing.
    Raises TypeError or ValueError naming the argument that does not fit.
    """
    name = "lora_shrink"
    check_tensor(name, "x", x, dim=2, dtypes=ACTIVATION_DTYPES)
    M, K = x.shape
    num_slots, rank = check_adapters(name, "lora_a", lora_a, x, K)
    for i, operand in enumerate(lora_a):
        check(
            operand.values.shape[1] == rank,
            name,
            f"lora_a[{i}] has rank {operand.values.shape[1]}, lora_a[0] has {rank}",
        )
        check(
            operand.values.stride() == lora_a[0].values.stride(),
            name,
            f"lora_a[{i}] has strides {operand.values.stride()}; all slices share strides",
        )
    check(1 <= rank <= MAX_RANK, name, f"rank={rank}; allowed: 1 to {MAX_RANK}")
    check_tensor(name, "token_lora_indices", token_lora_indices, dim=1, dtypes=(torch.int32,), device=x.device)
    check(
        token_lora_indices.numel() >= M,
        name,
        f"token_lora_indices has {token_lora_indices.numel()} entries for {M} tokens",
    )
    config = config or config_for(M, K, rank, num_slots)
    check(is_legal(config), name, f"config={config} is not legal; see is_legal")
    shape = (config.splits, len(lora_a), M, rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device) if out is None else out
    check(
        h.shape == shape and h.is_contiguous() and h.dtype == torch.float32,
        name,
        f"out is {h.dtype} {tuple(h.shape)}; needed: contiguous float32 {shape}",
    )
    if quantize_to is not None:
        scales = M * (triton.cdiv(K, GROUP) if quantize_by_groups else 1)
        check(
            quantize_to[1].numel() == scales and quantize_to[1].is_contiguous(),
            name,
            f"quantize_to[1] is {tuple(quantize_to[1].shape)}; needed: contiguous, {scales} values for x {tuple(x.shape)}",
        )
    picked = choose(name, x.device, implementation)
    if M == 0:
        return h
    if picked is Implementation.REFERENCE:
        has = valid_slots_ref(token_lora_indices[:M], num_slots, active_lora_ids) >= 0
        full = lora_shrink_ref(x, lora_a, token_lora_indices[:M], active_lora_ids)
        h[:, :, has] = 0.0
        h[0][:, has] = full[:, has]
        if quantize_to is not None:
            codes, scale = quantize_groups_ref(x) if quantize_by_groups else quantize_ref(x)
            quantize_to[0].copy_(codes)
            quantize_to[1].copy_(scale.view_as(quantize_to[1]))
        return h
    m_tiles = triton.cdiv(M, config.block_m)
    num_quant = M if quantize_to is not None else 0
    xq, x_scale = quantize_to if quantize_to is not None else (x, h)
    grid = (num_quant + config.splits * len(lora_a) * config.groups * m_tiles,)
    _lora_shrink_kernel[grid](
        x, x.stride(0), xq, x_scale,
        *stack_pointers(lora_a), lora_a[0].values.stride(0), lora_a[0].values.stride(1),
        token_lora_indices, token_lora_indices if active_lora_ids is None else active_lora_ids,
        0 if active_lora_ids is None else active_lora_ids.numel(), h,
        M, K, rank, num_slots, num_quant, m_tiles, OP_SMALLEST_SCALE,
        NUM_SLICES=len(lora_a), SPLITS=config.splits, GROUPS=config.groups, BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        BLOCK_R=max(16, triton.next_power_of_2(rank)), A_IS_FP8=lora_a[0].format is Format.FP8_E4M3,
        A_IS_NVFP4=lora_a[0].format is Format.NVFP4, HAS_ACTIVE=active_lora_ids is not None,
        ACTIVE_BLOCK=triton.next_power_of_2(active_lora_ids.numel()) if active_lora_ids is not None else 1,
        QUANT_BLOCK=groups_at_once(K) if quantize_by_groups else min(2048, triton.next_power_of_2(K)),
        QUANT_GROUP=GROUP if quantize_by_groups else 0, ROUND_FIRST=INTERPRETED, USE_PDL=use_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return h
