"""The shared file: same bytes, one copy, read-only; no vLLM needed."""

import os
import subprocess
import sys

import pytest
import torch

from epilora.errors import MemoryInfeasible
from epilora.memory import mapping_report
from epilora.plugin.sharing import PAGE_BYTES, SharedFile, SharedTensor, drop_pages, remove_abandoned

SHM = "/dev/shm"


@pytest.fixture
def path():
    name = f"{SHM}/epilora-test-{os.getpid()}.weights"
    yield name
    if os.path.exists(name):
        os.unlink(name)


def test_bytes_offsets_and_entries(path):
    codes = (torch.randn(5, 7) * 50).to(torch.float8_e4m3fn)
    table = torch.randn(64, 3)
    shared = SharedFile(path, [SharedTensor(codes), SharedTensor(table, rows=60)])
    assert shared.offsets == [0, PAGE_BYTES]
    assert os.path.getsize(path) == 2 * PAGE_BYTES
    assert torch.equal(shared.views[0].view(torch.uint8), codes.view(torch.uint8))
    entry = shared.entry(1, rows=60)
    assert (entry.shape, entry.stride, entry.dtype) == ((60, 3), (3, 1), "float32")
    assert (entry.location.path, entry.location.offset_bytes) == (path, PAGE_BYTES)
    raw = torch.from_file(path, size=2 * PAGE_BYTES, dtype=torch.uint8)
    assert torch.equal(raw[PAGE_BYTES : PAGE_BYTES + 60 * 12].view(torch.float32).view(60, 3), table[:60])
    mode = os.stat(path).st_mode & 0o777
    assert mode == 0o600
    shared.unlink()
    shared.unlink()
    assert not os.path.exists(path)
    assert torch.equal(shared.views[1], table)  # the mapping outlives the name


def test_the_kernel_lists_its_mapping_under_its_name(path):
    shared = SharedFile(path, [SharedTensor(torch.ones(4))])
    assert shared.views[0].sum() == 4  # its page is there
    report = mapping_report(path)
    assert ([m.pid for m in report.mappings], report.copies, report.read_only) == ([os.getpid()], 1.0, True)
    shared.unlink()


def test_a_write_faults(path):
    program = (
        "import torch\n"
        "from epilora.plugin.sharing import SharedFile, SharedTensor\n"
        f"shared = SharedFile({path!r}, [SharedTensor(torch.ones(4))])\n"
        "print(shared.views[0].sum().item(), flush=True)\n"
        "shared.views[0][0] = 2.0\n"
        "print('written', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "4.0\n"
    assert done.returncode == -11  # SIGSEGV


def test_too_large_is_refused_with_the_numbers(path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryInfeasible, match=rf"{PAGE_BYTES} bytes.*free"):
        SharedFile(path, [SharedTensor(torch.ones(3))])
    assert not os.path.exists(path)


def test_a_failed_copy_leaves_no_file(path):
    with pytest.raises(ValueError, match="must not be 0"):
        SharedFile(path, [SharedTensor(torch.ones(3)), SharedTensor(torch.empty(0))])
    assert not os.path.exists(path)


def test_dropped_pages_are_zero_and_leave_memory():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE_BYTES

    tensor = torch.ones(8 << 20)  # 32 MiB
    before = resident()
    released = drop_pages(tensor, keep_fraction=0.25)
    assert 24 << 20 >= released > (24 << 20) - 2 * PAGE_BYTES
    assert before - resident() > 20 << 20
    assert tensor[: 2 << 20].sum() == 2 << 20
    assert tensor[(2 << 20) + 2048 : -2048].any().item() is False
    tensor.fill_(3.0)
    assert tensor.sum() == 3 * (8 << 20)


def test_only_files_of_killed_engines_are_removed(tmp_path):
    program = (
        "import os, signal, sys, torch\n"
        "from epilora.plugin.sharing import SharedFile, SharedTensor\n"
        "shared = SharedFile(sys.argv[1], [SharedTensor(torch.ones(4))])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead, used = (str(tmp_path / f"epilora-base-{name}.weights") for name in ("dead", "used"))
    subprocess.run([sys.executable, "-c", program, dead], check=False)
    alive = SharedFile(used, [SharedTensor(torch.ones(4))])
    (tmp_path / "someone-elses.weights").write_bytes(b"x")
    assert remove_abandoned(str(tmp_path), "epilora-base-") == [dead]
    assert sorted(os.listdir(tmp_path)) == ["epilora-base-used.weights", "someone-elses.weights"]
    alive.unlink()


def test_a_name_that_is_taken_is_not_touched(tmp_path):
    taken = tmp_path / "epilora-base-taken.weights"
    taken.write_bytes(b"x")
    with pytest.raises(FileExistsError):
        SharedFile(str(taken), [SharedTensor(torch.ones(4))])
    assert os.listdir(tmp_path) == [taken.name]
    assert taken.read_bytes() == b"x"
