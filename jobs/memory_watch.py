"""The peak memory of this process and everything below it, sampled while a job runs."""

from __future__ import annotations

import os
import threading
import time

from epilora.memory import tree_pss_bytes, tree_rss_bytes


class MemoryWatch:
    """Samples in a thread: resident bytes every `every_s`, proportional set sizes (dearer to read) every tenth time."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.samples: list[tuple[float, int]] = []
        self.peak_rss_bytes = 0
        self.peak_pss_bytes = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pid, count, start = os.getpid(), 0, time.monotonic()
        while not self._stop.wait(self._every_s):
            rss = tree_rss_bytes(pid)
            self.samples.append((time.monotonic() - start, rss))
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
            if count % 10 == 0:
                self.peak_pss_bytes = max(self.peak_pss_bytes, tree_pss_bytes(pid))
            count += 1
