"""Evaluation sets: every question of each set, several samples, and sets that are no sets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from epilora.config import load_config
from epilora.tasks.base import RewardError
from epilora.types import Completion
from jobs import evaluate as job
from jobs.evaluation import evaluate_sets


class Engine:
    """Answers x=2 for even seeds and the prompt for odd ones."""

    def __init__(self) -> None:
        self.asked: list = []

    async def generate(self, requests):
        self.asked += requests
        return [
            Completion(
                r.request_id, (1,), (2,), "$x=2$" if r.sampling.seed % 2 == 0 else r.prompt, (0.0,), "stop", r.adapter
            )
            for r in requests
        ]


def config(folder: Path, rows: list[dict[str, str]], *overrides: str):
    source = folder / "set.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    maths = "score: epilora.tasks.maths:math_verify_score, well_formed: epilora.tasks.maths:math_well_formed"
    return load_config(
        None,
        [
            "engine.model_path=m",
            "task.path=a:b",
            "evaluation.tasks={algebra: {path: 'epilora.tasks.dataset:dataset_task', args: "
            f"{{source: '{source}', held_out_fraction: 1.0, {maths}}}}}}}",
            *overrides,
        ],
    )


ROWS = [{"prompt": "What is 1+1?", "answer": "2"}, {"prompt": "What is 1/2+3/2?", "answer": r"\frac{4}{2}"}]


def test_accuracy_is_the_mean_over_samples(tmp_path: Path) -> None:
    engine = Engine()
    made = config(tmp_path, ROWS, "evaluation.samples=4", "evaluation.temperature=1.0")
    found = asyncio.run(evaluate_sets(engine, made.evaluation, "digest", "run"))["algebra"]
    assert (found.accuracy, found.problems, found.samples) == (0.5, 2, 4)
    assert found.ci_low < 0.5 < found.ci_high
    assert [r.prompt for r in engine.asked] == ["What is 1+1?"] * 4 + ["What is 1/2+3/2?"] * 4
    assert {r.adapter for r in engine.asked} == {"digest"}
    assert len({r.request_id for r in engine.asked}) == 8
    engine.asked.clear()
    one = config(tmp_path, ROWS, "evaluation.problems=1")
    assert asyncio.run(evaluate_sets(engine, one.evaluation, None, "run"))["algebra"].problems == 1
    assert len(engine.asked) == 1


def test_an_answer_that_cannot_be_read_is_an_error_with_its_place(tmp_path: Path) -> None:
    made = config(tmp_path, [ROWS[0], {"prompt": "q", "answer": "   "}])
    with pytest.raises(RewardError, match=r"problem 'set:1'.*no expression math-verify can parse"):
        asyncio.run(evaluate_sets(Engine(), made.evaluation, None, "run"))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation.samples=2 with temperature=0"):
        config(tmp_path, ROWS, "evaluation.samples=2")
    nothing = load_config(None, ["engine.model_path=m", "task.path=a:b"])
    with pytest.raises(ValueError, match=r"evaluation.tasks is empty"):
        asyncio.run(job.run(nothing))
