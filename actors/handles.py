"""A part behind one face, whether it is a Ray actor or an object in this process: every method is awaited.

Loops and jobs are written against these faces, so they run in tests on plain objects and in production on actors.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


class RemotePart:
    """`await part.method(...)` calls the actor's method and returns its value; Ray unwraps and raises its errors."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await method.remote(*args, **kwargs)

        return call


class LocalPart:
    """The same face over an object in this process; plain methods run in a thread so that nothing blocks the loop."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._part, name)
        if inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call
