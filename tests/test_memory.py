"""Accounting of shared mappings, against mappings made here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epilora.memory import descendants, mapping_report, tree_pss_bytes, tree_rss_bytes

MAPPER = """
import mmap, sys
f = open(sys.argv[1], "r+b")
m = mmap.mmap(f.fileno(), 0, {flags})
touched = sum(m[i] for i in range(0, len(m), 4096))
{write}
print("mapped", flush=True)
sys.stdin.read()
"""
READ_ONLY = MAPPER.format(flags="prot=mmap.PROT_READ, flags=mmap.MAP_SHARED", write="")
PRIVATE_WRITER = MAPPER.format(
    flags="prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE",
    write="m[:] = bytes(len(m))",
)


def mapped_by(code: str, path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "mapped\n"
    return process


def test_two_readers_share_one_copy_and_a_private_writer_makes_a_second(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"epilora-test-{os.getpid()}"
    path.write_bytes(os.urandom(4 << 20))
    processes = []
    try:
        processes = [mapped_by(READ_ONLY, path), mapped_by(READ_ONLY, path)]
        report = mapping_report(path)
        assert {m.pid for m in report.mappings} == {p.pid for p in processes}
        assert report.read_only
        assert abs(report.copies - 1.0) < 0.01
        processes.append(mapped_by(PRIVATE_WRITER, path))
        report = mapping_report(path)
        assert not report.read_only
        assert abs(report.copies - 2.0) < 0.01
    finally:
        for process in processes:
            process.communicate()
        path.unlink()


def test_each_mapping_has_its_own_sizes_and_permissions(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"epilora-test-private-{os.getpid()}"
    path.write_bytes(os.urandom(4 << 20))
    processes = []
    try:
        processes = [mapped_by(READ_ONLY, path), mapped_by(PRIVATE_WRITER, path)]
        reader, writer = (next(m for m in mapping_report(path).mappings if m.pid == p.pid) for p in processes)
        assert reader.rss_bytes == writer.rss_bytes == reader.pss_bytes == writer.pss_bytes == 4 << 20
        assert (reader.permissions, writer.permissions) == ("r--s", "rw-p")
    finally:
        for process in processes:
            process.communicate()
        path.unlink()


def resident(pid: int) -> int:
    """VmRSS, which is exact enough to tell resident from virtual bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# Named with a bracket and a space, as any process may be; holds 64 MiB that a child forked from it shares.
FAMILY = """
import os, sys
held = bytearray(os.urandom(1 << 20) * 64)
child = os.fork()
with open("/proc/self/comm", "w") as name:
    name.write("a) b (c" if child else "d) 1 2")
if child:
    print(child, flush=True)
    sys.stdin.read()
    os.waitpid(child, 0)
else:
    sys.stdin.read()
"""


def test_a_process_tree_is_found_and_added_up() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert set(descendants(parent.pid)) == {parent.pid, child}
        assert {parent.pid, child} < set(descendants(os.getpid()))
        rss, pss = tree_rss_bytes(parent.pid), tree_pss_bytes(parent.pid)
        assert rss == pytest.approx(resident(parent.pid) + resident(child), rel=0.05)
        assert rss > 128 << 20  # the shared pages count once in each
        assert 64 << 20 < pss < rss - (50 << 20)  # and once in all
    finally:
        parent.communicate()
