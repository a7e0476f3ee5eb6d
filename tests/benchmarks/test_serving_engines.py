"""What tells the variants apart, the models' configurations, and tuned tables as vLLM looks them up."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks.serving.engines import NO_LORA, OURS, OURS_FP8, OURS_QUANTISING, STOCK, EngineSpec
from benchmarks.serving.models import model_config, model_folder, model_names
from benchmarks.serving.tune import filled, tables_from_rows, write_tables
from benchmarks.shapes import MODELS

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = EngineSpec("model", OURS, 4, tuned_folder="/tables")


def test_variants_differ_in_their_environment_only():
    by_variant = {v: SPEC.as_variant(v).environment() for v in (OURS, NO_LORA, *STOCK)}
    assert by_variant[OURS]["EPILORA_DISABLE"] == ""
    assert by_variant[OURS]["VLLM_TUNED_CONFIG_FOLDER"] == ""
    assert all(by_variant[v]["EPILORA_DISABLE"] == "1" for v in (NO_LORA, *STOCK))
    tuned = {v for v, e in by_variant.items() if e["VLLM_TUNED_CONFIG_FOLDER"] == "/tables"}
    streams = {v for v, e in by_variant.items() if e["VLLM_LORA_ENABLE_DUAL_STREAM"] == "1"}
    assert tuned == {"vllm_lora_tuned", "vllm_lora_tuned_two_streams"}
    assert streams == {"vllm_lora_default_two_streams", "vllm_lora_tuned_two_streams"}
    settings = [
        {k: v for k, v in SPEC.as_variant(n).settings().items() if k not in ("variant", "tuned")} for n in STOCK
    ]
    ours = {k: v for k, v in SPEC.settings().items() if k not in ("variant", "tuned")}
    assert all(s == ours for s in settings)


def test_specifications_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="exactly vllm_no_lora has none"):
        EngineSpec("model", OURS, 0)
    with pytest.raises(ValueError, match="exactly vllm_no_lora has none"):
        EngineSpec("model", NO_LORA, 1)
    with pytest.raises(ValueError, match="needs tuned_folder"):
        EngineSpec("model", STOCK[1], 1)
    with pytest.raises(ValueError, match="allowed are epilora"):
        EngineSpec("model", "other", 1)
    assert SPEC.as_variant(OURS_FP8).slots == 4


def test_who_quantises_is_told_by_the_environment_alone():
    ours, other = SPEC.as_variant(OURS).environment(), SPEC.as_variant(OURS_QUANTISING).environment()
    assert ours["EPILORA_QUANTISE"] == ""  # vLLM's compiler, the plugin's default
    assert other == ours | {"EPILORA_QUANTISE": "op"}


@pytest.mark.parametrize("name", model_names())
def test_model_configurations_give_the_projections_of_the_shapes(name, tmp_path):
    folder = model_folder(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config == model_config(name)
    projections = {p.name: p for p in MODELS[name]}
    assert projections["gate_up"].slices == (config["intermediate_size"],) * 2
    assert config["intermediate_size"] == projections["down"].K
    assert config["hidden_size"] == projections["qkv"].K
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, k, _ = projections["qkv"].slices
    gated = 2 if name.startswith("qwen3.5") else 1  # q carries its output gate
    assert q == gated * width * config["num_attention_heads"]
    assert k == width * config["num_key_value_heads"]


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="known by their sizes are"):
        model_folder("gpt-2", tmp_path)


def test_tuned_tables_reach_vllms_files(tmp_path):
    results = json.loads((ROOT / "benchmarks/results/kernels_h200.json").read_text())
    tables = tables_from_rows(results["rows"], "qwen3-8b", 64)
    assert {1, 8, 32} <= set(tables)
    assert all(set(by_tokens) == set(tables[1]) >= {1, 32, 512, 2048} for by_tokens in tables.values())
    files = write_tables(tables, tmp_path, "NVIDIA H200", 64)
    assert sorted(f.name for f in files) == [
        "NVIDIA_H200_EXPAND_FALSE.json",
        "NVIDIA_H200_EXPAND_TRUE.json",
        "NVIDIA_H200_SHRINK.json",
    ]
    shrink = json.loads((tmp_path / "NVIDIA_H200_SHRINK.json").read_text())
    expand = json.loads((tmp_path / "NVIDIA_H200_EXPAND_TRUE.json").read_text())
    # [slots + 1][outputs][tokens][K][N]
    assert shrink["33"]["3"]["32"]["4096"]["64"] == tables[32][32]["shrink", 4096, 3]
    assert expand["33"]["2"]["32"]["64"]["12288"] == tables[32][32]["expand", 12288, 2]
    row = next(
        r
        for r in results["rows"]
        if (r["case"], r["M"]) == ("layer/qwen3-8b/r64/a32/s32", 32) and r["provider"] == "vllm_lora_tuned_one_stream"
    )
    assert tables[32][32]["shrink", 12288, 1] == row["config"]["shrink/12288/1"]  # 32 adapters beat 1 and 8


def test_token_counts_that_a_slot_count_lacks_come_from_the_nearest():
    made = {("shrink", 64, 1): {"block_m": 1}}
    tables = filled({1: {1: made}, 8: {1: {}, 64: {("shrink", 64, 1): {"block_m": 8}}}, 32: {64: made}})
    assert tables[1][64] == {("shrink", 64, 1): {"block_m": 8}}
    assert tables[32][1] == {}
    assert tables[32][64] is made


def test_a_model_without_tuned_rows_is_refused():
    with pytest.raises(ValueError, match=r"no tuned rows of llama-3\.1-8b"):
        tables_from_rows([], "llama-3.1-8b", 64)


@pytest.mark.vllm
def test_vllm_finds_the_tuned_tables(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from vllm.lora.ops.triton_ops import utils

    tables = {32: {32: {("shrink", 4096, 3): {"block_m": 5}, ("expand", 4096, 3): {"block_m": 6}}}}
    write_tables(tables, tmp_path, "NVIDIA H200", 64)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    monkeypatch.setattr(utils.torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    utils.load_lora_op_config.cache_clear()
    utils.get_lora_op_configs.cache_clear()
    try:
        assert utils.get_lora_op_configs("shrink", 33, 32, 4096, 64, 3)["block_m"] == 5
        assert utils.get_lora_op_configs("expand", 33, 30, 4096, 64, 3, add_inputs=False)["block_m"] == 6
    finally:
        utils.load_lora_op_config.cache_clear()
        utils.get_lora_op_configs.cache_clear()
