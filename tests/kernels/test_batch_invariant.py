"""A row's bits are the same alone, among few and among many rows, whatever adapters the others have."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import problem, rms_ratio

from epilora.kernels.batch_invariant import lora_linear, w8a16_linear
from epilora.kernels.decode_config import DecodeConfig, invariant_config, is_legal
from epilora.kernels.lora_decode import DecodeWorkspace, lora_decode_ref
from epilora.kernels.lora_expand import group_tokens
from epilora.kernels.w8a16 import w8a16_gemm_ref

IMPLEMENTATIONS = ["cuda", "triton"] if torch.cuda.is_available() else ["interpreter"]
LIMIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
WIDTHS, K, R, L = (48, 32), 272, 16, 4
# Rows of the whole batch that are computed again by themselves. In the interpreter a dot is the host's matrix product, whose order
# differs with a row's place in its tile; a matrix instruction's does not.
BATCHES = [(0, 1), (0, 9), (0, 20), (0, 32)] + ([(3, 20), (1, 40)] if torch.cuda.is_available() else [])


def whole(dtype, device, M=40):
    return problem(M, K, WIDTHS, R, L, kind="mixed", dtype=dtype, device=device)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_adapters", [True, False], ids=["adapters", "base"])
def test_lora_linear_rows_do_not_depend_on_the_batch(with_adapters, implementation, device, dtype):
    p = whole(dtype, device)
    workspace = DecodeWorkspace(device, max_k=K, max_h=DecodeWorkspace.h_values(len(WIDTHS), R))
    lora = (p.lora_a, p.lora_b) if with_adapters else ((), ())

    def run(rows, slots):
        return lora_linear(
            p.x[rows],
            p.weight,
            *lora,
            slots if with_adapters else None,
            workspace=workspace,
            implementation=implementation,
        )

    y = run(slice(0, 40), p.slots)
    reference = lora_decode_ref(p.x, p.weight, *p.lora) if with_adapters else lora_decode_ref(p.x, p.weight)
    assert rms_ratio(y, reference) < LIMIT[dtype]
    for start, end in BATCHES:
        assert torch.equal(run(slice(start, end), p.slots[start:end]), y[start:end]), (start, end)
    others = torch.full_like(p.slots, 1)
    others[5] = p.slots[5]
    assert torch.equal(run(slice(0, 40), others)[5], y[5])


@pytest.mark.parametrize("with_adapters", [True, False], ids=["adapters", "base"])
def test_w8a16_linear_rows_do_not_depend_on_the_batch(with_adapters, device, dtype):
    p = whole(dtype, device)

    def run(start, end):
        slots = p.slots[start:end].contiguous()
        lora = (p.lora_a, p.lora_b, slots, group_tokens(slots, L)) if with_adapters else ()
        return w8a16_linear(p.x[start:end], p.weight, *lora)

    y = run(0, 40)
    if not with_adapters:
        assert rms_ratio(y, w8a16_gemm_ref(p.x, p.weight)) < LIMIT[dtype]
    for start, end in BATCHES:
        assert torch.equal(run(start, end), y[start:end]), (start, end)


def test_w8a16_linear_refuses_adapters_without_groups(device, dtype):
    p = whole(dtype, device, 3)
    with pytest.raises(ValueError, match="2 slices of adapters with groups=False, token_lora_indices=True; give both"):
        w8a16_linear(p.x, p.weight, p.lora_a, p.lora_b, p.slots)


def test_invariant_config_is_legal_at_every_number_of_tokens():
    from benchmarks.shapes import MODELS

    for layer in MODELS.values():
        for p in layer:
            for M in (1, 8, 9, 16, 17, 32):
                assert is_legal(invariant_config(p.N, p.K), M, p.K, p.slices, 64), (p, M)
    assert not is_legal(DecodeConfig(one_order=True, fused=1), 1, 4096, [4096], 64)
    assert not is_legal(DecodeConfig(one_order=True, wgmma=True, k_warps=1), 16, 4096, [4096], 64)
