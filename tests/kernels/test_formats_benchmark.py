"""The formats benchmark: its checks pass on the kernels as they are and notice a fault; on a GPU also against vLLM's own GEMMs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.formats import layers
from benchmarks.formats.summary import summarise
from benchmarks.harness import Results, rms_error
from benchmarks.shapes import LAYER
from epilora.kernels.w8a16 import w8a16_gemm
from epilora.quant.formats import Format
from epilora.quant.reference import dequantize


def test_every_check_passes(device, dtype, tmp_path):
    results = Results(tmp_path / "r.json", summarise, "test")
    on_cpu = device.type == "cpu"
    found = list(layers.checks(layers.TOY[:1] if on_cpu else layers.CHECKED, 5 if on_cpu else 32, dtype, device))
    if not on_cpu:
        layers.compile_ahead(found)
    assert layers.run_checks(results, found, 5) == []
    names = {row["case"].split("/", 2)[2] for row in results.rows}
    for base in layers.BASES:
        gemm = "w4a4" if base == "nvfp4" else "k1_k2"
        assert {f"{base}/{stored}/{kind}" for stored in ("bf16", "fp8", "nvfp4") for kind in ("w16", gemm)} <= names
        assert {f"{base}/{step}_{mode}" for step in ("forward", "dx") for mode in ("panel", "registers")} <= names
    assert {"quantize_groups", "quantize_nvfp4", "hybrid/nvfp4"} <= names
    assert all(row["passed"] for row in results.rows)


def test_a_fault_is_a_row_and_named(device, dtype, tmp_path):
    torch.manual_seed(0)
    layer = layers.make_layer(layers.TOY[1], 3, dtype, device, rank=16, slots=2, bases=("nvfp4",))
    base = layer.bases["nvfp4"]
    swapped = dataclasses.replace(base, values=(base.values >> 4) | (base.values << 4))

    def wrong():
        return w8a16_gemm(layer.x, swapped), layer.x.float() @ dequantize(base).t(), layers.LIMIT[dtype]

    def refused():
        return w8a16_gemm(layer.x[:, :64], base), layer.x, 0.0

    results = Results(tmp_path / "r.json", summarise, "test")
    found = [layers.Check("swapped", wrong), layers.Check("refused", refused)]
    assert layers.run_checks(results, found, 3) == ["swapped", "refused"]
    assert results.rows[0]["passed"] is False
    assert results.rows[0]["samples_rms_error"][0] > 0.5
    assert "does not fit x" in results.rows[1]["failure"]


@pytest.fixture
def projection(device):
    torch.manual_seed(0)
    return layers.make_layer(LAYER[1], 16, torch.bfloat16, device, rank=16, slots=2, bases=tuple(layers.BASES))


@pytest.mark.gpu
def test_w4a16_replays_give_the_same_bits(projection):
    x, weight = projection.x, projection.bases["nvfp4"]
    eager = w8a16_gemm(x, weight)
    out, graph = torch.empty_like(eager), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w8a16_gemm(x, weight, out=out)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.gpu
@pytest.mark.vllm
def test_agrees_with_marlin(projection):
    pytest.importorskip("vllm")
    want = projection.x.float() @ dequantize(projection.bases["nvfp4"]).t()
    projection.marlin = layers.marlin_layer(projection.bases["nvfp4"], torch.bfloat16)
    theirs, ours = layers.marlin(projection), w8a16_gemm(projection.x, projection.bases["nvfp4"])
    assert rms_error(ours, want) <= max(4e-3, rms_error(theirs, want))
    assert projection.bases["nvfp4"].format is Format.NVFP4


@pytest.mark.gpu
@pytest.mark.vllm
def test_block_gemm_agrees_with_vllms(projection):
    pytest.importorskip("vllm")
    workspace = layers.decode_workspace([projection.shape], projection.x.device, 16)
    ours = layers.lora_decode(projection.x, projection.bases["fp8_block"], workspace=workspace)
    for name, gemm in layers.block_paths().items():
        assert rms_error(gemm(projection), ours) < 4e-3, name
