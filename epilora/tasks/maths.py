"""Mathematical answers checked by math-verify (https://github.com/huggingface/Math-Verify): equal values, however
written.
"""

from __future__ import annotations

from .base import Problem


def math_verify_score(text: str, problem: Problem) -> float:
    """1.0 if the completion's answer (boxed, LaTeX or a plain expression) equals `problem.answer`, else 0.0.

    Usable as a reward by import path `epilora.tasks.maths:math_verify_score`. Raises ValueError if the gold answer
    itself cannot be parsed. Parsing runs without math-verify's signal timeouts, which work in a main thread only.
    """
    from math_verify import parse, verify

    gold = parse(problem.answer, parsing_timeout=None) or parse(f"${problem.answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"problem {problem.problem_id!r}: the answer {problem.answer!r} is no expression math-verify can parse"
        )
    return 1.0 if verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None) else 0.0


def math_well_formed(text: str) -> bool:
    """Whether math-verify finds any expression in the completion."""
    from math_verify import parse

    return bool(parse(text, parsing_timeout=None))
