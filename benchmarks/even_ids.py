"""A task for models of random weights: the reward of a text is the share of even token ids in it.

It varies within every group, so every group trains; nothing is to be learnt about a language. The texts are those of
`benchmarks.random_model`'s tokenizer.
"""

from __future__ import annotations

import random
import re

from epilora.tasks.base import Problem

_WORD = re.compile(r"t(\d+)")


class EvenIds:
    """See `epilora.tasks.base.Task`."""

    name = "even_ids"

    def __init__(self, vocab_size: int, prompt_tokens: int, problems: int = 100_000) -> None:
        self._vocab_size, self._prompt_tokens, self._problems = vocab_size, prompt_tokens, problems

    def size(self, split: str) -> int:
        return self._problems

    def problem(self, split: str, index: int) -> Problem:
        """`prompt_tokens` random ids, another list for every index."""
        index %= self._problems
        draw = random.Random(f"{split}/{index}")
        words = " ".join(f"t{draw.randrange(3, self._vocab_size)}" for _ in range(self._prompt_tokens))
        return Problem(f"{split}-{index}", words, "")

    def score(self, text: str, problem: Problem) -> float:
        """0 for a text without tokens."""
        ids = [int(found) for found in _WORD.findall(text)]
        return sum(i % 2 == 0 for i in ids) / len(ids) if ids else 0.0

    def well_formed(self, text: str) -> bool:
        return bool(_WORD.search(text))
