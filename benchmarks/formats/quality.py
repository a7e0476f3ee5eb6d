"""Quality of adapters stored in FP8 and NVFP4, on adapters that were really trained here.

    python -m benchmarks.formats.quality [--adapters 6] [--problems 200]

One engine and one trainer in this process, tiny model. Adapters: GRPO on addition (two seeds, ranks 16 and 8) and on
subtraction, supervised ones for maximum, subtraction and addition. Each is converted to both formats by the error-aware and
by the plain method, and each copy goes through the gate; then one is spoilt on purpose (the two codes of every byte of A change
places, what a reader with the other nibble order would see). Appends to benchmarks/results/formats_h200.json; also the
bytes of a rank-64 adapter of the Qwen3-8B shape in every format.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

import torch

from actors.handles import LocalPart
from benchmarks.formats.summary import summarise
from benchmarks.harness import Results, command_line
from benchmarks.shapes import LAYER
from epilora.adapters.convert import METHODS, STORED_FORMATS, ConvertedModule, bytes_per_adapter
from epilora.config.load import load_config
from epilora.plugin.environment import prepare_environment
from epilora.quant.formats import Format
from epilora.tasks import load_task
from epilora.types import AdapterVersion
from jobs.conversion import ConversionReport, convert_version
from jobs.loop import RLLoop
from jobs.sft import train_supervised

RESULTS = pathlib.Path("benchmarks/results/formats_h200.json")
TASKS = "epilora.tasks.arithmetic:"
# (kind, task, rank, seed): what is trained, and the held-out problems it is judged on
ADAPTERS = [
    ("rl", "addition", 16, 0),
    ("rl", "addition", 8, 1),
    ("rl", "subtraction", 16, 2),
    ("sft", "maximum", 16, 3),
    ("sft", "subtraction", 16, 4),
    ("sft", "addition", 16, 5),
]


async def measure(results: Results, *, adapters: int, problems: int, rl_steps: int) -> None:
    """Train, convert and judge; rows are written as they come."""
    prepare_environment()
    from epilora.models import TINY_ARITH
    from epilora.plugin.engine import VllmEngine
    from epilora.store import AdapterStore
    from epilora.trainer.trainer import LoraTrainer

    engine = VllmEngine(
        name="formats", model_path=str(TINY_ARITH), dtype="float32", activations="w8a16", max_model_len=32,
        max_num_seqs=288, max_num_batched_tokens=2048, max_loras=8, max_lora_rank=16,
    )  # fmt: skip
    trainer = LoraTrainer(dtype="float32")
    trainer.attach(await engine.export_weights())
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Any] = {
            "engine": LocalPart(engine),
            "trainer": LocalPart(trainer),
            "store": LocalPart(AdapterStore(folder)),
        }
        for kind, task_name, rank, seed in ADAPTERS[:adapters]:
            task = load_task(TASKS + task_name)
            version = await _train(kind, task_name, rank, seed, parts, pathlib.Path(folder), rl_steps)
            case = f"quality/{kind}-{task_name}-r{rank}"
            for fmt in STORED_FORMATS:
                for method in METHODS:
                    report = await _judge(version, fmt, task, problems, parts, method=method)
                    _add(results, case, fmt, method, report)
            if (kind, task_name) == ("rl", "addition") and seed == 0:
                report = await _judge(version, Format.NVFP4, task, problems, parts, change=_swap_nibbles)
                _add(results, case, Format.NVFP4, "planted", report)
            results.write()
            await parts["engine"].unload_adapter(version.digest)
    engine.close()


async def _train(
    kind: str, task_name: str, rank: int, seed: int, parts: dict[str, Any], folder: pathlib.Path, rl_steps: int
) -> AdapterVersion:
    name = f"{kind}-{task_name}-{seed}"
    task = load_task(TASKS + task_name)
    if kind == "sft":
        info = await parts["engine"].info()
        return await train_supervised(
            trainer=parts["trainer"], store=parts["store"], info=info, task=task, name=name, owner="", rank=rank, steps=20,
            batch=64, seed=seed, lr=3e-3,
        )  # fmt: skip
    config = load_config(
        pathlib.Path("configs/quickstart_tiny.yaml"),
        [f"name={name}", f"seed={seed}", f"lora.rank={rank}", f"rl.steps={rl_steps}", f"task.path={TASKS}{task_name}"],
    )
    loop = RLLoop(config, task=task, run_dir=folder / name, record=lambda step, metrics: None, **parts)
    await loop.start()
    await loop.run()
    assert loop.policy is not None, "a loop that ran has a policy"
    version = loop.policy.version
    await loop.close(keep_policy=False)
    return version


async def _judge(
    version: AdapterVersion, fmt: Format, task: Any, problems: int, parts: dict[str, Any], **options: Any
) -> ConversionReport:
    report = await convert_version(
        version,
        fmt,
        engine=parts["engine"],
        store=parts["store"],
        task=task,
        problems=problems,
        max_tokens=5,
        **options,
    )
    if report.verdict.accepted:
        await parts["engine"].unload_adapter(report.copy.digest)
    return report


def _swap_nibbles(stored: dict[str, ConvertedModule]) -> dict[str, ConvertedModule]:
    def swapped(module: ConvertedModule) -> ConvertedModule:
        codes = module.a.values
        return dataclasses.replace(module, a=dataclasses.replace(module.a, values=(codes >> 4) | (codes << 4)))

    return {name: swapped(module) for name, module in stored.items()}


def _add(results: Results, case: str, fmt: Format, method: str, report: ConversionReport) -> None:
    served = "copy" if report.served == report.copy.digest else "original"
    errors = list(report.relative_error.values())
    results.add(
        case, f"{fmt.value}/{method}", 0, errors, unit="relative_error", digits=6,
        checks=[dataclasses.asdict(check) for check in report.verdict.checks], served=served,
        accuracy_original=report.accuracy_original, accuracy_copy=report.accuracy_copy,
    )  # fmt: skip
    words = "accepted" if report.verdict.accepted else "; ".join(report.verdict.reasons)
    print(
        f"{case} {fmt.value}/{method}: error {sum(errors) / len(errors):.4f}, accuracy {report.accuracy_original:.3f} -> "
        f"{report.accuracy_copy:.3f}, {words}",
        flush=True,
    )


def add_sizes(results: Results, rank: int = 64) -> None:
    """Rows with the bytes of one adapter of the Qwen3-8B layer in every format (codes, scales and global scales)."""
    shapes = {f"{p.name}/{i}": (width, p.K) for p in LAYER for i, width in enumerate(p.slices)}
    for fmt in (Format.BF16, *STORED_FORMATS):
        size = bytes_per_adapter(shapes, rank, fmt)
        results.add("adapter_bytes", fmt.value, 0, [size], unit="bytes", rank=rank, shape="qwen3-8b layer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--adapters", type=int, default=len(ADAPTERS))
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--rl-steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, summarise, command_line("python -m benchmarks.formats.quality", sys.argv[1:]))
    add_sizes(results)
    asyncio.run(measure(results, adapters=args.adapters, problems=args.problems, rl_steps=args.rl_steps))
    results.write()
    for key, value in results.summarise(results.rows).items():
        if value is not None:
            print(f"{key} = {value}")


if __name__ == "__main__":
    main()
