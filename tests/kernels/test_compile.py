"""Decode kernels compile offline for every target; registers, spills and shared memory are printed and bounded."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from epilora.kernels import decode_config as dc
from epilora.kernels.cuda import driver

SCRIPT = pathlib.Path(__file__).parent / "compile_decode.py"
SHARED_LIMIT = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
KERNELS = {
    "quantize",
    "shrink",
    "shrink_fp8",
    "shrink_nvfp4",
    "k2_few",
    "k2_fp8",
    "k2_nvfp4",
    "k2_many",
    "k2_base",
    "quantize_groups",
    "quantize_nvfp4",
    *(f"k2_{base}_{tokens}" for base in ("block", "nvfp4") for tokens in (16, 512)),
}
MAX_STACK_BYTES = 256  # K2's loop over the adapters of a tile keeps a few words there on some targets


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cc", sorted(SHARED_LIMIT))
def test_triton_kernels_compile(cc):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(SCRIPT.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(cc)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    native = {"k2_nvfp4_native_16", "k2_nvfp4_native_512"} if cc in (100, 120) else set()
    assert {row["kernel"] for row in rows} == KERNELS | native
    for row in rows:
        print(row)
        assert row["registers"] <= 255, row
        assert row["stack"] <= MAX_STACK_BYTES, row
        assert row["shared"] <= SHARED_LIMIT[cc], row
        if "native" in row["kernel"]:
            assert any("kind::mxf4nvf4.block_scale" in product for product in row["mma"]), row


MMA, WGMMA = dc.DecodeConfig(), dc.DecodeConfig(k_warps=1, wgmma=True)
FUSED = dc.DecodeConfig(stage_k=512, fused=1)
# name -> (kernel's macros, threads a block); the same for one token and for the widest case
CUDA_KERNELS = {
    "prologue_1": (dc.prologue_macros(False, 4, 1), 128),
    "prologue_32_fp16": (dc.prologue_macros(True, 8, 32), 256),
    "quantise": (dc.prologue_macros(False, dc.QUANTISE_WARPS, 1), dc.QUANTISE_WARPS * 32),
    "gemm_1": (dc.gemm_macros(False, MMA, 1, 64), dc.gemm_threads(MMA, 64)),
    "gemm_32_r256": (dc.gemm_macros(False, MMA, 32, 256), dc.gemm_threads(MMA, 256)),
    "gemm_16_base_fp16": (dc.gemm_macros(True, MMA, 16, 0), dc.gemm_threads(MMA, 0)),
    "gemm_1_fused": (dc.gemm_macros(False, FUSED, 1, 64), dc.gemm_threads(FUSED, 64)),
    "gemm_4_fused_fp8_adapters": (dc.gemm_macros(False, FUSED, 4, 64, True), dc.gemm_threads(FUSED, 64)),
    "prologue_16_fp8_adapters": (dc.prologue_macros(False, 8, 16, True), 256),
    "gemm_16_wgmma": (dc.gemm_macros(False, WGMMA, 16, 64), dc.gemm_threads(WGMMA, 64)),
}


# The other targets compile fewer, to save minutes; warpgroup MMAs exist on sm_90 only.
ELSEWHERE = {"prologue_1", "gemm_1", "gemm_1_fused"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_cuda_kernels_compile(arch):
    assert driver.compiler_name() is not None, "install CUDA's nvcc or the nvidia-cuda-nvrtc wheel to compile decode.cu"
    for name, (macros, threads) in CUDA_KERNELS.items():
        if arch != "sm_90" and name not in ELSEWHERE:
            continue
        cubin, log = driver.compile_cubin("decode.cu", macros, arch + ("a" if macros.get("WGMMA") else ""))
        found = driver.resources(log)
        print({"kernel": name, "arch": arch, **found, "bytes": len(cubin)})
        assert cubin[:4] == b"\x7fELF"
        assert found["registers"] * threads <= 65536, (name, found)
        assert found["spill_bytes"] <= 256, (name, found)


def test_a_prologue_block_fits_beside_a_gemm_block():
    """Without adapters the next prologue's blocks are resident while a GEMM runs: registers of both together."""
    _, log = driver.compile_cubin("decode.cu", dc.prologue_macros(False, 8, 1), "sm_90")
    prologue = driver.resources(log)["registers"] * 256
    macros, threads = CUDA_KERNELS["gemm_16_base_fp16"]
    _, log = driver.compile_cubin("decode.cu", macros, "sm_90")
    assert driver.resources(log)["registers"] * threads + prologue <= 65536


def test_compiled_kernels_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("EPILORA_KERNEL_CACHE", str(tmp_path))
    macros = dc.prologue_macros(False, 4, 1)
    first, log = driver.cached_cubin("decode.cu", macros, "sm_90")
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(driver, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert driver.cached_cubin("decode.cu", macros, "sm_90") == (first, log)
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        driver.cached_cubin("decode.cu", macros | {"DT_FP16": 1}, "sm_90")


def test_cuda_compile_error_tells_what_and_where():
    with pytest.raises(driver.CudaError, match=r"decode\.cu.*KC"):
        driver.compile_cubin("decode.cu", dc.gemm_macros(False, MMA, 1, 0) | {"KC": -1}, "sm_90")


def test_resources_reads_a_log():
    log = "ptxas info : 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nptxas info : Used 96 registers, used 1 barriers"
    assert driver.resources(log) == {"registers": 96, "spill_bytes": 16}
    with pytest.raises(ValueError, match="no register count"):
        driver.resources("nothing")
