"""What a step must not train on: problems whose prompt does not fit, answers whose reward raised or is not a number.

Each is reported with its place (log and `left_out.jsonl` in the run's folder) and counted (`rollout/...` metrics); its whole group is
left out. More than `rl.left_out_share` of a step's groups stop the job: 0, the default, stops at the first.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from epilora.errors import EpiloraError

logger = logging.getLogger(__name__)
KINDS = ("prompt_too_long", "reward_failed")


class Screening:
    """Of one run. folder: where `left_out.jsonl` grows."""

    def __init__(self, folder: Path, allowed_share: float) -> None:
        self._path = folder / "left_out.jsonl"
        self._allowed_share = allowed_share

    def of_step(self, step: int, groups: int) -> StepScreening:
        """For step number `step` with `groups` groups."""
        return StepScreening(self._path, self._allowed_share, step, groups)


class StepScreening:
    """Counts what one step leaves out."""

    def __init__(self, path: Path, allowed_share: float, step: int, groups: int) -> None:
        self._path, self._allowed_share, self._step, self._groups = path, allowed_share, step, groups
        self.counts: Counter[str] = Counter()

    def leave_out(self, kind: str, problem_id: str, why: Exception | str) -> None:
        """Report one group. Raises EpiloraError, from `why` if it is an exception, when the step loses more than allowed."""
        assert kind in KINDS, kind
        self.counts[kind] += 1
        record = {"step": self._step, "kind": kind, "problem": problem_id, "why": str(why)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        logger.warning("step %d leaves out problem %s (%s): %s", self._step, problem_id, kind, why)
        lost = sum(self.counts.values())
        if lost > self._allowed_share * self._groups or lost == self._groups:
            cause = why if isinstance(why, Exception) else None
            raise EpiloraError(
                f"step {self._step}: {lost} of {self._groups} groups cannot be trained on, allowed "
                f"rl.left_out_share={self._allowed_share:g}; the last: problem {problem_id!r} ({kind}): {why}. "
                f"All are listed in {self._path}"
            ) from cause

    def metrics(self) -> dict[str, float]:
        """Groups left out, by kind."""
        return {f"rollout/{kind}_groups": float(self.counts[kind]) for kind in KINDS}
