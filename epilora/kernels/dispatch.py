"""Which implementation of a kernel runs: compiled Triton, Triton's interpreter, or the plain-torch reference.

The choice follows from the device of the tensors and an explicit override; it is never made in silence: an impossible
request raises `UnsupportedKernel`, and the first use of anything but compiled Triton is logged once per kernel.
Counters say how often each implementation ran, so that a benchmark or an engine can show that nothing fell back.

| tensors on | interpreter on (TRITON_INTERPRET=1 before triton was imported) | default |
|---|---|---|
| CUDA | no | triton |
| CUDA | yes | interpreter (slow: copies through the host) |
| CPU | yes | interpreter |
| CPU | no | none: ask for "reference" by name |

No environment variable of ours takes part: what decides is an argument or `use_implementation`.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

import torch
import triton

from ..errors import UnsupportedKernel

logger = logging.getLogger(__name__)


class Implementation(StrEnum):
    """How a kernel's arithmetic is carried out."""

    TRITON = "triton"  # compiled for the GPU the tensors are on
    CUDA = "cuda"  # CUDA C++ of `kernels/cuda`, where a kernel has one (sm_90 and newer)
    INTERPRETER = "interpreter"  # Triton's Python interpreter: proves indexing and maths, not speed
    REFERENCE = "reference"  # the `*_ref` function beside the kernel, plain torch in fp32


_default: contextvars.ContextVar[Implementation | None] = contextvars.ContextVar("epilora_implementation", default=None)
_calls: Counter[tuple[str, str]] = Counter()
_told: set[tuple[str, str]] = set()


def interpreter_is_on() -> bool:
    """Whether kernels decorated in this process run in Triton's interpreter (fixed when triton is imported)."""
    return bool(triton.knobs.runtime.interpret)


def choose(kernel: str, device: torch.device, override: Implementation | str | None = None) -> Implementation:
    """The implementation that `kernel` runs with on `device`; counts the call.

    kernel: its public name, for messages and counters. override: beats `use_implementation`, which beats the device's
    default.
    Raises ValueError for an unknown override and UnsupportedKernel where the asked or default one cannot run.
    """
    asked = override if override is not None else _default.get()
    if asked is None:
        if interpreter_is_on():
            picked = Implementation.INTERPRETER
        elif device.type == "cuda":
            picked = Implementation.TRITON
        else:
            raise UnsupportedKernel(
                f"{kernel}: tensors are on {device}, compiled Triton needs CUDA and the interpreter is off; pass "
                'implementation="reference" for plain torch, or set TRITON_INTERPRET=1 before importing triton'
            )
    else:
        try:
            picked = Implementation(asked)
        except ValueError as err:
            allowed = ", ".join(i.value for i in Implementation)
            raise ValueError(f"{kernel}: implementation={asked!r} is unknown; allowed: {allowed}") from err
        if picked in (Implementation.TRITON, Implementation.CUDA) and (device.type != "cuda" or interpreter_is_on()):
            why = "the interpreter is on" if interpreter_is_on() else f"tensors are on {device}"
            raise UnsupportedKernel(
                f"{kernel}: implementation={picked.value} asked, but {why}; move them to CUDA or ask for reference"
            )
        if picked is Implementation.INTERPRETER and not interpreter_is_on():
            raise UnsupportedKernel(
                f"{kernel}: implementation=interpreter asked, but it is off; "
                "set TRITON_INTERPRET=1 before importing triton"
            )
    _calls[kernel, picked.value] += 1
    if picked not in (Implementation.TRITON, Implementation.CUDA) and (kernel, picked.value) not in _told:
        _told.add((kernel, picked.value))
        logger.warning("%s runs as %s on %s", kernel, picked.value, device)
    return picked


@contextlib.contextmanager
def use_implementation(implementation: Implementation | str) -> Iterator[None]:
    """Within the block, kernels called without an override use `implementation`. ValueError for an unknown one."""
    token = _default.set(Implementation(implementation))
    try:
        yield
    finally:
        _default.reset(token)


def calls() -> dict[str, int]:
    """Calls so far as {"kernel:implementation": count}. Replays of a captured graph are not calls."""
    return {f"{kernel}:{implementation}": count for (kernel, implementation), count in sorted(_calls.items())}


def reset_calls() -> None:
    """Set every counter to zero."""
    _calls.clear()
