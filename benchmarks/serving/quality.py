"""Do served adapters keep their quality? Ours against stock vLLM on held-out problems, answer by answer.

    python -m benchmarks.serving.quality --config configs/quickstart_smollm2.yaml --adapters runs/NAME/adapter \
        --problems 1000 --out quality.json task.args.size=12000

The same FP8 base (activations quantised per token), the same prompts, greedy decoding; adapters are PEFT folders, as a job
leaves them under its run's `adapter`. The two engines run one after the other. Per adapter: how many problems exactly one
of the two got right, McNemar's exact p, and the difference of accuracies (ours minus stock's) with its 95 % interval.
Trailing key=value change the configuration, as in every job.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.engines import OURS, STOCK, EngineProcess, EngineSpec
from benchmarks.serving.statistics import mcnemar_exact_p, paired_difference, wilson

Row = dict[str, Any]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """case -> accuracies, discordant pairs, p and paired interval, of the newest run that has both sides."""
    summary: dict[str, Any] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        for run_id in dict.fromkeys(row["run_id"] for row in reversed(rows)):
            same = {
                row["provider"]: [s == 1 for s in row["samples_right"]]
                for row in rows
                if row["case"] == case and row["run_id"] == run_id and not row.get("fallbacks")
            }
            if {OURS, STOCK[0]} <= set(same):
                stock, ours = same[STOCK[0]], same[OURS]
                only_stock = sum(a and not b for a, b in zip(stock, ours, strict=True))
                only_ours = sum(b and not a for a, b in zip(stock, ours, strict=True))
                difference = paired_difference(stock, ours)
                summary[case] = {
                    "problems": len(ours),
                    "accuracy_stock": round(sum(stock) / len(stock), 4),
                    "accuracy_ours": round(sum(ours) / len(ours), 4),
                    "only_stock_right": only_stock,
                    "only_ours_right": only_ours,
                    "mcnemar_p": round(mcnemar_exact_p(only_stock, only_ours), 6),
                    "difference": [round(x, 4) for x in difference],
                }
                break
    return summary


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(ends)] if ends else text


def answers(
    spec: EngineSpec,
    work: pathlib.Path,
    folders: Sequence[str],
    prompts: Sequence[list[int]],
    max_tokens: int,
    stop_ids: Sequence[int],
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """adapter -> problem -> token ids of one engine, and the engine's facts. Raises EngineFailed."""
    with EngineProcess(spec, work) as engine:
        engine.build()
        engine.wait_ready()
        engine.call("load_peft", folders=list(folders))
        given = [
            engine.call(
                "answer",
                timeout_s=3600.0,
                prompts=list(prompts),
                adapter=adapter,
                max_tokens=max_tokens,
                stop_ids=list(stop_ids),
            )
            for adapter in range(1, len(folders) + 1)
        ]
        return given, engine.call("facts")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--adapters", nargs="+", required=True, help="PEFT folders")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args, overrides = parser.parse_known_intermixed_args(arguments)

    from transformers import PreTrainedTokenizerFast

    from benchmarks.harness import Results, command_line
    from epilora.adapters.peft_io import read_peft
    from epilora.config.load import load_config
    from epilora.models import resolve_model_path
    from epilora.tasks import load_task

    config = load_config(args.config, overrides)
    task = load_task(config.task.path, **config.task.args)
    if task.size("held_out") < args.problems:
        raise SystemExit(
            f"{task.name} holds out {task.size('held_out')} problems, --problems asks for {args.problems}; "
            "raise task.args.size or lower --problems"
        )
    problems = [task.problem("held_out", i) for i in range(args.problems)]
    folder = pathlib.Path(resolve_model_path(config.engine.model_path))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompts = [list(tokenizer.encode(problem.prompt)) for problem in problems]
    stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rank = max(read_peft(path)[0].rank for path in args.adapters)
    base = EngineSpec(
        model=str(folder),
        variant=OURS,
        slots=len(args.adapters),
        rank=next(r for r in (8, 16, 32, 64, 128, 256) if r >= rank),
        max_model_len=config.engine.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        kv_bytes=config.engine.kv_cache_mib << 20,
        gpu_memory_utilization=0.05,
        load_format="auto",
        dtype=args.dtype,
        capture_sizes=(1, 8, 32, 64) if pathlib.Path("/dev/nvidiactl").exists() else (),
    )
    results = Results(args.out, summarise, command_line("python -m benchmarks.serving.quality", sys.argv[1:]))
    work = pathlib.Path(tempfile.mkdtemp(prefix="quality-"))
    for variant in (OURS, STOCK[0]):
        spec = base.as_variant(variant)
        given, facts = answers(spec, work, args.adapters, prompts, config.rl.max_tokens, stop_ids)
        for path, per_problem in zip(args.adapters, given, strict=True):
            texts = [cut(tokenizer.decode(ids, skip_special_tokens=True), config.rl.stop) for ids in per_problem]
            right = [int(task.score(text, problem) >= 1.0) for text, problem in zip(texts, problems, strict=True)]
            told = {"engine": spec.settings(), "paths": facts.get("paths", {}), "fallbacks": facts.get("fallbacks", [])}
            case = f"quality/{folder.name}/{task.name}/{pathlib.Path(path).resolve().parent.name}"
            results.add(case, variant, len(problems), right, unit="right", digits=0, **told)
            low, high = wilson(sum(right), len(right))
            print(f"{case} {variant}: {sum(right)}/{len(right)} right [{low:.3f}, {high:.3f}]", flush=True)
    results.write()
    summary = summarise(results.rows)
    for case, line in summary.items():
        print(case, line)
    return summary


if __name__ == "__main__":
    main()
