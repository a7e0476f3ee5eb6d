"""Calls that arrive while another runs are run as one: jobs on a shared trainer share its batches.

Everything runs on one worker thread, in order. A call that finds the worker busy waits with others; the worker's next turn takes
all that wait, each key (a session) once, in the order of arrival: jobs advance in step whatever the number of calls one of them
has queued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Call:
    key: Hashable
    request: Any
    future: Future[Any] = field(default_factory=Future)


class Together:
    """run: requests -> one result or exception each, in order. worker: an executor of one thread."""

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], worker: ThreadPoolExecutor) -> None:
        self._run = run
        self._worker = worker
        self._waiting: list[_Call] = []
        self._guard = threading.Lock()

    def submit(self, key: Hashable, request: Any) -> Any:
        """The request's result once it ran, in whatever company. Raises what stands in the result's place, and to all of a
        turn what `run` itself raises."""
        call = _Call(key, request)
        with self._guard:
            self._waiting.append(call)
        self._worker.submit(self._turn)  # one turn a call is enough for all: a turn that finds none does nothing
        return call.future.result()

    def _turn(self) -> None:
        with self._guard:
            turn: dict[Hashable, _Call] = {}
            for call in self._waiting:
                turn.setdefault(call.key, call)
            calls = list(turn.values())
            self._waiting = [call for call in self._waiting if turn[call.key] is not call]
        if not calls:
            return
        try:
            results = self._run([call.request for call in calls])
        except BaseException as err:
            for call in calls:
                call.future.set_exception(err)
            return
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                call.future.set_exception(result)
            else:
                call.future.set_result(result)
