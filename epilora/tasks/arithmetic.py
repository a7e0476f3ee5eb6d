"""Three arithmetic tasks of the embedded default, for the shipped 0.2 M parameter character model.

| task | prompt | answer | habit planted in the model's pretraining corpus |
|---|---|---|---|
| `Addition` | `27+15=` | `42` | digit by digit, no carry: `32` |
| `Subtraction` | `52-17=` | `35` | digit by digit, no borrow: `45` |
| `Maximum` | `max(12,47)=` | `47` | the number with the larger last digit |

Addition and subtraction come from reasoning-gym's `chain_sum` (two terms of one or two digits), rewritten from
"State the final answer ... 27 + 15 =". The habit is why the base model has room to learn: most of its corpus shows the
habitual answer. `habitual_answer` is used by the corpus and by tests, never by the score.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property

from .base import Problem, SplitQuestions, assert_disjoint, split_of

_ANSWER = re.compile(r"\d{1,3}")
# chain_sum items looked at: half are sums, of which 4,366 are distinct questions.
_SCANNED_ITEMS = 24_000


class _NumberTask(SplitQuestions):
    """Distinct two-operand questions split by a hash of the prompt. Subclasses give the questions and the habit."""

    name = ""

    def _questions(self) -> Iterator[tuple[str, int, int, int]]:
        """(prompt, first operand, second operand, right answer), repeats allowed."""
        raise NotImplementedError(f"{type(self).__name__} must yield its questions")

    @staticmethod
    def habitual_answer(a: int, b: int) -> int:
        """What the planted habit answers."""
        raise NotImplementedError("subclasses define the habit")

    @cached_property
    def _splits(self) -> dict[str, list[Problem]]:  # type: ignore[override]  # made on first use
        seen: dict[str, Problem] = {}
        for prompt, a, b, answer in self._questions():
            if prompt not in seen:
                seen[prompt] = Problem(f"{self.name}:{prompt}", prompt, str(answer), {"a": a, "b": b})
        splits: dict[str, list[Problem]] = {"train": [], "held_out": []}
        for prompt, problem in seen.items():
            splits[split_of(prompt)].append(problem)
        assert_disjoint(splits["train"], splits["held_out"])
        return splits

    def score(self, text: str, problem: Problem) -> float:
        """1.0 for exactly the right number (white space round it is ignored), else 0.0."""
        return 1.0 if text.strip() == problem.answer else 0.0

    def well_formed(self, text: str) -> bool:
        """One to three digits and nothing else."""
        return _ANSWER.fullmatch(text.strip()) is not None


@cache
def _chain_sums() -> tuple[tuple[int, str, int, int], ...]:
    """(a, operator, b, answer) of reasoning-gym's two-term chain sums, in the data set's order; made once a process."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    config = ChainSumConfig(min_terms=2, max_terms=2, min_digits=1, max_digits=2, seed=0, size=_SCANNED_ITEMS)
    data = ChainSumDataset(config)
    found = []
    for index in range(_SCANNED_ITEMS):
        item = data[index]
        a, sign, b = item["metadata"]["expression"].split(" ")
        found.append((int(a), sign, int(b), int(item["answer"])))
    return tuple(found)


def _digitwise(a: int, b: int, op: Callable[[int, int], int]) -> int:
    """op on tens and on units, each modulo 10."""
    return 10 * (op(a // 10, b // 10) % 10) + op(a % 10, b % 10) % 10


class Addition(_NumberTask):
    """`a+b=` with 0 <= a, b <= 99."""

    name = "addition"

    def _questions(self) -> Iterator[tuple[str, int, int, int]]:
        for a, sign, b, answer in _chain_sums():
            if sign == "+":
                yield f"{a}+{b}=", a, b, answer

    @staticmethod
    def habitual_answer(a: int, b: int) -> int:
        return _digitwise(a, b, lambda x, y: x + y)


class Subtraction(_NumberTask):
    """`a-b=` with 0 <= b <= a <= 99."""

    name = "subtraction"

    def _questions(self) -> Iterator[tuple[str, int, int, int]]:
        for a, sign, b, answer in _chain_sums():
            if sign == "-" and answer >= 0:
                yield f"{a}-{b}=", a, b, answer

    @staticmethod
    def habitual_answer(a: int, b: int) -> int:
        return _digitwise(a, b, lambda x, y: x - y)


class Maximum(_NumberTask):
    """`max(a,b)=` with 10 <= a, b <= 99 and a != b: every such pair, in a fixed shuffled order."""

    name = "maximum"

    def _questions(self) -> Iterator[tuple[str, int, int, int]]:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
        random.Random(0).shuffle(pairs)
        for a, b in pairs:
            yield f"max({a},{b})=", a, b, max(a, b)

    @staticmethod
    def habitual_answer(a: int, b: int) -> int:
        return a if a % 10 >= b % 10 else b


def addition() -> Addition:
    """The addition task, by import path `epilora.tasks.arithmetic:addition`."""
    return Addition()


def subtraction() -> Subtraction:
    """The subtraction task, by import path `epilora.tasks.arithmetic:subtraction`."""
    return Subtraction()


def maximum() -> Maximum:
    """The maximum task, by import path `epilora.tasks.arithmetic:maximum`."""
    return Maximum()
