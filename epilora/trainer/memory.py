"""This process's memory: private bytes now and at their peak, and the mapped base. Read from /proc/self (Linux).

Pages of the mapped base are counted as shared even while no other process maps them: they are the engine's, not a copy.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from pathlib import Path

_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_large_blocks(threshold_bytes: int = 1 << 20) -> None:
    """Make malloc return blocks of at least `threshold_bytes` to the system as soon as they are freed, for the process.

    By default glibc raises its threshold to 32 MiB and keeps a fragmented heap: a 135 M parameter trainer then grew to
    1.3 GB where it needs half. Costs page faults. Raises OSError if malloc refuses.
    """
    libc = ctypes.CDLL(None)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        if not libc.mallopt(option, threshold_bytes):
            raise OSError(f"mallopt({option}, {threshold_bytes}) was refused")


def _kib(line: str) -> int:
    return int(line.split()[1]) * _KIB


def mapping_bytes(paths: Iterable[str]) -> tuple[int, int]:
    """(resident, counted as private) bytes of the mappings of `paths` in this process."""
    wanted, resident, private, inside = set(paths), 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
            inside = line.split(None, 5)[-1].removesuffix(" (deleted)") in wanted
        elif inside and line.startswith("Rss:"):
            resident += _kib(line)
        elif inside and line.startswith(("Private_Clean:", "Private_Dirty:")):
            private += _kib(line)
    return resident, private


def private_bytes(mapped_paths: Iterable[str]) -> int:
    """Private_Clean + Private_Dirty of this process, without the pages of `mapped_paths`."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    total = sum(_kib(line) for line in rollup if line.startswith(("Private_Clean:", "Private_Dirty:")))
    return total - mapping_bytes(mapped_paths)[1]


def anonymous_bytes() -> int:
    """Resident pages that no file backs: cheap to read, and all that grows while a trainer computes."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE


class PeakMeter:
    """Highest `anonymous_bytes` seen while running; sampled every `interval_s` by a thread, and at both ends."""

    def __init__(self, interval_s: float = 0.01) -> None:
        self.peak_bytes = anonymous_bytes()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> None:
        """Look now."""
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.sample()

    def __enter__(self) -> PeakMeter:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="peak-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None, "left before it was entered"
        self._thread.join()
        self.sample()
