"""Calls that wait at the same time run as one turn; each key once a turn; errors reach whom they belong to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.together import Together


class Runner:
    """Runs turns; the first blocks until `go` is set. A request that is an exception comes back as its own result."""

    def __init__(self) -> None:
        self.turns: list[list[object]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, requests):
        self.turns.append(list(requests))
        self.entered.set()
        assert self.go.wait(10)
        if "break" in requests:
            raise RuntimeError("the trainer broke")
        return [r if isinstance(r, Exception) else f"{r} done" for r in requests]


def waiting(together: Together, count: int) -> None:
    for _ in range(1000):
        if len(together._waiting) == count:
            return
        time.sleep(0.005)
    raise AssertionError(f"{len(together._waiting)} wait, expected {count}")


def test_what_waits_runs_as_one_turn_and_each_key_once() -> None:
    run = Runner()
    together = Together(run, ThreadPoolExecutor(1))
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(together.submit, "a", "a1")
        assert run.entered.wait(10)
        later = []
        for count, (key, request) in enumerate([("b", "b1"), ("a", "a2"), ("b", "b2"), ("c", ValueError("bad"))], 1):
            later.append(pool.submit(together.submit, key, request))
            waiting(together, count)
        run.go.set()
        assert first.result(10) == "a1 done"
        assert [f.result(10) for f in later[:3]] == ["b1 done", "a2 done", "b2 done"]
        with pytest.raises(ValueError, match="bad"):
            later[3].result(10)
    assert [[str(r) for r in turn] for turn in run.turns] == [["a1"], ["b1", "a2", "bad"], ["b2"]]


def test_a_turn_that_breaks_fails_all_of_it_and_the_next_turn_runs() -> None:
    run = Runner()
    run.go.set()
    together = Together(run, ThreadPoolExecutor(1))
    with pytest.raises(RuntimeError, match="broke"):
        together.submit("a", "break")
    assert together.submit("a", "again") == "again done"
