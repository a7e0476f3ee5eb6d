"""The exposure model and its table, from rows made up here; the launches themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.exposure import LAYERS, RANKS, TOKENS, exposure, rounds_of, run_projection_cases, table
from benchmarks.shapes import MODELS, sharded
from epilora.kernels.decode_config import DecodeConfig, config_for, is_legal
from epilora.kernels.decode_launch import launch_part

TIMES = {"decode": 9.0, "two_launches": 10.0, "no_adapter": 8.0, "h_given": 9.5, "shrink": 3.0}


def test_exposure_terms():
    one = exposure(TIMES, rounds=1)
    assert one == {"epilogue_us": 1.5, "exposed_us": 0.5, "window_us": 8.0, "predicted_us": 0.0}
    assert exposure(TIMES, rounds=4)["predicted_us"] == pytest.approx(1.0)


def test_rounds_of_counts_tiles_a_block():
    assert rounds_of(DecodeConfig(row_tiles=2), 4096, 132) == 1
    assert rounds_of(DecodeConfig(row_tiles=6), 24576, 132) == 2
    assert rounds_of(DecodeConfig(row_tiles=2), 24576, 132) == 6


def test_table_shows_the_newest_run_only():
    def rows(run, scale):
        base = {"case": "exposure/qwen3-8b/tp1/o/r64", "M": 1, "rounds": 4, "run_id": run}
        return [{**base, "provider": p, "samples_us": [t * scale] * 3} for p, t in TIMES.items()]

    text = table([*rows("old", 2.0), *rows("new", 1.0)])
    assert len(text.splitlines()) == 3
    cells = [c.strip() for c in text.splitlines()[2].split("|")[1:-1]]
    assert cells[:7] == ["qwen3-8b/tp1/o/r64", "1", "9.0", "10.0", "8.0", "9.5", "3.0"]
    assert cells[-4:] == ["1.5", "0.5", "2.0", "1.0"]
    assert table([]) == "no rows"


def test_every_case_has_a_legal_configuration():
    for model, tp in LAYERS:
        for p in sharded(MODELS[model], tp):
            for rank in RANKS:
                for M in TOKENS:
                    config = config_for(max(M, 2), p.N, p.K, rank, 8)
                    assert is_legal(config, M, p.K, p.slices, rank), (model, tp, p, rank, M)


def test_launch_part_refuses():
    x = torch.zeros(1, 64)
    arguments = dict(workspace=None, out=x)
    with pytest.raises(ValueError, match="part='shrink'; allowed: 'prologue', 'gemm'"):
        launch_part("shrink", x, None, [], [], x, config=DecodeConfig(), **arguments)
    with pytest.raises(ValueError, match="fused=1 is one launch"):
        launch_part("gemm", x, None, [], [], x, config=DecodeConfig(fused=1), **arguments)


@pytest.mark.gpu
def test_exposure_measures_a_small_layer(tmp_path, monkeypatch):
    from benchmarks.harness import Results

    monkeypatch.setenv("EPILORA_COMMIT", "none")
    results = Results(tmp_path / "e.json", lambda rows: {}, "test")
    run_projection_cases(results, "smollm2-135m", 1, MODELS["smollm2-135m"], 16, 1, replays=3)
    assert {r["provider"] for r in results.rows} >= {"decode", "h_given", "serial_gemm"}
    assert all(min(r["samples_us"]) > 0 for r in results.rows)


def test_other_shapes_have_configurations():
    from benchmarks.kernels.other_shapes import SHAPES, case_of
    from benchmarks.kernels.other_shapes import TOKENS as FEW

    assert case_of("qwen3-8b", 2, 64) == "layer/qwen3-8b-tp2/r64/a1/s8"
    for model, tp, rank in SHAPES:
        for p in sharded(MODELS[model], tp):
            for M in FEW:
                for r in (rank, 0):
                    config = config_for(M, p.N, p.K, r, 8, device_name="NVIDIA H200")
                    assert is_legal(config, M, p.K, p.slices, r), (model, tp, p, r, M)
