"""reasoning-gym data sets as tasks: https://github.com/open-thought/reasoning-gym (procedural questions with their own
scores).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .base import Problem, SplitQuestions, assert_disjoint, split_of

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# `{question}` is replaced. chatml: the format of SmolLM2's and Qwen's instruct models.
TEMPLATES = {
    "plain": "{question}",
    "chatml": "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
}


def last_number(text: str) -> str:
    """The last number in `text` as written, or "" if there is none."""
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


def whole_text(text: str) -> str:
    """The text without white space at its ends."""
    return text.strip()


EXTRACTORS: dict[str, Callable[[str], str]] = {"last_number": last_number, "whole_text": whole_text}


class ReasoningGymTask(SplitQuestions):
    """One reasoning-gym data set. Its own `score_answer` scores what `extract` takes from a completion.

    name: the data set's, e.g. "chain_sum". size: items generated. template: key of TEMPLATES or a text with
    `{question}`.
    instruction: appended to each question. extract: key of EXTRACTORS. options: the data set's configuration.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int = 2000,
        seed: int = 0,
        template: str = "plain",
        instruction: str = "",
        extract: str = "whole_text",
        held_out_fraction: float = 0.1,
        question: Callable[[Mapping[str, Any]], str] | None = None,
        **options: Any,
    ) -> None:
        """question: makes the question of an item (None: the item's own). Raises ValueError naming what is unknown or
        empty.
        """
        import reasoning_gym

        if extract not in EXTRACTORS:
            raise ValueError(f"{name}: extract={extract!r}; allowed: {sorted(EXTRACTORS)}")
        text = TEMPLATES.get(template, template)
        if "{question}" not in text:
            raise ValueError(f"{name}: template={template!r} is none of {sorted(TEMPLATES)} and has no {{question}}")
        self.name = name
        self._extract = EXTRACTORS[extract]
        self._data = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
        self._splits: dict[str, list[Problem]] = {"train": [], "held_out": []}
        seen: set[str] = set()
        for index in range(size):
            item = self._data[index]
            asked = (question(item) if question else item["question"]) + instruction
            if asked in seen:
                continue
            seen.add(asked)
            problem = Problem(
                f"{name}:{index}", text.replace("{question}", asked), str(item["answer"]), {"index": index}
            )
            self._splits[split_of(asked, held_out_fraction)].append(problem)
        for split, problems in self._splits.items():
            if not problems:
                raise ValueError(f"{name}: the {split} split of {size} items is empty; raise size or held_out_fraction")
        assert_disjoint(self._splits["train"], self._splits["held_out"])

    def score(self, text: str, problem: Problem) -> float:
        """The data set's own score of the extracted answer, 0..1."""
        return float(self._data.score_answer(self._extract(text), self._data[problem.meta["index"]]))

    def well_formed(self, text: str) -> bool:
        """Whether an answer can be extracted."""
        return self._extract(text) != ""


def reasoning_gym_task(name: str, **options: Any) -> ReasoningGymTask:
    """A reasoning-gym data set as a task, by import path `epilora.tasks.reasoning:reasoning_gym_task`."""
    return ReasoningGymTask(name, **options)
