"""An adapter trained here, converted, judged and recorded by the benchmark's own program, with a real engine, trainer and store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, job_environment

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_trained_adapter_goes_through_the_gate(tmp_path: Path) -> None:
    results = tmp_path / "formats.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.formats.quality",
        "--adapters",
        "1",
        "--problems",
        "64",
        "--rl-steps",
        "12",
    ]
    done = subprocess.run(
        [*command, "--results", str(results)], cwd=ROOT, env=job_environment(), capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = {
        row["provider"]: row for row in json.loads(results.read_text())["rows"] if row["case"].startswith("quality/")
    }
    assert set(rows) == {"fp8_e4m3/aware", "fp8_e4m3/plain", "nvfp4/aware", "nvfp4/plain", "nvfp4/planted"}
    assert rows["nvfp4/planted"]["served"] == "original"
    assert rows["fp8_e4m3/aware"]["served"] == "copy"
    assert rows["fp8_e4m3/aware"]["samples_relative_error"][0] < rows["nvfp4/aware"]["samples_relative_error"][0] < 0.2
