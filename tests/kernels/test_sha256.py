"""Leaf hashes against hashlib: whole and partial pieces, odd lengths, unaligned starts."""

import hashlib

import pytest
import torch

from epilora.kernels.sha256 import LEAF_BYTES, _round_constants, sha256_leaves, sha256_leaves_ref

LEAF = LEAF_BYTES if torch.cuda.is_available() else 64  # the interpreter takes seconds for each 64 bytes of a leaf


def random_bytes(count, device):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def test_round_constants_are_the_standards():
    constants = _round_constants()
    assert (constants[0], constants[1], constants[63]) == (0x428A2F98, 0x71374491, 0xC67178F2)


@pytest.mark.parametrize("count", [130 * LEAF - 61])
def test_equals_hashlib(device, count):
    data = random_bytes(count, device)
    found = sha256_leaves(data, LEAF)
    assert found.shape == (-(-count // LEAF), 32)
    assert torch.equal(found, sha256_leaves_ref(data, LEAF))
    first = data[:LEAF].cpu().numpy().tobytes()
    first += bytes(LEAF - len(first))
    assert found[0].cpu().numpy().tobytes() == hashlib.sha256(first).digest()


def test_an_unaligned_view_and_nothing(device):
    data = random_bytes(LEAF + 9, device)[1:]
    assert torch.equal(sha256_leaves(data, LEAF), sha256_leaves_ref(data, LEAF))
    assert sha256_leaves(data[:0]).shape == (0, 32)


def test_what_is_not_plain_bytes_is_refused(device):
    with pytest.raises(TypeError, match="float32"):
        sha256_leaves(torch.zeros(4, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        sha256_leaves(torch.zeros(8, dtype=torch.uint8, device=device)[::2])
    with pytest.raises(ValueError, match="leaf_bytes=100"):
        sha256_leaves(torch.zeros(8, dtype=torch.uint8, device=device), 100)
