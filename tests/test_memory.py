"""Accounting of shared mappings, against mappings made here."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_process_tree_is_found_and_added_up() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"up\n"
        assert child.pid in descendants(os.getpid())
        own = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        total = tree_rss_bytes(os.getpid())
        assert total > own * 0.9 + 4 * 2**20
        assert 0 < tree_pss_bytes(os.getpid()) <= total
    finally:
        child.communicate()
