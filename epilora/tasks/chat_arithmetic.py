"""Arithmetic for a pretrained instruct model (SmolLM2): chain_sum with two one-digit terms, asked as a chat turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .reasoning import ReasoningGymTask


def _question(item: Mapping[str, Any]) -> str:
    return f"What is {item['metadata']['expression']}?"


def chain_sum(size: int = 4000, seed: int = 0, max_digits: int = 1) -> ReasoningGymTask:
    """`What is 7 - 4?` in ChatML; the last number of the reply is its answer. All 200 such questions, less repeats.

    max_digits: of a term. A question is held out or not whatever this is, so an adapter trained on one digit can be asked
    thousands of questions that it has not seen.
    """
    return ReasoningGymTask(
        "chain_sum",
        size=size,
        seed=seed,
        template="chatml",
        instruction=" Answer with the number only.",
        extract="last_number",
        held_out_fraction=0.25,
        question=_question,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=max_digits,
    )
