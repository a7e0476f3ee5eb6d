"""What a task is: questions in two disjoint splits, and a score for an answer.

A task is any object with the three methods of `Task`. Jobs name one by import path, `package.module:attribute`, where
the attribute is a task or a callable that makes one (`load_task`). Rewards may be given by import path too
(`load_object`).

The split of a question is a stable hash of its text (`split_of`), never its place in a list, so that two runs, two
seeds and two machines agree on what was held out, and a question cannot sit in both splits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from epilora.loading import load_object

SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Problem:
    """One question.

    problem_id: unique within the task. prompt: text given to the model. answer: the right answer as text ("" if the
    score needs none). meta: free, JSON-able.
    """

    problem_id: str
    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """Questions and their scores. All methods are deterministic. name: short, fit for file and adapter names."""

    name: str

    def size(self, split: str) -> int:
        """Number of distinct questions in "train" or "held_out"."""
        ...

    def problem(self, split: str, index: int) -> Problem:
        """The `index`-th question of "train" or "held_out"; indexes past the last wrap round in "train" only."""
        ...

    def score(self, text: str, problem: Problem) -> float:
        """Reward of a completion's text (without the prompt), higher is better."""
        ...

    def well_formed(self, text: str) -> bool:
        """Whether the completion has the form of an answer, right or wrong."""
        ...


class SplitQuestions:
    """The half of a task that serves questions out of two lists. Subclasses give `name` and `_splits`, one list per split."""

    name: str
    _splits: dict[str, list[Problem]]

    def size(self, split: str) -> int:
        """Number of distinct questions in a split."""
        return len(self._split(split))

    def _split(self, split: str) -> list[Problem]:
        if split not in self._splits:
            raise ValueError(f"{self.name}: split={split!r}; allowed: {sorted(self._splits)}")
        return self._splits[split]

    def problem(self, split: str, index: int) -> Problem:
        """See `Task.problem`. Raises IndexError past the end of "held_out"."""
        problems = self._split(split)
        if split == "held_out" and not 0 <= index < len(problems):
            raise IndexError(f"{self.name}: held_out has {len(problems)} problems, asked for index {index}")
        return problems[index % len(problems)]


class RewardError(RuntimeError):
    """A reward raised, or was not a finite number; the message names the problem and shows the text."""


def split_of(key: str, held_out_fraction: float = 0.1) -> str:
    """Split of the question identified by `key`: "held_out" for about `held_out_fraction` of all keys, else "train"."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "held_out" if bucket < held_out_fraction else "train"


def assert_disjoint(train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Raises ValueError naming the first few prompts that are in both splits."""
    shared = {p.prompt for p in train} & {p.prompt for p in held_out}
    if shared:
        raise ValueError(
            f"{len(shared)} prompts are in both splits, e.g. {sorted(shared)[:3]}; split by split_of(prompt)"
        )


def load_task(path: str, **options: Any) -> Task:
    """The task at `package.module:attribute`: a task object, or a callable that is called with `options`.

    Raises TypeError if the result lacks a method of `Task`, or if options are given for a finished object.
    """
    target = load_object(path)
    if isinstance(target, type) or not isinstance(target, Task):
        if not callable(target):
            raise TypeError(f"{path}: {type(target).__name__} is neither a task nor a callable that makes one")
        target = target(**options)
    elif options:
        raise TypeError(f"{path} is a finished task object and takes no options, got {sorted(options)}")
    missing = [
        name for name in ("size", "problem", "score", "well_formed") if not callable(getattr(target, name, None))
    ]
    if missing:
        raise TypeError(
            f"{path}: {type(target).__name__} lacks {missing}; a task has name, size, problem, score and well_formed"
        )
    return target


def checked_score(score: Callable[[str, Problem], float], text: str, problem: Problem) -> float:
    """score(text, problem) as a float. Raises RewardError, naming the problem, if it raises or is not finite."""
    try:
        value = float(score(text, problem))
    except Exception as err:  # whatever a user's reward raises must name the problem it raised on
        raise RewardError(
            f"reward raised on problem {problem.problem_id!r} for {text!r}: {type(err).__name__}: {err}"
        ) from err
    if not math.isfinite(value):
        raise RewardError(
            f"reward is {value} on problem {problem.problem_id!r} for {text!r}; it must be a finite number"
        )
    return value
