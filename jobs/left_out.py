"""Modules that the processes of a machine without a GPU do without: they start sooner and hold less memory.

Ray Serve imports pandas and pyarrow wherever they are installed, and torch's compiler imports Triton; on a CPU none is used,
and both go without them if they are absent. A job that starts Ray itself names `leave_out` as its workers' set-up hook; a cluster
that others started is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED_ON_CPU = ("pandas", "pyarrow", "triton")


def leave_out() -> None:
    """From now on an import of these modules raises ModuleNotFoundError here, as if they were not installed."""
    for name in UNUSED_ON_CPU:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: how Python marks a module as absent


@contextmanager
def left_out() -> Iterator[None]:
    """`leave_out` for the imports in this block only."""
    hidden = [name for name in UNUSED_ON_CPU if name not in sys.modules]
    leave_out()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
