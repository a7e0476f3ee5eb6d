"""NVFP4 codes in registers: every code under every scale comes out exact, by plain arithmetic and by the compiled kernels' PTX.

The interpreter has no inline assembly, so the PTX text is executed here by `run_ptx`, which knows the six instructions it uses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from epilora.kernels import nvfp4_tile
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.nvfp4 import pack_e2m1, quantize_nvfp4_ref, quantize_nvfp4_stack_ref
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}
UNIT = {"bf16": 2.0**26, "f16": 2.0**7}
FACTOR = {"bf16": 2.0**100, "f16": 2.0**7}


def run_ptx(text: str, kind: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers after the program; inputs: uint32 arrays. fma on two 16-bit floats is computed in fp64 and rounded once."""
    held = dict(inputs)

    def get(name: str) -> np.ndarray:
        return held[name] if name in held else np.uint32(int(name, 0))

    def halves(word: np.ndarray) -> list[torch.Tensor]:
        parts = [(word >> shift).astype(np.uint16).astype(np.int16) for shift in (0, 16)]
        return [torch.from_numpy(part).view(TORCH[kind]).double() for part in parts]

    for line in text.strip("{}").split(";"):
        op, *names = line.replace(",", " ").split() or [""]
        if not op or op == ".reg":
            continue
        out, *args = names
        a = [get(name) for name in args]
        if op == "mov.b32":
            held[out] = a[0]
        elif op == "prmt.b32":
            source = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in a[:2] for i in range(4)]
            picks = [source[(int(a[2]) >> 4 * i) & 7] for i in range(4)]
            held[out] = picks[0] | picks[1] << np.uint32(8) | picks[2] << np.uint32(16) | picks[3] << np.uint32(24)
        elif op in ("and.b32", "or.b32"):
            held[out] = a[0] & a[1] if op == "and.b32" else a[0] | a[1]
        elif op in ("shr.u32", "shl.b32"):
            held[out] = a[0] >> a[1] if op == "shr.u32" else a[0] << a[1]
        elif op == f"fma.rn.{kind}x2":
            assert int(a[2]) == 0x80008000, "the addend is -0.0"
            products = [
                (x * y).to(TORCH[kind]).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
                for x, y in zip(halves(a[0]), halves(a[1]), strict=True)
            ]
            held[out] = products[0] | products[1] << np.uint32(16)
        else:
            raise AssertionError(f"instruction {op} is unknown here")
    return held


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_ptx_decodes_every_byte_under_every_scale_exactly(kind):
    scales = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448; 127 is NaN
    byte = torch.arange(256, dtype=torch.uint8)
    stored, at = (t.flatten() for t in torch.meshgrid(byte.long(), torch.arange(127), indexing="ij"))
    scale = scales[at]
    words = torch.stack([stored, stored.flip(0), stored.roll(77), stored.roll(1000)])  # four bytes a register
    spread = [scale, scale.flip(0), scale.roll(77), scale.roll(1000)]
    packed = (words << torch.tensor([0, 8, 16, 24])[:, None]).sum(0)
    values = [(s * FACTOR[kind]).to(TORCH[kind]).view(torch.int16).long() & 0xFFFF for s in spread]
    inputs = {
        "$4": packed.numpy().astype(np.uint32),
        "$5": (values[0] | values[1] << 16).numpy().astype(np.uint32),
        "$6": (values[2] | values[3] << 16).numpy().astype(np.uint32),
    }
    out = run_ptx(nvfp4_tile._asm(kind), kind, inputs)
    for i in range(4):
        pair = i // 2
        for high in (False, True):
            word = out[f"${2 * high + pair}"]
            half = (word >> np.uint32(16 * (i % 2))).astype(np.uint16).astype(np.int16)
            got = torch.from_numpy(half).view(TORCH[kind]).double() * UNIT[kind]
            codes = (words[i] >> 4 if high else words[i] & 15)[:, None].repeat(1, 16).to(torch.uint8)
            want = dequantize(
                Operand(
                    pack_e2m1(codes), Format.NVFP4, ScaleAxis.BLOCK, spread[i][:, None].to(torch.float8_e4m3fn), (1, 16),
                    torch.ones(1),
                )
            )[:, 0]  # fmt: skip
            assert torch.equal(got, want.double()), (kind, i, high)


@triton.jit
def _widen_kernel(codes_ptr, scales_ptr, out_ptr, R, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    wide = nvfp4_tile.load_nvfp4_rows(
        codes_ptr, scales_ptr, rows.to(tl.int64), rows < ROWS - 1, R, ROWS, COLUMNS, out_ptr.dtype.element_ty
    )
    real = wide.to(tl.float32) * nvfp4_tile.nvfp4_unit(out_ptr.dtype.element_ty)
    columns = tl.arange(0, COLUMNS)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], real.to(out_ptr.dtype.element_ty))


def test_rows_are_widened_exactly(device, dtype):
    operand = quantize_nvfp4_ref(torch.randn(8, 48) * torch.logspace(-3, 0, 8)[:, None])
    out = torch.full((8, 64), float("nan"), dtype=dtype, device=device)
    _widen_kernel[(1,)](operand.values.to(device), operand.scales.to(device), out, 48, ROWS=8, COLUMNS=64)
    want = dequantize(dataclasses.replace(operand, global_scale=torch.ones(1)))
    want[7] = 0  # masked
    assert torch.equal(out[:, :48].float().cpu(), want)
    assert (out[:, 48:] == 0).all()


def test_operand_refuses_what_is_not_nvfp4():
    good = quantize_nvfp4_stack_ref(torch.randn(3, 4, 32))
    values, scales, whole = good.values, good.scales, good.global_scale
    assert good.columns == 32
    assert whole.shape == (3,)

    def make(scales=scales, whole=whole, block=(1, 16), axis=ScaleAxis.BLOCK):
        return Operand(values, Format.NVFP4, axis, scales, block, whole)

    with pytest.raises(ValueError, match=r"global scale is torch.float32 \(1,\); needed: float32, 3 value"):
        make(whole=whole[:1])
    with pytest.raises(ValueError, match="global scale is missing"):
        make(whole=None)
    with pytest.raises(ValueError, match=r"scales are torch.float8_e4m3fn \(3, 2, 4\) for K=32; needed: .*\(3, 4, 2\)"):
        make(scales=scales.mT)
    with pytest.raises(ValueError, match=r"scales are torch\.float32"):
        make(scales=scales.float())
    with pytest.raises(ValueError, match=r"block=\(1, 32\); needed: axis block, block \(1, 16\)"):
        make(block=(1, 32))
    with pytest.raises(ValueError, match="axis=channel"):
        make(axis=ScaleAxis.CHANNEL)
    with pytest.raises(ValueError, match="only nvfp4 has one"):
        Operand(torch.zeros(2, 2), Format.FP32, global_scale=torch.ones(1))
    with pytest.raises(
        ValueError, match=r"scales are \(2, 1\) for \(128, 256\) in blocks of \(128, 128\); needed: \(1, 2\)"
    ):
        Operand(
            torch.zeros(128, 256).to(torch.float8_e4m3fn), Format.FP8_E4M3, ScaleAxis.BLOCK, torch.ones(2, 1), (128, 128)
        )  # fmt: skip
