"""The large-batch benchmark's own logic: candidates are legal, rounds are shuffled alike, a run is appended once."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import shapes
from benchmarks.kernels import large
from benchmarks.kernels.summary import summarise
from epilora.kernels.lora_expand import is_legal_expand, is_legal_shrink
from epilora.kernels.training import is_legal_dx
from epilora.kernels.w8a16 import is_legal_w8a16


def test_every_candidate_is_legal_on_the_layer_it_is_searched_for():
    for cell in large.CELLS:
        shrinks, expands = large.candidates_for(large.is_small(cell.M), cell.rank)
        assert len(shrinks) >= 3
        assert len(expands) >= 3
        for p in cell.layer:
            assert all(is_legal_shrink(c, p.K, cell.rank) for c in shrinks), p
        assert all(is_legal_expand(c, cell.rank) for c in expands)
    for p in shapes.LAYER:
        assert all(
            is_legal_w8a16(c, p.N, p.K) for c in (*large.W8A16_EIGHT, *large.W8A16_SIXTEEN, *large.TRAIN_FORWARD)
        ), p
        assert all(is_legal_dx(c, p.N, p.K) for c in large.TRAIN_DX), p


def test_cells_name_the_slots_of_the_case():
    assert large.Cell(64, 4).slots == 8
    assert large.Cell(64, 32).slots == 32
    kinds = {kind for kind, _ in large.compile_jobs(("training", "w8a16", "hybrid"), large.CELLS)}
    assert kinds == {"forward", "dx", "w8a16", "shrink", "expand", "vllm"}


def test_tokens_alternate_in_decode_and_are_contiguous_in_prefill(monkeypatch):
    monkeypatch.setattr(large, "DEV", "cpu")
    assert large.token_slots(6, 3).tolist() == [0, 1, 2, 0, 1, 2]
    slots = large.token_slots(600, 4)
    assert slots.dtype == torch.int32
    assert torch.equal(slots, torch.arange(4, dtype=torch.int32).repeat_interleave(150))


def test_merge_appends_a_run_once_and_recomputes_the_summary(tmp_path, monkeypatch):
    row = {"case": "w8a16/qwen3-8b", "M": 1, "unit": "us", "run_id": "b", "calls_per_path": {"x": 1}}
    rows = [row | {"provider": "epilora", "samples_us": [3.0]}, row | {"provider": "marlin", "samples_us": [4.0]}]
    run = {"run_id": "b", "commit": "c", "gpu": "g", "command": "python -m x --out /somewhere/deep/b.json"}
    new = {"schema_version": 1, "commit": "c", "gpu": "g", "runs": [run], "summary": {}, "rows": rows}
    (tmp_path / "new.json").write_text(json.dumps(new))
    monkeypatch.setattr(large, "RESULTS", tmp_path / "kept.json")
    large.merge(tmp_path / "new.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["rows"] == rows
    assert kept["summary"] == summarise(rows)
    assert kept["summary"]["w8a16_m1_over_marlin"] == 0.75
    assert kept["runs"][0]["command"] == "python -m x --out b.json"
    with pytest.raises(SystemExit, match="already in"):
        large.merge(tmp_path / "new.json")


class Kept:
    """Stands in for the results file: keeps the rows it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, *args, **facts) -> None:
        self.rows.append((args, facts))


@pytest.mark.gpu
def test_kernels_match_fp32_on_this_gpu():
    kept = Kept()
    large.check_kernels(kept, large.CHECKED)
    (_, facts), *_ = kept.rows
    assert len(facts["errors"]) == 52
    assert all(name.endswith(":triton") for name in facts["calls_per_path"])


@pytest.mark.gpu
@pytest.mark.sm90
def test_dependent_launches_keep_their_order_under_graphs():
    kept = Kept()
    large.part_stress(kept, rounds=100)
    assert kept.rows[0][0][3] == [0.0]
