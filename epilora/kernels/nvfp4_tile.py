"""NVFP4 codes widened to 16 bits in registers: the device helper of every kernel that reads NVFP4 adapters or weights.

    real[r, k] = e2m1(code[r, k]) * e4m3(scale[r, k / 16]) * global_scale

An e2m1 code is the top of a 16-bit float: its three bits put at the exponent's lowest two and the mantissa's highest one, and its
sign at the top, give the code's value times a fixed power of two, zeros and subnormals included. One multiplication with the block
scale (itself times a power of two that keeps it in range) gives e2m1 * e4m3 exactly: at most six significant bits. What is left of
the powers of two, `nvfp4_unit`, multiplies the fp32 sum together with the global scale.

Compiled kernels decode four bytes (eight codes) at a time in 32-bit registers by `_asm`; Triton's own operations would take one code
a register. In the interpreter, which has no inline assembly, the same numbers come from plain arithmetic.

Legend: R rows, K columns (a multiple of 16); two codes a byte, the even column in the low half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import INTERPRETED

BLOCK = 16  # values of K under one scale
# Where a code's lowest bit goes. The bits are then worth the code over 2**126 (bf16) or 2**14 (fp16).
_PLACES = {"bf16": 6, "f16": 9}


def _asm(kind: str) -> str:
    """PTX that decodes four bytes ($4) under four block scales ($5, $6: two registers of two values, times 2**factor) into the values
    of the low halves ($0, $1) and of the high halves ($2, $3), two a register.

    A byte goes to the top of its 16 bits: its high code's sign is then in place and its three bits move right; the low code first
    moves up by four. Multiplying is an fma with -0.0, which sm_80 and newer have.
    """
    shift = _PLACES[kind]
    right = 12 - shift  # the three bits stand at 12
    mask = 0x70007 << shift
    lines = [".reg .b32 t, s, m, z;", "mov.b32 z, 0x80008000;"]
    for pair, selector in ((0, "0x1404"), (1, "0x3424")):
        lines.append(f"prmt.b32 t, $4, 0, {selector};")  # bytes (0, b, 0, b'): each byte at the top of 16 bits
        lines += [
            "and.b32 s, t, 0x80008000;",
            f"shr.u32 m, t, {right};",
            f"and.b32 m, m, {mask:#x};",
            "or.b32 m, m, s;",
            f"fma.rn.{kind}x2 ${2 + pair}, m, ${5 + pair}, z;",
            "shl.b32 t, t, 4;",
            "and.b32 s, t, 0x80008000;",
            f"shr.u32 m, t, {right};",
            f"and.b32 m, m, {mask:#x};",
            "or.b32 m, m, s;",
            f"fma.rn.{kind}x2 ${pair}, m, ${5 + pair}, z;",
        ]
    return "{" + " ".join(lines) + "}"


ASM_BF16 = tl.constexpr(_asm("bf16"))
ASM_FP16 = tl.constexpr(_asm("f16"))
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def nvfp4_unit(dtype: tl.constexpr):
    """What the fp32 result of a product with widened values is multiplied with: a power of two."""
    unit: tl.constexpr = 2.0**26 if dtype == tl.bfloat16 else 2.0**7 if dtype == tl.float16 else 1.0
    return unit


@triton.jit
def _magnitude(code):
    """fp32 magnitude of a code's three low bits (int32)."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    return tl.where(exponent == 0, 0.5 * mantissa, normal)


@triton.jit
def widen_halves(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """(even columns, odd columns), each [ROWS, COLUMNS / 2] in `dtype`: real values over global_scale * nvfp4_unit.

    packed: uint8 [ROWS, COLUMNS / 2]. scales: e4m3 [ROWS, COLUMNS / 16]. dtype: bf16, fp16; fp32 in the interpreter.
    """
    HALF: tl.constexpr = COLUMNS // 2
    BLOCKS: tl.constexpr = COLUMNS // 16
    wide = scales.to(tl.float32)
    if _INTERPRETED:
        wide = wide * (1.0 / nvfp4_unit(dtype))
        spread = tl.broadcast_to(wide[:, :, None], (ROWS, BLOCKS, 8)).reshape(ROWS, HALF)
        code = packed.to(tl.int32)
        low = _magnitude(code) * tl.where((code & 8) != 0, -1.0, 1.0) * spread
        high = _magnitude(code >> 4) * tl.where((code & 128) != 0, -1.0, 1.0) * spread
        return low.to(dtype), high.to(dtype)
    if dtype == tl.bfloat16:
        spread = tl.broadcast_to((wide * 2.0**100).to(dtype)[:, :, None], (ROWS, BLOCKS, 8)).reshape(ROWS, HALF)
        low, high = tl.inline_asm_elementwise(
            ASM_BF16, "=r,=r,=r,=r,r,r,r", [packed, spread], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        spread = tl.broadcast_to((wide * 2.0**7).to(dtype)[:, :, None], (ROWS, BLOCKS, 8)).reshape(ROWS, HALF)
        low, high = tl.inline_asm_elementwise(
            ASM_FP16, "=r,=r,=r,=r,r,r,r", [packed, spread], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def widen_nvfp4(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """[ROWS, COLUMNS] in `dtype`, the two halves of `widen_halves` in the order of the columns."""
    low, high = widen_halves(packed, scales, ROWS, COLUMNS, dtype)
    return tl.interleave(low, high)


@triton.jit
def fragment_order(half, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, HALF] with its columns in another order: the one in which a thread's share of a matrix operand, two neighbours out of
    every eight columns (four threads a row), becomes neighbours in memory: 16 bytes of codes that one load brings, under two block scales.
    Both operands of a product are reordered, so its sum runs over the same terms.
    """
    PARTS: tl.constexpr = 4 if HALF >= 64 else HALF // 16
    GROUPS: tl.constexpr = HALF // (16 * PARTS)
    split = tl.reshape(half, (ROWS, GROUPS, 4, PARTS, 2, 2))  # thread, product, upper or lower half, neighbour
    return tl.reshape(tl.permute(split, (0, 1, 3, 4, 2, 5)), (ROWS, HALF))


@triton.jit
def load_nvfp4_rows(
    codes_ptr, scales_ptr, rows, mask, R, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr
):
    """[ROWS, COLUMNS] widened values of contiguous rows of R columns (zeros from R on and where `mask` is false).

    rows: int64 [ROWS] row numbers in codes uint8 [., R / 2] and scales e4m3 [., R / 16].
    """
    half = tl.arange(0, COLUMNS // 2)
    block = tl.arange(0, COLUMNS // 16)
    packed = tl.load(
        codes_ptr + rows[:, None] * (R // 2) + half[None, :], mask=mask[:, None] & (half * 2 < R)[None, :], other=0
    )
    scales = tl.load(
        scales_ptr + rows[:, None] * (R // 16) + block[None, :],
        mask=mask[:, None] & (block * 16 < R)[None, :],
        other=0.0,
    )
    return widen_nvfp4(packed, scales, ROWS, COLUMNS, dtype)
