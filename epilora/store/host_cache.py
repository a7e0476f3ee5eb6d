"""Verified tensors in memory: least recently used go first, and concurrent readers of one version read it once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

Arrays = dict[str, np.ndarray]


class HostCache:
    """At most `limit` bytes. Arrays are read-only from the moment they are kept. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Arrays] = OrderedDict()
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Event] = {}
        self.bytes = self.hits = self.reads = self.read_bytes = 0

    def get(self, digest: str, read: Callable[[], Arrays]) -> Arrays:
        """The arrays of a version, from memory or by `read` (called once however many ask). Raises what `read` does."""
        while True:
            with self._lock:
                if digest in self._kept:
                    self._kept.move_to_end(digest)
                    self.hits += 1
                    return dict(self._kept[digest])
                event = self._reading.get(digest)
                if event is None:
                    event = self._reading[digest] = threading.Event()
                    break
            event.wait()
            if self._limit == 0:
                break
        try:
            arrays = read()
            with self._lock:
                self.reads += 1
                self.read_bytes += sum(array.nbytes for array in arrays.values())
            self.keep(digest, arrays)
            return dict(arrays)
        finally:
            with self._lock:
                self._reading.pop(digest, None)
            event.set()

    def keep(self, digest: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays nobody else writes to; larger ones than the limit are not kept."""
        size = sum(array.nbytes for array in arrays.values())
        if size > self._limit:
            return
        kept = dict(arrays)
        for array in kept.values():
            array.flags.writeable = False
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = kept
                self.bytes += size
            while self.bytes > self._limit:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= sum(array.nbytes for array in dropped.values())

    def drop(self, digests: Iterable[str]) -> None:
        """Forget these."""
        with self._lock:
            for digest in digests:
                dropped = self._kept.pop(digest, None)
                self.bytes -= sum(array.nbytes for array in (dropped or {}).values())
