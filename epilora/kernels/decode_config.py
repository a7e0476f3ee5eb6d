"""Launch configurations of the CUDA decode path: what they mean, which are legal, which are chosen, and how a kernel is compiled for them.

`is_legal` is the one predicate: launcher, tuner and tables ask it. Legend: M tokens, N out features, K in features, R rank, L slots.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import MAX_RANK
from .tiles import MAX_SLICES

MAX_TOKENS = 32
SHARED_BYTES = 227 * 1024  # a Hopper block's limit
QUANTISE_WARPS = 8  # of a prologue block that only quantises
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
    rows_fit = K % 16 == 0 and all(n % 16 == 0 for n in slices) and rank % 8 == 0 and rank <= MAX_RANK
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
    return min(32, (budget - epilogue_bytes(config, M, num_slices, rank, K)) // stage_bytes(config, M))


def stage_bytes(config: DecodeConfig, M: int) -> int:
    """Bytes of one ring stage: weights, and the tokens' codes where they travel through the ring."""
    return (config.row_tiles * 16 + (0 if config.fused else token_tiles(M) * 8)) * config.stage_k


def token_tiles(M: int) -> int:
    """Tiles of 8 tokens that a GEMM is compiled for."""
    return 1 if M <= 8 else 2 if M <= 16 else 4


def epilogue_bytes(config: DecodeConfig, M: int, num_slices: int, rank: int, K: int) -> int:
    """Bytes of shared memory behind the ring: partial sums, scales, h, the adapter's part, codes of a single launch."""
    tokens, rows = token_tiles(M) * 8, config.row_tiles * 16
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
        same = [e for e in same if e["rank"] == near]
        enough = [e for e in same if e["M"] >= min(M, max(x["M"] for x in same))]
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
        "NT": token_tiles(M),
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
