"""Grouped rows against one row at a time; no vLLM needed."""

import pytest
import torch

from epilora.kernels.cpu_reference import lora_delta, w8a16_linear, w8a16_lora_linear
from epilora.plugin.cpu_lora import add_lora, group_rows

L, R, K, WIDTHS = 3, 4, 10, (6, 2, 2)


def buffers(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    a_LSK = torch.randn(L, len(WIDTHS) * R, K, generator=generator).to(dtype)
    return a_LSK, tuple(torch.randn(L, 1, n, R, generator=generator).to(dtype) for n in WIDTHS)


def one_by_one(y, x, a_LSK, b_slices, *, mapping, ranks):
    out = y.clone()
    for row, slot in enumerate(mapping):
        column = 0
        for i, b in enumerate(b_slices):
            if slot >= 0 and ranks[i][slot]:
                a = a_LSK[slot, i * R : i * R + ranks[i][slot]].double()
                h = a @ x[row].double()
                out[row, column : column + b.shape[2]] += (b[slot, 0, :, : ranks[i][slot]].double() @ h).float()
            column += b.shape[2]
    return out


MAPPINGS = {
    "none": [-1, -1, -1],
    "one": [2],
    "all of one": [1, 1, 1, 1],
    "neighbours": [-1, 0, 0, 1, 1, -1],
    "scattered": [2, -1, 0, 2, -1, 0, 1],
    "one row each": [0, 1, 2],
    "empty": [],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", MAPPINGS)
def test_add_lora_equals_rows_one_by_one(name, padding, dtype):
    mapping = MAPPINGS[name]
    a_LSK, b_slices = buffers(dtype)
    ranks = [[R, R, 2], [R, R, R], [0, R, R]]  # slot 0 has nothing for the last slice, slot 2 a smaller first one
    x = torch.randn(len(mapping) + padding, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = torch.randn(len(mapping) + padding, sum(WIDTHS), generator=torch.Generator().manual_seed(2))
    want = one_by_one(y, x, a_LSK, b_slices, mapping=mapping, ranks=ranks)
    got = y.clone()
    rows = group_rows(torch.tensor(mapping, dtype=torch.long))
    add_lora(got, x, a_LSK, b_slices, rows=rows, ranks=ranks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    untouched = [i for i in range(len(got)) if i >= len(mapping) or mapping[i] < 0]
    assert torch.equal(got[untouched], y[untouched])


def test_group_rows_prefers_slices():
    rows = group_rows(torch.tensor([1, 1, -1, 0, 1, 0]))
    assert rows.num_rows == 6
    (slot0, rows0), (slot1, rows1) = rows.groups
    assert (slot0, rows0.tolist()) == (0, [3, 5])
    assert (slot1, rows1.tolist()) == (1, [0, 1, 4])
    assert group_rows(torch.tensor([-1, 2, 2])).groups == ((2, slice(1, 3)),)


def test_one_slice_reads_its_used_rank_only():
    a_LSK = torch.randn(1, R, K)
    b = torch.zeros(1, 1, 5, R)
    b[:, :, :, :2] = 1.0
    a_LSK[:, 2:] = float("nan")  # never read
    y = torch.zeros(2, 5)
    add_lora(y, torch.ones(2, K), a_LSK, (b,), rows=group_rows(torch.tensor([0, 0])), ranks=[[2]])
    torch.testing.assert_close(y, a_LSK[0, :2].sum().expand(2, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matched_arithmetic_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(7, K, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(7, 1, generator=generator) / 100
    x, bias = torch.randn(3, K, generator=generator).to(dtype), torch.randn(7, generator=generator)
    a, b = torch.randn(R, K, generator=generator), torch.randn(7, R, generator=generator)
    exact = (x.double() @ codes.double().t()) * scale.double().t() + bias.double()
    torch.testing.assert_close(w8a16_linear(x, codes, scale, bias), exact.to(dtype))
    exact = exact + x.double() @ a.double().t() @ b.double().t()
    got = w8a16_lora_linear(x, codes, scale, bias, a, b)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    summed = w8a16_linear(x, codes, scale, bias, out_dtype=torch.float32) + lora_delta(x, a, b, out_dtype=torch.float32)
    assert torch.equal(got, summed.to(dtype))


def test_matched_does_not_overflow_in_fp16():
    codes = torch.full((1, 512), 448.0).to(torch.float8_e4m3fn)
    x = torch.full((1, 512), 8.0, dtype=torch.float16)  # x codes^T = 1.8 million, past fp16's 65504
    assert w8a16_linear(x, codes, torch.tensor([1e-3])).item() == pytest.approx(512 * 448 * 8e-3, rel=1e-3)


def test_matched_gradient_reaches_x_and_the_adapter():
    codes, scale = torch.randn(7, K).to(torch.float8_e4m3fn), torch.rand(7)
    x, a, b = (torch.randn(s, requires_grad=True) for s in ((3, K), (R, K), (7, R)))
    y = w8a16_lora_linear(x, codes, scale, None, a, b)
    y.sum().backward()
    ones = torch.ones(3, 7)
    torch.testing.assert_close(x.grad, (ones * scale) @ codes.float() + ones @ b @ a)
    torch.testing.assert_close(b.grad, ones.t() @ (x @ a.t()))
    torch.testing.assert_close(a.grad, (ones @ b).t() @ x)
