"""Held-out accuracy of the base or of an adapter version, measured through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epilora.types import GenerateRequest, Sampling
from jobs.statistics import wilson_interval


@dataclass(frozen=True)
class EvalResult:
    """accuracy with its 95 % interval, the share of well-formed answers, the number of problems. Shares are 0..1."""

    accuracy: float
    ci_low: float
    ci_high: float
    well_formed: float
    problems: int


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
) -> EvalResult:
    """Ask the first `problems` held-out problems once (greedy unless temperature > 0) and score the answers."""
    asked = [task.problem("held_out", i) for i in range(problems)]
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
    right = sum(task.score(c.text, p) >= 1.0 for c, p in zip(completions, asked, strict=True))
    formed = sum(task.well_formed(c.text) for c in completions)
    low, high = wilson_interval(right, problems)
    return EvalResult(right / problems, low, high, formed / problems, problems)
