"""Paired quality of served adapters: the figures from rows, and the whole program on the tiny model."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from benchmarks.serving.engines import OURS, STOCK
from benchmarks.serving.quality import cut, main, summarise

ROOT = pathlib.Path(__file__).resolve().parents[2]


def row(provider: str, right: list[int], run: str = "a", **facts) -> dict:
    return {"case": "quality/m/t/x", "provider": provider, "samples_right": right, "run_id": run, **facts}


def test_figures_of_paired_answers():
    stock, ours = [1] * 60 + [0] * 40, [1] * 58 + [0] * 2 + [1] * 5 + [0] * 35
    found = summarise([row(STOCK[0], stock), row(OURS, ours)])["quality/m/t/x"]
    assert (found["accuracy_stock"], found["accuracy_ours"]) == (0.60, 0.63)
    assert (found["only_stock_right"], found["only_ours_right"]) == (2, 5)
    assert found["mcnemar_p"] == 0.453125  # 2 * (1 + 7 + 21) / 2**7
    difference, low, high = found["difference"]
    assert difference == 0.03
    assert low < 0 < high


def test_sides_share_a_run_and_rows_that_fell_back_do_not_count():
    assert summarise([row(STOCK[0], [1]), row(OURS, [1], run="b")]) == {}
    assert summarise([row(STOCK[0], [1]), row(OURS, [1], fallbacks=["packed"])]) == {}


def test_texts_end_at_the_first_stop():
    assert cut("12;3\n", ["\n", ";"]) == "12"
    assert cut("12", ["\n"]) == "12"


@pytest.mark.vllm
@pytest.mark.slow
def test_program_on_the_tiny_model(tmp_path):
    pytest.importorskip("vllm")
    from safetensors import safe_open

    from epilora.adapters.peft_io import write_peft
    from epilora.types import AdapterSpec

    generator = torch.Generator().manual_seed(0)
    targets, tensors = ("q_proj", "down_proj"), {}
    with safe_open(ROOT / "epilora/models/tiny-arith/model.safetensors", "pt") as held:
        for name in held.keys():  # noqa: SIM118  # not a mapping
            module = name.removesuffix(".weight")
            if module.rsplit(".", 1)[-1] in targets:
                N, K = held.get_slice(name).get_shape()
                key = f"base_model.model.{module}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(8, K, generator=generator) * 0.02
                tensors[f"{key}.lora_B.weight"] = torch.randn(N, 8, generator=generator) * 0.02
    write_peft(tmp_path / "run" / "adapter", AdapterSpec(8, 16.0, targets), tensors)
    arguments = ["--config", str(ROOT / "configs/quickstart_tiny.yaml"), "--adapters", str(tmp_path / "run/adapter")]
    summary = main([*arguments, "--problems", "200", "--out", str(tmp_path / "out.json")])
    (found,) = summary.values()
    assert found["problems"] == 200
    assert found["accuracy_stock"] > 0.15
    assert abs(found["difference"][0]) < 0.1
    assert found["mcnemar_p"] > 0.001
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {r["provider"]: bool(r["paths"]) for r in rows} == {OURS: True, STOCK[0]: False}
