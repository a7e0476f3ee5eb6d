"""Compile the large-batch kernels offline and print one JSON object a line: {"kernel", "cc", "registers", "stack",
"shared", "mma"}.

Runs in a process of its own, without the interpreter and without a GPU: `python tests/kernels/compile_large.py 89 90
100 120`. Registers and stack come from cuobjdump (ships with Triton) on the compiled binary; a stack is a spill or an
indexed array.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epilora.kernels import lora_expand, training, w8a16
from epilora.kernels.tiles import NVFP4, PER_BLOCK, PER_CHANNEL
from epilora.quant.formats import Format, ScaleAxis

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "*fp8e4nv": "w_ptr xq_ptr",
    "*fp32": "ws_ptr wg_ptr part_ptr x_scale_ptr bs0_ptr bs1_ptr bs2_ptr bs3_ptr as0_ptr as1_ptr as2_ptr as3_ptr "
    "ag0_ptr ag1_ptr ag2_ptr ag3_ptr bg0_ptr bg1_ptr bg2_ptr bg3_ptr",
    "*i32": "counter_ptr slots_ptr active_ptr counts_ptr sorted_ptr starts_ptr",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
NVFP4_W = {"w_ptr": "*u8", "ws_ptr": "*fp8e4nv"}
NVFP4_A, NVFP4_B = (
    {f"{side}{i}_ptr": "*u8" for i in range(4)} | {f"{side}s{i}_ptr": "*fp8e4nv" for i in range(4)} for side in "ab"
)
UNSPECIALISED = {"M", "num_entries", "num_slots", "num_quant"}


def compile_kernel(
    kernel, constants: dict, cc: int, *, warps: int, stages: int, types: dict | None = None, **options
) -> dict:
    """Compile one kernel for compute capability `cc` (90 for 9.0); its resources and the matrix instructions it uses."""
    names = [p.name for p in kernel.params]
    kinds = (
        {n: "*bf16" if n.endswith("_ptr") else "i32" for n in names}
        | {n: TYPES[n] for n in names if n in TYPES}
        | (types or {})
    )
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    floats = {n for n in names if signature[n] == "fp32"}
    even = [
        n
        for n in names
        if n not in constants and n not in UNSPECIALISED | floats and not signature[n].startswith("tensordesc")
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): v for n, v in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in even},
    )
    built = triton.compile(
        source, target=GPUTarget("cuda", cc, 32), options={"num_warps": warps, "num_stages": stages, **options}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(built.asm["cubin"])
        binary.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", binary.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    products = sorted(set(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", built.asm["ptx"])))
    return {"registers": registers, "stack": stack, "shared": built.metadata.shared, "mma": products}


def tile(kind: str, rows: int, columns: int) -> str:
    """Type of a tensor descriptor argument with this block."""
    return f"tensordesc<{kind}[{rows},{columns}]>"


def w8a16_constants(
    config: w8a16.W8A16Config, lora: int, slices: int, split_h: int, pdl: bool, scale: int = PER_CHANNEL.value
) -> dict:
    return {
        "R": 64,
        "NUM_SLICES": slices,
        "LORA": lora,
        "B_SCALED": False,
        "B_NVFP4": False,
        "SPLIT_H": split_h,
        "W_SCALE": scale,
        "HAS_BIAS": False,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_R": 64,
        "SPLIT_K": config.split_k,
        "GROUP_M": config.group_m,
        "EVEN_N": True,
        "EVEN_K": True,
        "SWAP": config.swap,
        "TMA": config.use_tma,
        "USE_PDL": pdl,
        "PREFETCH": 2 if pdl else 0,
    }


def cases(cc: int):
    """(name, kernel, constants, warps, stages, types) of everything compiled for `cc`."""
    pdl = cc >= 90
    shrink = {
        "R": 64,
        "NUM_SLICES": 3,
        "A_SCALED": False,
        "A_NVFP4": False,
        "BLOCK_R": 64,
        "EVEN": True,
        "ENTRIES": 64,
        "ROUND_FIRST": False,
    }
    partial = {"h_ptr": "*fp32"}
    yield (
        "shrink_small",
        lora_expand._lora_shrink_grouped_kernel,
        shrink | {"BLOCK_M": 16, "BLOCK_K": 128, "SPLIT_K": 4, "QUANT_BLOCK": 2048},
        4,
        4,
        partial,
    )
    yield (
        "shrink_large_fp8",
        lora_expand._lora_shrink_grouped_kernel,
        shrink | {"BLOCK_M": 64, "BLOCK_K": 64, "SPLIT_K": 1, "QUANT_BLOCK": 0, "A_SCALED": True},
        4,
        3,
        {f"a{i}_ptr": "*fp8e4nv" for i in range(4)},
    )
    expand = {
        "R": 64,
        "NUM_SLICES": 4,
        "B_SCALED": False,
        "B_NVFP4": False,
        "BLOCK_R": 64,
        "TILES_N": 1,
        "EVEN": True,
        "ENTRIES": 64,
        "USE_PDL": pdl,
    }
    launch = {"launch_pdl": True} if pdl else {}
    yield (
        "expand_small",
        lora_expand._lora_expand_add_kernel,
        expand | {"BLOCK_M": 16, "BLOCK_N": 128, "SPLIT_K": 4},
        4,
        1,
        partial,
        launch,
    )
    yield (
        "expand_large",
        lora_expand._lora_expand_add_kernel,
        expand | {"BLOCK_M": 64, "BLOCK_N": 128, "SPLIT_K": 1},
        4,
        1,
        {},
        launch,
    )
    yield (
        "shrink_nvfp4",
        lora_expand._lora_shrink_grouped_kernel,
        shrink | {"BLOCK_M": 16, "BLOCK_K": 128, "SPLIT_K": 4, "QUANT_BLOCK": 0, "A_NVFP4": True},
        4,
        3,
        partial | NVFP4_A,
    )
    yield (
        "expand_nvfp4",
        lora_expand._lora_expand_add_kernel,
        expand | {"BLOCK_M": 16, "BLOCK_N": 128, "SPLIT_K": 4, "B_NVFP4": True},
        4,
        1,
        partial | NVFP4_B,
        launch,
    )
    decode = w8a16.W8A16Config(16, 64, 256, True, 2, 1, 4, 3)
    constants = w8a16_constants(decode, 2, 3, 4, pdl) | {"B_NVFP4": True}
    yield "w8a16_nvfp4", w8a16._w8a16_kernel, constants, 4, 3, partial | NVFP4_B, launch
    yield "w8a16_decode", w8a16._w8a16_kernel, w8a16_constants(decode, 2, 3, 4, pdl), 4, 3, partial, launch
    eight = w8a16.W8A16Config(8, 64, 256, True, 4, 1, 4, 3)
    yield "w8a16_eight", w8a16._w8a16_kernel, w8a16_constants(eight, 2, 3, 4, pdl), 4, 3, partial, launch
    wide = w8a16.W8A16Config(128, 128, 64, True, 1, 8, 8, 2)
    yield "w8a16_wide", w8a16._w8a16_kernel, w8a16_constants(wide, 1, 3, 1, False), 8, 2, {}
    rows = 128 if cc in (90, 100) else 64  # what dx_config_for gives where a block has 99 KiB of shared memory
    dx = {
        "WIDTH": 192,
        "BLOCK_W": 64,
        "W_SCALE": PER_CHANNEL.value,
        "BLOCK_M": rows,
        "BLOCK_K": 128,
        "BLOCK_N": 64,
        "GROUP_M": 8,
    }
    yield (
        "train_dx",
        training._train_dx_kernel,
        dx | {"EVEN_N": True, "EVEN_K": True, "SWAP": False, "TMA": False},
        8,
        2,
        {},
    )
    if cc in (90, 100):  # the defaults for many tokens where a block has 227 KiB of shared memory
        wide = w8a16.w8a16_config_for(4096, 4096, 4096)
        types = {"w_ptr": tile("fp8e4nv", wide.block_n, wide.block_k)}
        constants = w8a16_constants(wide, 1, 3, 1, False)
        yield "w8a16_default", w8a16._w8a16_kernel, constants, wide.num_warps, wide.num_stages, types
        dxc = training.dx_config_for(4096, 4096, 4096)
        types = {"g_ptr": tile("bf16", dxc.block_m, dxc.block_n), "w_ptr": tile("fp8e4nv", dxc.block_n, dxc.block_k)}
        constants = dx | {"BLOCK_M": dxc.block_m, "BLOCK_K": dxc.block_k, "BLOCK_N": dxc.block_n, "EVEN_N": True}
        constants |= {"EVEN_K": True, "SWAP": dxc.swap, "TMA": True}
        yield "train_dx_default", training._train_dx_kernel, constants, dxc.num_warps, dxc.num_stages, types
    yield (
        "widen_panel",
        training._widen_panel_kernel,
        {"W_SCALE": PER_CHANNEL.value, "BLOCK_N": 16, "BLOCK_K": 512, "EVEN": True},
        4,
        3,
        {},
    )


def base_cases(cc: int):
    """As `cases`, for block-scaled and NVFP4 bases: default tiles for 1 and 4096 tokens, dx, the panel."""
    limit = 227 * 1024 if cc in (90, 100) else 99 * 1024
    for name, scale, kind, types in (
        ("block", PER_BLOCK.value, ScaleAxis.BLOCK, {}),
        ("nvfp4", NVFP4.value, Format.NVFP4, NVFP4_W),
    ):
        for M, split_h in ((1, 4), (16, 4), (4096, 1)) if cc == 90 else ((1, 4), (4096, 1)):
            config = w8a16.w8a16_config_for(M, 4096, 4096, limit, kind)
            constants = w8a16_constants(config, 2 if M <= 16 else 1, 3, split_h, False, scale)
            more = types | ({"h_ptr": "*fp32"} if M <= 16 else {})
            yield f"w16_{name}_{M}", w8a16._w8a16_kernel, constants, config.num_warps, config.num_stages, more
        dx = training.dx_config_for(4096, 4096, 4096, limit, kind)
        constants = {
            "WIDTH": 192, "BLOCK_W": 64, "W_SCALE": scale, "BLOCK_M": dx.block_m, "BLOCK_K": dx.block_k, "BLOCK_N": dx.block_n,
            "GROUP_M": 8, "EVEN_N": True, "EVEN_K": True, "SWAP": dx.swap, "TMA": dx.use_tma,
        }  # fmt: skip
        more = types
        if dx.use_tma:
            more = {"g_ptr": tile("bf16", dx.block_m, dx.block_n), "w_ptr": tile("fp8e4nv", dx.block_n, dx.block_k)}
        yield f"dx_{name}", training._train_dx_kernel, constants, dx.num_warps, dx.num_stages, more
        panel = {"W_SCALE": scale, "BLOCK_N": 16, "BLOCK_K": 512, "EVEN": True}
        yield f"panel_{name}", training._widen_panel_kernel, panel, 4, 3, types


def main() -> None:
    for cc in map(int, sys.argv[1:]):
        for name, kernel, constants, warps, stages, types, *options in (*cases(cc), *base_cases(cc)):
            found = compile_kernel(
                kernel, constants, cc, warps=warps, stages=stages, types=types, **(options[0] if options else {})
            )
            print(json.dumps({"kernel": name, "cc": cc, **found}), flush=True)


if __name__ == "__main__":
    main()
