"""Memory as the kernel accounts for it: who maps a file, how often its pages exist, what a process tree holds. Linux only.

`/proc/PID/smaps` gives, per mapping, Pss (a page mapped by n processes counts 1/n in each), Rss and permissions;
proportional set sizes of one file over all processes add up to the physical bytes of its mapped pages.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+\s*(.*)$")


@dataclass(frozen=True)
class Mapping:
    """One process's mapping of a file. Sizes in bytes; permissions such as `r--s` (read-only, shared)."""

    pid: int
    permissions: str
    pss_bytes: int
    rss_bytes: int


@dataclass(frozen=True)
class MappingReport:
    """All mappings of one file on this machine.

    copies: physical bytes of the mapped pages over the file's size; 1.0 means that every page exists once.
    """

    path: str
    file_bytes: int
    mappings: tuple[Mapping, ...]

    @property
    def copies(self) -> float:
        return sum(m.pss_bytes for m in self.mappings) / self.file_bytes

    @property
    def read_only(self) -> bool:
        """No process can write through its mapping."""
        return all("w" not in m.permissions for m in self.mappings)


def mapping_report(path: str | Path) -> MappingReport:
    """Who maps `path`, over all readable processes. Raises FileNotFoundError if there is no such file."""
    size = os.stat(path).st_size
    name = str(path)
    found: list[Mapping] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if name not in (entry / "maps").read_text():
                continue
            text = (entry / "smaps").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process ended, or is not ours to read
        found += _file_mappings(int(entry.name), text, name)
    return MappingReport(name, size, tuple(found))


def _file_mappings(pid: int, smaps: str, name: str) -> list[Mapping]:
    result: list[Mapping] = []
    permissions = ""
    sizes: dict[str, int] | None = None
    for line in smaps.splitlines():
        header = _HEADER.match(line)
        if header:
            if sizes is not None:
                result.append(_mapping(pid, permissions, sizes))
            sizes = {} if header.group(2) == name else None
            permissions = header.group(1)
        elif sizes is not None and line.endswith("kB"):
            key, value = line.split(":")
            sizes[key] = int(value.split()[0]) * 1024
    if sizes is not None:
        result.append(_mapping(pid, permissions, sizes))
    return result


def _mapping(pid: int, permissions: str, sizes: dict[str, int]) -> Mapping:
    return Mapping(pid, permissions, sizes["Pss"], sizes["Rss"])


def descendants(root: int) -> list[int]:
    """`root` and every process below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    tree, todo = [], [root]
    while todo:
        pid = todo.pop()
        tree.append(pid)
        todo += parents.get(pid, [])
    return tree


def tree_rss_bytes(root: int) -> int:
    """Resident bytes of `root` and everything below it, added up (shared pages count once per process)."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in descendants(root):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def tree_pss_bytes(root: int) -> int:
    """Proportional set size of `root` and everything below it: shared pages count once in the sum."""
    total = 0
    for pid in descendants(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(match.group(1)) * 1024 if match else 0
    return total
