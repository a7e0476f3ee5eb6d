"""The tree digest: its definition written out once more, and that every byte and the length count."""

import hashlib

import pytest
import torch

from epilora.adapters import tree_digest
from epilora.adapters.tree_digest import MAGIC, tree_digests


def by_definition(raw: bytes) -> bytes:
    level = raw
    while len(level) > 4096:
        pieces = [level[at : at + 4096].ljust(4096, b"\0") for at in range(0, len(level), 4096)]
        level = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    return hashlib.sha256(MAGIC + len(raw).to_bytes(8, "little") + level).digest()


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 128 * 4096, 128 * 4096 + 1, 700_000])
def test_is_what_it_says(count):
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert tree_digests([data]) == [by_definition(data.numpy().tobytes())]


def test_length_and_every_byte_count():
    data = torch.zeros(9000, dtype=torch.uint8)
    base = tree_digests([data])[0]
    assert tree_digests([torch.zeros(9001, dtype=torch.uint8)])[0] != base
    data[8999] = 1
    assert tree_digests([data])[0] != base


def test_any_dtype_and_layout():
    x = torch.arange(12.0).view(3, 4)
    assert tree_digests([x.t(), x.t().contiguous(), x]) == [by_definition(y.numpy().tobytes()) for y in (x.T, x.T, x)]


def test_the_gpu_path_brings_its_results_back_in_order(monkeypatch):
    """The bookkeeping of `_tops_on_gpu`, with hashlib's leaves where there is no GPU."""
    from epilora.kernels import sha256

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(sha256, "sha256_leaves", sha256.sha256_leaves_ref)
    monkeypatch.setattr(tree_digest, "_GROUP_BYTES", 20_000)
    sizes = (5000, 3, 600_000, 4097, 4096, 9000, 0)
    data = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    flat = [x if n == 3 else x.as_subclass(OnGpu) for n, x in zip(sizes, data, strict=True)]
    tops = tree_digest._tops_on_gpu(flat)
    assert tops[1] is None
    assert [t for t in tops if t is not None] == [
        tree_digest._top(x) for n, x in zip(sizes, data, strict=True) if n != 3
    ]
