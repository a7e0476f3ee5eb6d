"""How often the base exists, told from the kernel's accounts or, on a GPU, from the trainer's."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from epilora.quant.manifest import Location, Transport
from jobs.quickstart import base_sharing


def test_a_file_in_shared_memory_is_counted_by_its_mappings(tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        assert sum(view[:: mmap.PAGESIZE]) == 0  # every page is mapped now
        found = base_sharing(Location(Transport.SHM, str(path)), {})
        view.close()
    assert found == {
        "base_copies": 1.0, "base_mappings": 1, "base_read_only": True, "base_bytes": 8 * mmap.PAGESIZE,
    }  # fmt: skip


@pytest.mark.parametrize(("own", "copies"), [(0, 1.0), (1000, 2.0), (500, 1.5)])
def test_on_a_gpu_the_trainer_says_what_it_keeps_besides(own: int, copies: float) -> None:
    found = base_sharing(Location(Transport.CUDA_IPC), {"base_bytes": 1000, "own_base_bytes": own})
    assert found == {"base_copies": copies, "base_mappings": 2, "base_read_only": False, "base_bytes": 1000}
