"""Exceptions for states a caller can handle. Plain misuse raises ValueError or TypeError instead."""

from __future__ import annotations


class EpiloraError(Exception):
    """Base of all states below."""


class AdapterRejected(EpiloraError):
    """An adapter that cannot be served rightly: names the module, what it has and what it should have."""


class AdapterNotFound(EpiloraError):
    """No adapter or version of that name; the message lists the names that exist."""


class NoFreeSlot(EpiloraError):
    """Every adapter slot holds a version that a live request or a pin needs. Nothing is evicted."""


class BaseMismatch(EpiloraError):
    """An adapter was trained on other base codes than the engine holds."""


class PromptTooLong(EpiloraError):
    """Prompt plus reply do not fit the engine's context."""


class Unauthorized(EpiloraError):
    """Missing or unknown API key."""


class PlacementInfeasible(EpiloraError):
    """A placement cannot be scheduled; the message prints what was asked against what is free."""


class MemoryInfeasible(EpiloraError):
    """The planner's arithmetic says that the parts do not fit; the message prints it."""


class UnsupportedKernel(EpiloraError):
    """No kernel serves this combination; the message says which one to use instead."""


class EngineDead(EpiloraError):
    """The engine's step loop failed or was closed; the message carries the first error. Start a new engine."""


class TrainerDead(EpiloraError):
    """A trainer lost one of its ranks; the message says which and how. Start a new one and resume from a checkpoint."""
