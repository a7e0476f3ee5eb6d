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

from jobs.report import accuracy_text, table_rows

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
KERNEL_ROWS = (
    ("1 token, 1 adapter: time of the layer", "layer_m1_us", "{:.1f} us"),
    ("1 token, 1 adapter, over vLLM's layer *without* an adapter", "layer_m1_over_no_adapter", "{:.2f}x"),
    ("1 token, 1 adapter, over vLLM's fastest with one", "layer_m1_over_vllm_best", "{:.2f}x"),
    ("8 tokens, the same", "layer_m8_over_vllm_best", "{:.2f}x"),
    ("16 tokens, the same", "layer_m16_over_vllm_best", "{:.2f}x"),
    ("16 tokens, over vLLM's layer without an adapter", "layer_m16_over_no_adapter", "{:.2f}x"),
    ("no adapter, 1 token: our GEMM over quantise + CUTLASS", "gemm_m1_over_cutlass", "{:.2f}x"),
    ("32 tokens, 1 adapter, over vLLM's fastest", "m32_1_over_vllm_best", "{:.2f}x"),
    ("32 tokens, 32 adapters, over vLLM's fastest", "m32_32_over_vllm_best", "{:.2f}x"),
    ("512 tokens, 32 adapters, over vLLM's fastest", "hybrid_512_32_over_vllm_best", "{:.2f}x"),
    ("2,048 tokens, 32 adapters, over vLLM's fastest", "prefill_2048_32_over_vllm_best", "{:.2f}x"),
    ("2,048 tokens, 32 adapters, over the vendor GEMM alone", "prefill_2048_32_over_vendor_gemm", "{:.2f}x"),
    ("W8A16, 1 token, over Marlin", "w8a16_m1_over_marlin", "{:.2f}x"),
    ("training forward, 4,096 tokens, over bf16 cuBLAS", "train_fwd_4096_over_bf16", "{:.2f}x"),
    ("training backward, the same", "train_bwd_4096_over_bf16", "{:.2f}x"),
)
SERVING_ROWS = (
    ("time per output token, batch 1, one adapter, 1 slot", "tpot_b1_ms", "{:.2f} ms"),
    ("the same, over vLLM's fastest", "tpot_b1_over_vllm_best", "{:.2f}x"),
    ("the same, over vLLM with LoRA off", "tpot_b1_over_no_adapter", "{:.2f}x"),
    (
        "time per output token, batch 1, one adapter, 32 slots, over vLLM's fastest",
        "tpot_b1_32slots_over_vllm_best",
        "{:.2f}x",
    ),
    ("no adapter in the batch, over vLLM with LoRA off", "base_only_over_no_lora", "{:.3f}x"),
    (
        "throughput of 32 tenants, 256 x (512 + 256) tokens, over vLLM's fastest",
        "throughput_32_over_vllm_best",
        "{:.2f}x",
    ),
    ("the same, over vLLM with LoRA off", "throughput_32_over_no_adapter", "{:.2f}x"),
    ("the same with adapters stored in FP8, over vLLM's fastest", "throughput_32_fp8_over_vllm_best", "{:.2f}x"),
    ("KV tokens, over vLLM's", "kv_tokens_over_vllm", "{:.3f}x"),
    ("timing the paths, no cache", "dispatch_cold_s", "{:.1f} s"),
    ("online, median time per token, worst rate, over vLLM's fastest", "online_tpot_worst_ratio", "{:.2f}x"),
    ("online, p99 TTFT, worst rate, over vLLM's fastest", "online_ttft_p99_worst_ratio", "{:.2f}x"),
    ("72B shape, time per token at batch 1, over vLLM's fastest", "tpot_72b_over_vllm_best", "{:.2f}x"),
)


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


def tests_block(path: Path) -> str:
    """How long each part of the tests took in the last recorded run of all of them, if there is one."""
    if not path.exists():
        return "No run of all tests is recorded yet; `make test-full` records one."
    document = json.loads(path.read_text())
    lines = ["| part of `make test-full` | tests | passed | wall |", "|---|---:|---:|---:|"]
    for name, part in document["parts"].items():
        lines.append(f"| {name} | {part['tests']:.0f} | {part['passed']:.0f} | {part['wall_s']:.0f} s |")
    lines += [
        "",
        f"All side by side in {document['wall_s']:.0f} s on {document['machine']['cores']} cores, whose load before the start was "
        f"{document['machine']['load_before']:.1f}. From [benchmarks/results/test_full.json](benchmarks/results/test_full.json), "
        "which also has the seconds by folder.",
    ]
    return "\n".join(lines)


def kernels_block(document: Mapping[str, Any]) -> str:
    """The kernels' summary, losses included."""
    summary, versions = document["summary"], document["versions"]
    lines = ["| one Qwen3-8B layer's four projections, FP8 base, rank 64 | |", "|---|---:|"]
    for what, key, form in KERNEL_ROWS:
        value = summary[key]
        lines.append(f"| {what} | {'not measured' if value is None else form.format(value)} |")
    lines += [
        "",
        f"{document['gpu']}, torch {versions['torch']}, vLLM {versions['vllm']}; vLLM's fastest is the best of default and tuned kernels on one "
        "and two streams in the same run. From [benchmarks/results/kernels_h200.json](benchmarks/results/kernels_h200.json); "
        "[benchmarks/LOG.md](benchmarks/LOG.md) says what the figures contain (the small-batch rows overlap consecutive projections) "
        "and where the remaining microseconds are.",
    ]
    return "\n".join(lines)


def serving_block(document: Mapping[str, Any]) -> str:
    """The serving summary, what was not measured included."""
    summary, versions = document["summary"], document["versions"]
    lines = ["| Qwen3-8B shape, FP8 base, rank-64 adapters | |", "|---|---:|"]
    for what, key, form in SERVING_ROWS:
        value = summary[key]
        lines.append(f"| {what} | {'not measured' if value is None else form.format(value)} |")
    lines += [
        "",
        f"{document['gpu']}, torch {versions['torch']}, vLLM {versions['vllm']}; vLLM's fastest is the best of the default and tuned LoRA kernels on "
        "one and two streams that the same run measured. From [benchmarks/results/serving_h200.json](benchmarks/results/serving_h200.json), "
        "`python -m benchmarks.serving`.",
    ]
    return "\n".join(lines)


ONE_COPY_ROWS = (
    ("trained tokens/s on the engine's FP8 codes, over the same trainer on a 16-bit base", "train_tokens_s_over_bf16", "{:.2f}x"),
    ("from the optimizer step's end to the new version's first token (vLLM's own LoRA kernels)", "publish_ms_8b", "{:.0f} ms"),
    ("release and restore of 64 GiB of KV cache, together", "kv_release_s", "{:.2f} s"),
)  # fmt: skip
FORMAT_ROWS = (
    ("resident adapters at equal memory, FP8 over bf16", "resident_adapters_fp8_over_bf16", "{:.2f}x"),
    ("the same, NVFP4 (no kernel reads NVFP4 slots yet)", "resident_adapters_nvfp4_over_bf16", "{:.2f}x"),
    ("quality checks of converted adapters (tiny model, CPU)", "quality_checks", "{:.0f}"),
    ("of these failed, a conversion spoilt on purpose included", "quality_refused", "{:.0f}"),
    ("failed and served all the same", "quality_failed_served", "{:.0f}"),
)


def summary_block(document: Mapping[str, Any], rows: Sequence[tuple[str, str, str]], head: str, source: str) -> str:
    """A table of a summary's keys, with where it comes from."""
    summary = document["summary"]
    lines = [f"| {head} | |", "|---|---:|"]
    for what, key, form in rows:
        value = summary[key]
        lines.append(f"| {what} | {'not measured' if value is None else form.format(value)} |")
    return "\n".join([*lines, "", f"From [benchmarks/results/{source}](benchmarks/results/{source})."])


def rewritten(text: str) -> str:
    """README text with its blocks as the results files give them. Raises ValueError if a marker is missing."""
    blocks = {
        "quickstart": quickstart_block(json.loads((RESULTS / "quickstart_cpu.json").read_text())),
        "smollm2": smollm2_block(json.loads((RESULTS / "quickstart_smollm2.json").read_text())),
        "tests": tests_block(RESULTS / "test_full.json"),
        "kernels": kernels_block(json.loads((RESULTS / "kernels_h200.json").read_text())),
        "serving": serving_block(json.loads((RESULTS / "serving_h200.json").read_text())),
        "one_copy": summary_block(
            json.loads((RESULTS / "rl_h200.json").read_text()),
            ONE_COPY_ROWS,
            "Qwen3-8B shape, rank 64, one H200",
            "rl_h200.json",
        ),
        "formats": summary_block(
            json.loads((RESULTS / "formats_h200.json").read_text()),
            FORMAT_ROWS,
            "adapters in FP8 and NVFP4",
            "formats_h200.json",
        ),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in text or end not in text:
            raise ValueError(f"README.md has no block {begin} ... {end}")
        text = text[: text.index(begin) + len(begin)] + f"\n{block}\n" + text[text.index(end) :]
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
