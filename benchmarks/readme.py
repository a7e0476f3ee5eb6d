"""Write the README's figures from the committed results files, so that no number in it is typed in.

python -m benchmarks.readme            # rewrite the blocks between the markers
python -m benchmarks.readme --check    # exit 1 if they are not what the results files give
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_rows import FORMAT_ROWS, KERNEL_ROWS, ONE_COPY_ROWS, ROUTER_ROWS, SERVING_ROWS
from jobs.report import accuracy_text, table_rows

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


VARIANTS = {
    "w8a8_tis": "W8A8 engine with truncated importance sampling",
    "score_centering": "W8A8 engine with score centering",
    "staleness_1": "rollouts up to one optimizer step old",
}


def quickstart_block(document: Mapping[str, Any]) -> str:
    """Output of the seed-0 run, and what all runs of the file say."""
    summary, machine = document["summary"], document["machine"]
    jobs = [row["result"] for row in document["rows"] if row["case"] == "main_job"]
    first = jobs[0]
    lines = [
        "![one run](docs/quickstart.png)",
        "",
        f"`{first['name']}`, {first['steps']} steps:",
        "",
        "| what | value |",
        "|---|---|",
    ]
    lines += ["| {} | {} |".format(*(cell.replace("|", "\\|") for cell in row)) for row in table_rows(first)]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in first["stages_s"].items())
    lines += [
        "",
        f"Over {summary['seeds']} seeds: gain {summary['gain_points']:+.1f} points at least, {summary['gain_points_mean']:+.1f} in the "
        f"mean; the main job takes {summary['main_job_s']:.0f} s at most and {summary['peak_rss_gb']:.1f} GB of resident memory, all "
        f"processes added up, on {machine['cores']} cores ({machine['cpu']}). The split of the run above: {stages}.",
        "",
        "| also measured | |",
        "|---|---|",
        *(
            f"| accuracy after, {what} | {100 * summary[f'accuracy_after_{name}']:.1f} % |"
            for name, what in VARIANTS.items()
            if f"accuracy_after_{name}" in summary
        ),
        f"| mean \\|dlogp\\| engine against trainer, fp32: W8A8 / matched | {summary['mismatch_w8a8']:.1e} / {summary['mismatch_w8a16']:.1e} |",
    ]
    for dtype in ("float32", "float16", "bfloat16"):
        lines.append(f"| matched lowers it, {dtype} | {summary[f'mismatch_w8a8_over_w8a16_{dtype}']:,.1f}x |")
    lines += [
        f"| rollout tokens/s at 256 sequences over stock vLLM's CPU LoRA (with our matched base / on the same base) | "
        f"{summary['cpu_lora_tokens_s_over_stock']:.2f}x / {summary['cpu_lora_same_base_over_stock']:.2f}x |",
        f"| tenants' TTFT p99, RL off / on | {summary['tenant_ttft_p99_ms_rl_off']:.0f} / {summary['tenant_ttft_p99_ms_rl_on']:.0f} ms |",
        "",
        f"From [benchmarks/results/quickstart_cpu.json](benchmarks/results/quickstart_cpu.json), `{document['command']}`.",
    ]
    return "\n".join(lines)


def smollm2_block(document: Mapping[str, Any]) -> str:
    """What one run on a pretrained model did."""
    summary, machine = document["summary"], document["machine"]
    result = document["rows"][0]["result"]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["stages_s"].items())
    rows = [
        (f"held-out accuracy, {result['eval_before']['problems']} questions, before / after {summary['steps']} steps", f"{accuracy_text(result['eval_before'])} / {accuracy_text(result['eval_after'])}"),
        ("well-formed answers before / after", f"{100 * summary['well_formed_before']:.0f} % / {100 * summary['well_formed_after']:.0f} %"),
        ("tenant's adapter, a few supervised steps: accuracy base / adapter", f"{100 * summary['tenant_accuracy_base']:.1f} % / {100 * summary['tenant_accuracy_adapter']:.1f} %"),
        ("engine against trainer, mean / max \\|dlogp\\|", f"{summary['mismatch_mean']:.1e} / {summary['mismatch_max']:.1e}"),
        ("rollout speed; one step: generate + train", f"{summary['rollout_tok_s']:.1f} tokens/s; {summary['generate_s']:.1f} + {summary['train_s']:.1f} s"),
        ("copies of the base in memory; checksum before and after", f"{summary['base_copies']:.2f}; {'equal' if summary['checksum_equal'] else 'DIFFERENT'}"),
        ("trainer's peak private memory (a quarter of the base in fp32 + 400 MiB)", f"{summary['trainer_peak_private_mib']:.0f} MiB ({summary['trainer_private_bound_mib']:.0f} MiB)"),
        ("peak resident memory of all processes", f"{summary['peak_rss_gb']:.1f} GB"),
        ("tenants' greedy answers against isolation", f"{summary['answers_equal']} equal, {summary['answers_near_tie']} at a near-tie, {summary['answers_wrong']} wrong"),
        ("engine steps with tenants and rollouts together", str(summary["mixed_steps"])),
    ]  # fmt: skip
    return "\n".join([
        "| SmolLM2-135M-Instruct, one run | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows),
        "",
        f"{summary['main_job_s']:.0f} s on {machine['cores']} cores ({machine['cpu']}): {stages}. From "
        f"[benchmarks/results/quickstart_smollm2.json](benchmarks/results/quickstart_smollm2.json), `{document['command']}`.",
    ])  # fmt: skip


def tests_block(everything: Path, main_job: Path) -> str:
    """How long each part of the tests took in the recorded run of all of them, and the main job's own parts alone."""
    if not everything.exists():
        return "No run of all tests is recorded yet; `make test-full` records one."
    document = json.loads(everything.read_text())
    lines = ["| part of `make test-full` | tests | passed | wall |", "|---|---:|---:|---:|"]
    for name, part in document["parts"].items():
        lines.append(f"| {name} | {part['tests']:.0f} | {part['passed']:.0f} | {part['wall_s']:.0f} s |")
    lines += [
        "",
        f"All in {document['wall_s']:.0f} s on {document['machine']['cores']} cores, whose load before the start was "
        f"{document['machine']['load_before']:.1f}. From [benchmarks/results/test_full.json](benchmarks/results/test_full.json), "
        "which also has the seconds by folder.",
    ]
    if main_job.exists():
        alone = json.loads(main_job.read_text())
        split = ", ".join(f"{name} {part['wall_s']:.0f} s" for name, part in alone["parts"].items())
        lines[-1] += (
            f" The main job's own share of `make test`, alone: {alone['wall_s']:.0f} s ({split}, side by side), from "
            "[benchmarks/results/test_main_job.json](benchmarks/results/test_main_job.json)."
        )
    return "\n".join(lines)


def summary_block(name: str, rows: Sequence[tuple[str, str, str]], head: str, remark: str = "") -> str:
    """A table of a results file's summary, what was not measured included, with where it comes from. remark: said before that."""
    document = json.loads((RESULTS / name).read_text())
    lines = [f"| {head} | |", "|---|---:|"]
    for what, key, form in rows:
        value = document["summary"][key]
        lines.append(f"| {what} | {'not measured' if value is None else form.format(value)} |")
    return "\n".join([*lines, "", f"{remark}From [benchmarks/results/{name}](benchmarks/results/{name})."])


def machine_text(name: str) -> str:
    """GPU and versions that a results file was measured with."""
    document = json.loads((RESULTS / name).read_text())
    return f"{document['gpu']}, torch {document['versions']['torch']}, vLLM {document['versions']['vllm']}"


def with_block(text: str, begin: str, end: str, block: str) -> str:
    """The page's text with `block` between its two marks. Raises ValueError if a mark is missing."""
    if begin not in text or end not in text:
        raise ValueError(f"the page has no block {begin} ... {end}")
    return text[: text.index(begin) + len(begin)] + f"\n{block}\n" + text[text.index(end) :]


def rewritten(text: str) -> str:
    """README text with its blocks as the results files give them. Raises ValueError if a marker is missing."""
    blocks = {
        "quickstart": quickstart_block(json.loads((RESULTS / "quickstart_cpu.json").read_text())),
        "smollm2": smollm2_block(json.loads((RESULTS / "quickstart_smollm2.json").read_text())),
        "tests": tests_block(RESULTS / "test_full.json", RESULTS / "test_main_job.json"),
        "kernels": summary_block(
            "kernels_h200.json",
            KERNEL_ROWS,
            "one Qwen3-8B layer's four projections, FP8 base, rank 64",
            f"{machine_text('kernels_h200.json')}; vLLM's fastest is the best of default and tuned kernels on one and two streams in "
            "the same run. [benchmarks/LOG.md](benchmarks/LOG.md) says what the figures contain (the small-batch rows overlap "
            "consecutive projections) and where the remaining microseconds are. ",
        ),
        "serving": summary_block(
            "serving_h200.json",
            SERVING_ROWS,
            "Qwen3-8B shape, FP8 base, rank-64 adapters",
            f"{machine_text('serving_h200.json')}; vLLM's fastest is the best of the default and tuned LoRA kernels on one and two "
            "streams that the same run measured. `python -m benchmarks.serving`. ",
        ),
        "router": summary_block(
            "router_cpu.json",
            ROUTER_ROWS,
            "store and router, two cores, no GPU",
            "`python -m benchmarks.router_cpu`. ",
        ),
        "one_copy": summary_block("rl_h200.json", ONE_COPY_ROWS, "Qwen3-8B shape, rank 64, one H200"),
        "formats": summary_block("formats_h200.json", FORMAT_ROWS, "adapters in FP8 and NVFP4"),
    }
    for name, block in blocks.items():
        text = with_block(text, f"<!-- {name}:begin -->", f"<!-- {name}:end -->", block)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = README.read_text()
    new = rewritten(text)
    if check:
        sys.exit(0 if new == text else "README.md differs from the results files; run python -m benchmarks.readme")
    README.write_text(new)


if __name__ == "__main__":
    main()
