"""What `epilora doctor` says of known models, and that the engine decides the same."""

import dataclasses
import json

import pytest

from epilora import cli
from epilora.plugin import doctor
from epilora.plugin.doctor import Setup, base_format, examine, rows_of
from epilora.plugin.settings import Kind

HOPPER = Setup(90, "fp8", rank=64, slots=8, device_name="NVIDIA H200")


def of(setup, K=4096, slices=(4096, 1024, 1024), base_reason=""):
    return examine("layer", 1, K, slices, setup, base_reason)


def test_the_layers_of_an_8b():
    rows = {row.layer: row for row in rows_of("", "qwen3-8b", HOPPER, "")}
    assert [(r.count, r.K, r.slices) for r in rows.values()] == [
        (36, 4096, (4096, 1024, 1024)), (36, 4096, (4096,)), (36, 4096, (12288, 12288)), (36, 12288, (4096,)),
    ]  # fmt: skip
    assert {(r.kind, r.paths, r.reason) for r in rows.values()} == {
        (Kind.FUSED, "decode up to 32 tokens, hybrid above", "")
    }


def test_linear_attention_packs_four_outputs_and_shards_split():
    setup = dataclasses.replace(HOPPER, tensor_parallel=2)
    rows = {row.layer: row for row in rows_of("", "qwen3.5-9b", setup, "")}
    assert rows["gated delta net: in_proj_qkvz"].slices == (1024, 1024, 2048, 2048)
    assert rows["attention: down_proj"].K * 2 == 12288


@pytest.mark.parametrize(
    ("change", "shape", "kind", "reason"),
    [
        ({"capability": 75}, {}, Kind.STOCK, "7.5 is below 8.0"),
        ({"rank": 320}, {}, Kind.STOCK, "max_lora_rank is 320; up to 256"),
        ({"fully_sharded": True, "tensor_parallel": 2}, {}, Kind.STOCK, "collective between A and B"),
        ({"fully_sharded": True}, {}, Kind.FUSED, ""),
        ({"dual_stream": True}, {}, Kind.STOCK, "VLLM_LORA_ENABLE_DUAL_STREAM"),
        ({}, {"slices": (64,) * 5}, Kind.STOCK, "packs 5 projections; up to 4"),
        ({"capability": 80}, {}, Kind.BESIDE, "8.0 has no FP8"),
        ({}, {"base_reason": "the base is bfloat16"}, Kind.BESIDE, "the base is bfloat16"),
        ({}, {"K": 4100}, Kind.BESIDE, "pads 4100 x 6144"),
        ({"capability": 89}, {}, Kind.FUSED, "8.9 has no programmatic launch"),
        ({"rank": 1}, {}, Kind.FUSED, "the rank of 8"),
    ],
)
def test_reasons(change, shape, kind, reason):
    row = of(dataclasses.replace(HOPPER, **change), **shape)
    assert row.kind is kind
    assert reason in row.reason
    assert bool(reason) == bool(row.reason)


@pytest.mark.parametrize(
    ("config", "quantization", "base", "reason"),
    [
        ({}, "fp8_per_channel", "fp8", ""),
        ({"torch_dtype": "bfloat16"}, "", "bfloat16", "the base is bfloat16; quantize it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "", "fp8", ""),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "", "fp8_block", r"a block of [128, 128]"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "", "fp8_static", "static"),
        ({"quantization_config": {"quant_method": "awq"}}, "", "awq", "the checkpoint is awq"),
        ({}, "fp8_per_block", "fp8_per_block", "no FP8 with one scale a channel"),
    ],
)  # fmt: skip
def test_base_formats(config, quantization, base, reason):
    found = base_format(config, quantization)
    assert found[0] == base
    assert reason in found[1]
    assert bool(reason) == bool(found[1])


@pytest.mark.parametrize(
    ("strategy", "dynamic", "fits"), [("channel", True, True), ("group", True, False), ("tensor", False, False)]
)
def test_compressed_tensors(strategy, dynamic, fits):
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy},
        "input_activations": {"dynamic": dynamic, "strategy": "token"},
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}}}
    assert (base_format(config, "")[1] == "") is fits


def test_the_command_prints_each_layer(tmp_path, capsys):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["doctor", "--model", str(tmp_path), "--quantization", "fp8_per_channel"]) == 0
    printed = capsys.readouterr().out
    assert "3 x attention: qkv_proj" in printed
    assert "256 -> 256+128+128" in printed
    assert (
        cli.main(["doctor", "--model", str(tmp_path), "--quantization", "fp8_per_channel", "--max-lora-rank", "512"])
        == 1
    )
    assert "not faster: max_lora_rank is 512" in capsys.readouterr().out
    assert doctor.main(["--shape", "qwen2.5-72b", "--gpu", "A100"]) == 0
    assert "not faster: compute capability 8.0 has no FP8" in capsys.readouterr().out
