"""Compile the decode kernels offline and print one JSON object a line: {"kernel", "cc", "registers", "stack", "shared"}.

Triton kernels in a process of its own, without the interpreter and without a GPU: `python tests/kernels/compile_decode.py 89 90`.
"""

from __future__ import annotations

import json
import sys

import triton.language as tl
from compile_large import compile_kernel

from epilora.kernels import fused_lora_gemm, lora_shrink, quantize

TYPES = {"w_scale_ptr": "*fp32", "h_ptr": "*fp32", "slot_ptr": "*i32", "sorted_ptr": "*i32", "active_ptr": "*i32"}
TYPES |= {f"s{i}_ptr": "*fp32" for i in range(4)}
FP8_A = {f"a{i}_ptr": "*fp8e4nv" for i in range(4)}
FP8_B = {f"b{i}_ptr": "*fp8e4nv" for i in range(4)}


def gemm_constants(config: fused_lora_gemm.GemmConfig, *, fp8: bool, lora: bool, pdl: bool) -> dict:
    return {
        "NUM_SLICES": 3,
        "SPLITS": 8,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_R": 64,
        "SWAP_AB": config.swap_ab,
        "SCALE_PER_CHANNEL": True,
        "HAS_BIAS": False,
        "HAS_LORA": lora,
        "B_IS_FP8": fp8,
        "H_DTYPE": tl.bfloat16,
        "HAS_SORTED": not config.swap_ab,
        "HAS_ACTIVE": True,
        "ACTIVE_BLOCK": 64,
        "EVEN_K": True,
        "IMPRECISE": 128,
        "USE_PDL": pdl,
    }


def cases(cc: int):
    """(name, kernel, constants, warps, stages, types, options) of everything compiled for `cc`."""
    pdl = cc >= 90
    launch = {"launch_pdl": True} if pdl else {}
    yield "quantize", quantize._quantize_kernel, {"BLOCK_K": 4096, "ROUND_FIRST": False}, 8, 3, {}, {}
    for name, config, fp8 in (
        ("shrink", lora_shrink.config_for(16, 4096, 64, 8), False),
        ("shrink_fp8", lora_shrink.config_for(32, 4096, 64, 8), True),
    ):
        constants = {
            "NUM_SLICES": 3,
            "SPLITS": config.splits,
            "GROUPS": config.groups,
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "BLOCK_R": 64,
            "A_IS_FP8": fp8,
            "HAS_ACTIVE": True,
            "ACTIVE_BLOCK": 64,
            "QUANT_BLOCK": 2048,
            "ROUND_FIRST": False,
            "USE_PDL": pdl,
        }
        yield (
            name,
            lora_shrink._lora_shrink_kernel,
            constants,
            config.num_warps,
            config.num_stages,
            FP8_A if fp8 else {},
            launch,
        )
    for name, M, fp8, lora in (
        ("k2_few", 16, False, True),
        ("k2_fp8", 32, True, True),
        ("k2_many", 512, False, True),
        ("k2_base", 16, False, False),
    ):
        config = fused_lora_gemm.config_for(M, (4096, 1024, 1024), 4096, 99 * 1024 if cc in (89, 120) else 227 * 1024)
        constants = gemm_constants(config, fp8=fp8, lora=lora, pdl=pdl)
        kernel = fused_lora_gemm._fused_lora_gemm_kernel
        yield name, kernel, constants, config.num_warps, config.num_stages, FP8_B if fp8 else {}, launch


def main() -> None:
    for cc in map(int, sys.argv[1:]):
        for name, kernel, constants, warps, stages, types, options in cases(cc):
            found = compile_kernel(kernel, constants, cc, warps=warps, stages=stages, types=TYPES | types, **options)
            print(json.dumps({"kernel": name, "cc": cc, **found}), flush=True)


if __name__ == "__main__":
    main()
