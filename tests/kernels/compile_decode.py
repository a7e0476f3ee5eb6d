"""Compile the decode kernels offline and print one JSON object a line: {"kernel", "cc", "registers", "stack", "shared"}.

Triton kernels in a process of its own, without the interpreter and without a GPU: `python tests/kernels/compile_decode.py 89 90`.
"""

from __future__ import annotations

import json
import sys

import triton.language as tl
from compile_large import compile_kernel

from epilora.kernels import fused_lora_gemm, lora_shrink, quantize, quantize_nvfp4
from epilora.quant.formats import Format, ScaleAxis

TYPES = {
    "w_scale_ptr": "*fp32",
    "wg_ptr": "*fp32",
    "xg_ptr": "*fp32",
    "smallest_scale": "fp32",
    "h_ptr": "*fp32",
    "slot_ptr": "*i32",
    "sorted_ptr": "*i32",
    "active_ptr": "*i32",
}
TYPES |= {f"{kind}{i}_ptr": "*fp32" for kind in "sg" for i in range(4)}
FP8_A = {f"a{i}_ptr": "*fp8e4nv" for i in range(4)}
NVFP4_A, NVFP4_B = (
    {f"{side}{i}_ptr": "*u8" for i in range(4)} | {f"s{i}_ptr": "*fp8e4nv" for i in range(4)} for side in "ab"
)
FP8_B = {f"b{i}_ptr": "*fp8e4nv" for i in range(4)}


def gemm_constants(config: fused_lora_gemm.GemmConfig, *, stored: str, base: str = "", lora: bool, pdl: bool) -> dict:
    return {
        "NUM_SLICES": 3,
        "SPLITS": 8,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_R": 64,
        "SWAP_AB": config.swap_ab,
        "SCALE_PER_CHANNEL": not base,
        "SCALE_BLOCK": 128 if base == "block" else 0,
        "W_NVFP4": base.startswith("nvfp4"),
        "NATIVE_FP4": base == "nvfp4_native",
        "ROUND_FIRST": False,
        "HAS_BIAS": False,
        "HAS_LORA": lora,
        "B_IS_FP8": stored == "fp8",
        "B_IS_NVFP4": stored == "nvfp4",
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
    for name, config, stored, types in (
        ("shrink", lora_shrink.config_for(16, 4096, 64, 8), "", {}),
        ("shrink_fp8", lora_shrink.config_for(32, 4096, 64, 8), "fp8", FP8_A),
        ("shrink_nvfp4", lora_shrink.config_for(16, 4096, 64, 8), "nvfp4", NVFP4_A),
    ):
        constants = {
            "NUM_SLICES": 3,
            "SPLITS": config.splits,
            "GROUPS": config.groups,
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "BLOCK_R": 64,
            "A_IS_FP8": stored == "fp8",
            "A_IS_NVFP4": stored == "nvfp4",
            "HAS_ACTIVE": True,
            "ACTIVE_BLOCK": 64,
            "QUANT_BLOCK": 2048,
            "QUANT_GROUP": 0,
            "ROUND_FIRST": False,
            "USE_PDL": pdl,
        }
        yield (
            name,
            lora_shrink._lora_shrink_kernel,
            constants,
            config.num_warps,
            config.num_stages,
            types,
            launch,
        )
    for name, M, stored, lora, types in (
        ("k2_few", 16, "", True, {}),
        ("k2_fp8", 32, "fp8", True, FP8_B),
        ("k2_nvfp4", 16, "nvfp4", True, NVFP4_B),
        ("k2_many", 512, "", True, {}),
        ("k2_base", 16, "", False, {}),
    ):
        config = fused_lora_gemm.config_for(M, (4096, 1024, 1024), 4096, 99 * 1024 if cc in (89, 120) else 227 * 1024)
        constants = gemm_constants(config, stored=stored, lora=lora, pdl=pdl)
        kernel = fused_lora_gemm._fused_lora_gemm_kernel
        yield name, kernel, constants, config.num_warps, config.num_stages, types, launch


NVFP4_BASE = {"xq_ptr": "*u8", "w_ptr": "*u8", "x_scale_ptr": "*fp8e4nv", "w_scale_ptr": "*fp8e4nv"}


def base_cases(cc: int):
    """As `cases`, for block-scaled and NVFP4 bases and what quantises for them."""
    constants = {"STEP": 16, "GROUP": 128, "ROUND_FIRST": False}
    yield "quantize_groups", quantize._quantize_groups_kernel, constants, 4, 3, {"smallest_scale": "fp32"}, {}
    constants = {"STEP": 128, "ROUND_FIRST": False}
    types = {"codes_ptr": "*u8", "scales_ptr": "*fp8e4nv", "inverse_ptr": "*fp32"}
    yield "quantize_nvfp4", quantize_nvfp4._quantize_nvfp4_kernel, constants, 4, 3, types, {}
    bases = [("block", ScaleAxis.BLOCK, {}), ("nvfp4", Format.NVFP4, NVFP4_BASE)]
    if cc in (100, 120):  # where the tensor cores multiply NVFP4
        bases.append(("nvfp4_native", Format.NVFP4, NVFP4_BASE))
    shared = 99 * 1024 if cc in (89, 120) else 227 * 1024
    for base, kind, types in bases:
        for M in (16, 512):
            config = fused_lora_gemm.config_for(M, (4096, 1024, 1024), 4096, shared, kind=kind)
            constants = gemm_constants(config, stored="", base=base, lora=True, pdl=False)
            kernel = fused_lora_gemm._fused_lora_gemm_kernel
            yield f"k2_{base}_{M}", kernel, constants, config.num_warps, config.num_stages, types, {}


def main() -> None:
    for cc in map(int, sys.argv[1:]):
        for name, kernel, constants, warps, stages, types, options in (*cases(cc), *base_cases(cc)):
            found = compile_kernel(kernel, constants, cc, warps=warps, stages=stages, types=TYPES | types, **options)
            print(json.dumps({"kernel": name, "cc": cc, **found}), flush=True)


if __name__ == "__main__":
    main()
