"""Grouped shrink and expand-add against fp32, on shapes that hurt; arguments refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import problem

from epilora.errors import UnsupportedKernel
from epilora.kernels.lora_expand import (
    ExpandConfig,
    ShrinkConfig,
    TokenGroups,
    expand_config_for,
    group_tokens,
    is_legal_expand,
    is_legal_shrink,
    lora_beside_gemm,
    lora_expand_add,
    lora_expand_add_ref,
    lora_shrink_grouped,
    lora_shrink_grouped_ref,
    num_row_tiles,
    shrink_config_for,
)
from epilora.kernels.quantize import quantize_ref

pytestmark = pytest.mark.usefixtures("poisoned_empty")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def stale(groups: TokenGroups, M: int, pad: int) -> TokenGroups:
    """The arrays as a replayed graph finds them: longer than the batch, with garbage behind the counted entries."""
    garbage = torch.full((pad,), 10**6, dtype=torch.int32, device=groups.sorted_tokens.device)
    counts = torch.where(groups.active_slots < 0, torch.full_like(groups.counts, 37), groups.counts)
    first = int((groups.active_slots[0] < 0).item()) and groups.counts[0]
    if first:
        counts[0] = first
    return TokenGroups(torch.cat([groups.sorted_tokens, garbage]), groups.active_slots, counts, groups.starts)


CASES = [
    # M, K, widths, R, L, kind
    (1, 64, (64,), 8, 1, "one"),
    (37, 100, (48, 16, 20), 8, 5, "mixed"),
    (17, 96, (32, 16), 16, 17, "distinct"),  # one token per adapter
    (51, 160, (32, 32, 64, 32), 64, 2, "mixed"),  # four slices; groups of a block and one row
    (40, 64, (32,), 16, 4, "none"),
    (20, 64, (40,), 24, 7, "one"),  # rank off any power of two
    (9, 288, (48, 16), 256, 2, "mixed"),
]


@pytest.mark.parametrize(("M", "K", "widths", "R", "L", "kind"), CASES)
@pytest.mark.parametrize("stored", ["16bit", "fp8", "nvfp4"])
def test_shrink_then_expand_matches_fp32(M, K, widths, R, L, kind, stored, device, dtype):
    if stored == "nvfp4":
        K, R = -(-K // 16) * 16, -(-R // 16) * 16
    p = problem(M, K, widths, R, L, kind=kind, dtype=dtype, device=device, fp8=stored == "fp8", nvfp4=stored == "nvfp4")
    groups = stale(group_tokens(p.slots, L), M, 3)
    live = p.slots >= 0
    block_r = min(64, max(16, 1 << (R - 1).bit_length()))
    for split_k, expand in ((1, ExpandConfig(16, 16, 1, 4)), (2, ExpandConfig(32, 32, 2, 4))):
        config = ShrinkConfig(16 * split_k, block_r, 32 if K <= 100 else 64, split_k, 4, 2)
        h = lora_shrink_grouped(p.x, p.lora_a, groups, config=config)
        assert tuple(h.shape) == (split_k, M, len(widths), R)
        want_h = lora_shrink_grouped_ref(p.x, p.lora_a, groups)[0]
        scale = want_h.abs().amax().clamp_min(1e-6)
        assert ((h.float().sum(0) - want_h)[live].abs().max() if live.any() else 0.0) <= 2 * EPS[dtype] * scale
        assert torch.isnan(h[:, ~live].float()).all(), "rows without an adapter were written"
        y0 = torch.randn(M, sum(widths), device=device).to(dtype)
        y = y0.clone()
        assert lora_expand_add(y, h, p.lora_b, groups, config=expand) is y
        want = lora_expand_add_ref(y0, h.nan_to_num(0.0), p.lora_b, groups, round_h=True)
        error = (y.float() - want).abs()
        assert error.max() <= EPS[dtype] * want.abs().max(), f"worst at {divmod(int(error.argmax()), y.shape[1])}"
        assert torch.equal(y[~live], y0[~live]), "a row without an adapter changed"


def test_a_row_has_the_same_bits_whatever_its_neighbours_use(device, dtype):
    M, K, widths, R, L = 24, 64, (32,), 16, 3
    p = problem(M, K, widths, R, L, kind="mixed", dtype=dtype, device=device)
    mine = 5
    results = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randint(-1, L, (M,), generator=generator).to(torch.int32).to(device)
        slots[mine] = 2
        x = p.x.clone()
        x[:mine] *= float(seed)  # neighbours' values differ as well
        groups = group_tokens(slots, L)
        h = lora_shrink_grouped(x, p.lora_a, groups)
        y = torch.ones(M, sum(widths), dtype=dtype, device=device)
        results.append(lora_expand_add(y, h, p.lora_b, groups)[mine].clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_padded_rows_that_hold_garbage_are_left_alone(device, dtype):
    M, real, K, widths, R, L = 40, 29, 64, (32, 16), 8, 3
    p = problem(M, K, widths, R, L, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots[:real], L)
    groups = dataclasses.replace(
        groups, sorted_tokens=torch.cat([groups.sorted_tokens, torch.full((M,), -5, dtype=torch.int32, device=device)])
    )
    x = p.x.clone()
    x[real:] = float("nan")
    h = lora_shrink_grouped(x, p.lora_a, groups)
    y = torch.full((M, sum(widths)), 7.0, dtype=dtype, device=device)
    lora_expand_add(y, h, p.lora_b, groups)
    assert torch.equal(y[real:], torch.full_like(y[real:], 7.0))
    assert torch.isfinite(y.float()).all()


def test_strided_rows(device, dtype):
    M, K, widths, R, L = 19, 64, (32,), 16, 2
    p = problem(M, K, widths, R, L, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots, L)
    wide_x = torch.zeros(M, K + 16, dtype=dtype, device=device)
    wide_x[:, :K] = p.x
    wide_y = torch.zeros(M, 48, dtype=dtype, device=device)
    h = lora_shrink_grouped(wide_x[:, :K], p.lora_a, groups)
    lora_expand_add(wide_y[:, :32], h, p.lora_b, groups)
    want = lora_expand_add_ref(
        torch.zeros(M, 32, dtype=dtype, device=device), h.nan_to_num(0.0), p.lora_b, groups, round_h=True
    )
    assert (wide_y[:, :32].float() - want).abs().max() <= EPS[dtype] * want.abs().max()
    assert (wide_y[:, 32:] == 0).all()


def test_quantisation_rides_along_with_the_same_codes(device, dtype):
    p = problem(21, 96, (32, 16), 8, 4, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots, 4)
    codes = torch.empty(21, 96, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(21, 1, dtype=torch.float32, device=device)
    h = lora_shrink_grouped(p.x, p.lora_a, groups, quantize_to=(codes, scale))
    want_codes, want_scale = quantize_ref(p.x)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert torch.equal(h.nan_to_num(0.0), lora_shrink_grouped(p.x, p.lora_a, groups).nan_to_num(0.0))


def test_no_tokens_launch_nothing(device, dtype):
    p = problem(4, 64, (32,), 8, 2, kind="one", dtype=dtype, device=device)
    groups = group_tokens(p.slots[:0], 2)
    h = lora_shrink_grouped(p.x[:0], p.lora_a, groups)
    assert h.shape[1] == 0
    assert lora_expand_add(torch.empty(0, 32, dtype=dtype, device=device), h, p.lora_b, groups).shape == (0, 32)


def test_group_tokens_is_what_vllm_keeps(device):
    groups = group_tokens(torch.tensor([2, -1, 0, 2, -1, 0, 0], dtype=torch.int32, device=device), 3)
    assert groups.active_slots.tolist() == [-1, 0, 2, -1]
    assert groups.counts.tolist() == [2, 3, 2, 0]
    assert groups.starts.tolist() == [0, 2, 5, 7, 0]
    assert groups.sorted_tokens.tolist() == [1, 4, 2, 5, 6, 0, 3]
    with pytest.raises(ValueError, match=r"slots span \[0, 3\]"):
        group_tokens(torch.tensor([0, 3]), 3)


def test_row_tiles_cover_the_worst_grouping():
    for M, L, block in ((33, 5, 16), (512, 32, 32), (7, 64, 16), (64, 3, 64)):
        groups = min(L, M)
        worst = 0
        for big in range(groups):  # `big` groups of one token, the rest in one
            sizes = [1] * big + [M - big]
            worst = max(worst, sum(-(-size // block) for size in sizes if size))
        assert num_row_tiles(M, L, block) >= worst


def test_default_configs_are_legal():
    for M in (1, 33, 64, 512, 2048, 8192):
        for K in (64, 576, 1536, 4096, 12288, 29568):
            for R in (8, 16, 64, 128, 256):
                for S, L in ((1, 1), (3, 32), (4, 64)):
                    assert is_legal_shrink(shrink_config_for(M, S, K, R, L), K, R), (M, K, R, S, L)
                    assert is_legal_expand(expand_config_for(M, S, 4096, R, L), R), (M, K, R, S, L)


def test_bad_arguments_are_refused_by_name(device, dtype):
    p = problem(8, 64, (32, 16), 8, 2, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots, 2)
    h = lora_shrink_grouped(p.x, p.lora_a, groups)
    y = torch.zeros(8, 48, dtype=dtype, device=device)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        lora_shrink_grouped(p.x.double(), p.lora_a, groups)
    with pytest.raises(ValueError, match=r"lora_a\[0\] has shape \(2, 8, 64\)"):
        lora_shrink_grouped(p.x[:, :48].contiguous(), p.lora_a, groups)
    with pytest.raises(ValueError, match="2-D with contiguous rows"):
        lora_shrink_grouped(p.x.t(), p.lora_a, groups)
    with pytest.raises(ValueError, match="slices; allowed: 1 to 4"):
        lora_shrink_grouped(p.x, p.lora_a * 3, groups)
    with pytest.raises(ValueError, match="widths that sum to 47"):
        lora_expand_add(y[:, :47], h, p.lora_b, groups)
    with pytest.raises(ValueError, match="is not legal"):
        lora_shrink_grouped(p.x, p.lora_a, groups, config=ShrinkConfig(12, 16, 32, 1, 4, 2))
    with pytest.raises(ValueError, match="is not legal"):
        lora_expand_add(y, h, p.lora_b, groups, config=ExpandConfig(256, 256, 1, 4))
    with pytest.raises(ValueError, match=r"groups\.counts has 2 entries; at least 3"):
        lora_expand_add(y, h, p.lora_b, dataclasses.replace(groups, counts=groups.counts[:2]))
    with pytest.raises(ValueError, match=r"groups\.starts is torch\.int64"):
        lora_expand_add(y, h, p.lora_b, dataclasses.replace(groups, starts=groups.starts.long()))
    with pytest.raises(ValueError, match="h is"):
        lora_expand_add(y, h[:, :4], p.lora_b, groups)
    with pytest.raises(UnsupportedKernel, match="implementation=cuda asked"):
        lora_expand_add(y, h, p.lora_b, groups, implementation="cuda")
    assert (y == 0).all(), "something was launched"


def test_reference_by_name_gives_the_same(device, dtype):
    p = problem(17, 64, (32, 16), 8, 3, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots, 3)
    out = []
    for how in (None, "reference"):
        h = lora_shrink_grouped(p.x, p.lora_a, groups, implementation=how)
        y = torch.ones(17, 48, dtype=dtype, device=device)
        out.append(lora_expand_add(y, h, p.lora_b, groups, implementation=how).float())
    assert (out[0] - out[1]).abs().max() <= 4 * EPS[dtype] * out[1].abs().max()


@pytest.mark.parametrize("two_streams", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_hybrid_path_of_one_projection(two_streams, device, dtype):
    p = problem(23, 96, (32, 16), 8, 3, kind="mixed", dtype=dtype, device=device)
    groups = group_tokens(p.slots, 3)
    wide = (torch.randn(48, 96, device=device) * 0.1).to(dtype)
    side = torch.cuda.Stream() if two_streams else None
    y = lora_beside_gemm(lambda: p.x @ wide.t(), p.x, p.lora_a, p.lora_b, groups, side_stream=side)
    h = lora_shrink_grouped(p.x, p.lora_a, groups)
    want = lora_expand_add(p.x @ wide.t(), h, p.lora_b, groups)
    assert torch.equal(y, want)
    ref = lora_expand_add_ref(p.x @ wide.t(), lora_shrink_grouped_ref(p.x, p.lora_a, groups), p.lora_b, groups)
    assert (y.float() - ref).abs().max() <= 2 * EPS[dtype] * ref.abs().max()


def test_rows_without_an_adapter_take_no_tile_from_the_others(device, dtype):
    """18 rows, one of them without an adapter, need every one of the grid's two row tiles for the other 17."""
    p = problem(18, 64, (32,), 8, 1, kind="one", dtype=dtype, device=device)
    slots = p.slots.clone()
    slots[4] = -1
    groups = stale(group_tokens(slots, 1), 18, 2)
    assert num_row_tiles(18, 1, 16) == 2
    h = lora_shrink_grouped(p.x, p.lora_a, groups, config=ShrinkConfig(16, 16, 32, 1, 4, 2))
    y = torch.zeros(18, 32, dtype=dtype, device=device)
    lora_expand_add(y, h, p.lora_b, groups, config=ExpandConfig(16, 32, 1, 4))
    want = lora_expand_add_ref(torch.zeros_like(y), h.nan_to_num(0.0), p.lora_b, groups, round_h=True)
    assert want[17].abs().sum() > 0
    assert (y.float() - want).abs().max() <= EPS[dtype] * want.abs().max()
