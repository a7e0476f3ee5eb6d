"""Accuracy of the base or of an adapter version on held-out questions or on evaluation sets, measured through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epilora.config.schema import EvaluationConfig
from epilora.tasks import checked_score, load_task
from epilora.types import GenerateRequest, Sampling
from jobs.statistics import wilson_interval


@dataclass(frozen=True)
class EvalResult:
    """accuracy with its 95 % interval, the share of well-formed answers, the number of problems and of answers to each.
    Shares are 0..1. With several samples the accuracy is their mean (avg@samples), the interval that of the answers.
    """

    accuracy: float
    ci_low: float
    ci_high: float
    well_formed: float
    problems: int
    samples: int = 1


async def evaluate(
    engine: Any,
    task: Any,
    *,
    problems: int,
    adapter: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    temperature: float = 0.0,
    tag: str = "eval",
    seed: int = 0,
    samples: int = 1,
) -> EvalResult:
    """Ask the first `problems` held-out problems `samples` times (greedy unless temperature > 0) and score the answers."""
    asked = [task.problem("held_out", i) for i in range(problems) for _ in range(samples)]
    requests = [
        GenerateRequest(
            request_id=f"rollout-{tag}-{i}",
            prompt=problem.prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=temperature, stop=stop, seed=seed + i),
            adapter=adapter,
            kind="rollout",
        )
        for i, problem in enumerate(asked)
    ]
    completions = await engine.generate(requests)
    right = sum(checked_score(task.score, c.text, p) >= 1.0 for c, p in zip(completions, asked, strict=True))
    formed = sum(task.well_formed(c.text) for c in completions)
    low, high = wilson_interval(right, len(asked))
    return EvalResult(right / len(asked), low, high, formed / len(asked), problems, samples)


async def evaluate_sets(engine: Any, config: EvaluationConfig, adapter: str | None, tag: str) -> dict[str, EvalResult]:
    """Every evaluation set of the configuration, by name."""
    found = {}
    for name, task_config in config.tasks.items():
        task = load_task(task_config.path, **task_config.args)
        size = task.size("held_out")
        found[name] = await evaluate(
            engine,
            task,
            problems=min(size, config.problems) if config.problems else size,
            adapter=adapter,
            max_tokens=config.max_tokens,
            stop=tuple(config.stop),
            temperature=config.temperature,
            tag=f"{tag}-{name}",
            samples=config.samples,
        )
    return found
