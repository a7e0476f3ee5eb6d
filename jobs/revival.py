"""Training that outlives the death of its engine, trainer or store: wait until the pool has brought them back, and go on.

What is repeated is the step that was under way: the loop goes on at its last checkpoint, in a deterministic run bit for bit.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError

from epilora.errors import EngineDead, TrainerDead
from jobs.loop import RLLoop

MOST_FRUITLESS = 3  # deaths in a row without a completed step between them: the step itself may be what kills

logger = logging.getLogger(__name__)


def means_death(err: BaseException) -> bool:
    """Whether a part is gone or cannot be reached (an error that a living part raised is not that)."""
    return isinstance(err, EngineDead | TrainerDead) or (
        isinstance(err, RayError) and not isinstance(err, RayTaskError)
    )


async def train_through(loop: RLLoop, system: Any) -> int:
    """Run the loop to its end; how often it was taken up again.

    system: has `revive()` and then `engine`, `trainer`, `store` (jobs.system.System). Raises what is not a death, and the death of a
    part after MOST_FRUITLESS of them without a completed step.
    """
    revivals = fruitless = 0
    started = True
    reached = loop.step
    while True:
        try:
            if not started:
                await system.revive()
                await loop.take_up_again(engine=system.engine, trainer=system.trainer, store=system.store)
                started = True
            await loop.run()
            return revivals
        except Exception as err:
            if not means_death(err):
                raise
            fruitless = 0 if loop.step > reached else fruitless + 1
            if fruitless >= MOST_FRUITLESS:
                raise
            reached, started = max(reached, loop.step), False
            revivals += 1
            logger.warning("a part died at step %d (%s); waiting for its successor", loop.step, type(err).__name__)
