"""The main job on a real pretrained model (SmolLM2-135M-Instruct) on a CPU, measured once.

    make quickstart MODEL=smollm2 ARGS=--dry-run      # fetches and converts the model
    python -m benchmarks.quickstart_smollm2 [--seed 0]

Writes benchmarks/results/quickstart_smollm2.json: the run with its raw samples, and a summary computed from it. The run
shows that everything holds on a real model; it is too short to train one.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.quickstart_cpu import RESULTS, ROOT, main_job_row, main_job_summary, write_document

SMOLLM2_RESULTS = RESULTS.with_name("quickstart_smollm2.json")
CONFIG = "configs/quickstart_smollm2.yaml"
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
MIB = 2**20


def parameters(folder: Path) -> int:
    """Weights in the checkpoint's safetensors file."""
    with safe_open(folder / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no iterator)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, from the rows alone. trainer_private_bound_mib: a quarter of the base in fp32 and 400 MiB."""
    (row,) = rows
    result = row["result"]
    (taught,) = [t for t in result["tenants"] if t["accuracy_base"] is not None]
    return {
        **main_job_summary(rows),
        "steps": result["steps"],
        "well_formed_before": result["eval_before"]["well_formed"],
        "well_formed_after": result["eval_after"]["well_formed"],
        "tenant_accuracy_base": taught["accuracy_base"],
        "tenant_accuracy_adapter": taught["accuracy_adapter"],
        "mismatch_mean": result["mismatch_mean"],
        "mismatch_max": result["mismatch_max"],
        "rollout_tok_s": result["rollout_tok_s"],
        "generate_s": result["generate_s"],
        "train_s": result["train_s"],
        "answers_equal": result["answers_equal"],
        "answers_near_tie": result["answers_near_tie"],
        "answers_wrong": result["answers_wrong"],
        "trainer_peak_private_mib": result["trainer_memory"]["peak_private_bytes"] / MIB,
        "trainer_private_bound_mib": row["parameters"] / MIB + 400,
        "checksum_equal": result["checksum_equal"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resummarise", action="store_true", help="recompute the file's summary, measure nothing")
    args = parser.parse_args()
    if args.resummarise:
        document = json.loads(SMOLLM2_RESULTS.read_text())
        document["summary"] = summarise(document["rows"])
        SMOLLM2_RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        return
    row = main_job_row(args.seed, CONFIG, "bench-smollm2") | {"parameters": parameters(MODEL)}
    write_document(SMOLLM2_RESULTS, "quickstart_smollm2", [row], summarise([row]))


if __name__ == "__main__":
    main()
