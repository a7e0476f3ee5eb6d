"""Micro-batches cover every completion token once, within the budget."""

from __future__ import annotations

import pytest
import torch

from epilora.trainer.batch import layout_of, micro_batches

from .conftest import sequences


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 20, 40, 10_000])
def test_every_token_is_predicted_once_from_the_right_place(budget: int, packed: bool) -> None:
    pairs = sequences()
    layout = layout_of(pairs)
    found = torch.full((layout.num_tokens,), -1)
    for micro in micro_batches(pairs, layout, budget, packed=packed):
        starts = torch.tensor((0, *micro.lengths)).cumsum(0)
        assert sum(micro.lengths) == (micro.ids.numel() if packed else 0)
        assert micro.ids.numel() <= max(budget, *(sum(map(len, p)) for p in pairs))
        assert torch.equal(found[micro.flat], torch.full_like(micro.flat, -1))
        found[micro.flat] = micro.targets
        for row, position, flat in zip(micro.rows.tolist(), micro.positions.tolist(), micro.flat.tolist(), strict=True):
            prompt, completion = pairs[layout.sequence[flat]]
            offset = flat - int(layout.starts[layout.sequence[flat]])
            before = (*prompt, *completion[:offset])
            first = int(starts[starts <= position].max()) if packed else 0
            assert tuple(micro.ids[row, first : position + 1].tolist()) == before
    assert found.tolist() == [token for _, completion in pairs for token in completion]


def test_a_large_budget_is_one_batch_and_a_small_one_pads_little() -> None:
    pairs = sequences()
    layout = layout_of(pairs)
    assert len(micro_batches(pairs, layout, 10_000)) == 1
    assert len(micro_batches(pairs, layout, 1)) == len(pairs)


def test_empty_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 2 prompt and 0 completion"):
        layout_of([((1,), (2,)), ((1, 2), ())])
