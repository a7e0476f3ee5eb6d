"""One digest for bytes wherever they lie: SHA-256 as a tree, so that a GPU can hash its own memory.

    level 0 = the bytes;  level i+1 = SHA-256 of every 4,096 bytes of level i, the last piece filled up with zeros
    digest  = SHA-256( MAGIC | number of bytes, 8 bytes little-endian | the first level of at most 4,096 bytes )

The length fixes the shape of the tree, so two inputs with one digest would be a collision of SHA-256. On the CPU hashlib
computes it, on a GPU `epilora.kernels.sha256`: the same 32 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

MAGIC = b"epilora-tree-1\n"
_LEAF_BYTES = 4096
_GROUP_BYTES = 64 << 20


def tree_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """32 bytes for each tensor's bytes in row-major order (copied only if it is not contiguous).

    Tensors on a GPU are hashed there; one copy brings all results back.
    """
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    tops = _tops_on_gpu(flat)
    return [
        hashlib.sha256(MAGIC + data.numel().to_bytes(8, "little") + (_top(data) if top is None else top)).digest()
        for data, top in zip(flat, tops, strict=True)
    ]


def _top(data: torch.Tensor) -> bytes:
    level = data.numpy().data
    while len(level) > _LEAF_BYTES:
        digests = bytearray()
        for at in range(0, len(level), _LEAF_BYTES):
            piece = level[at : at + _LEAF_BYTES]
            sha = hashlib.sha256(piece)
            if len(piece) < _LEAF_BYTES:
                sha.update(bytes(_LEAF_BYTES - len(piece)))
            digests += sha.digest()
        level = memoryview(digests)
    return bytes(level)


def _tops_on_gpu(flat: Sequence[torch.Tensor]) -> list[bytes | None]:
    """The top level of each tensor that is on a GPU, None for the others."""
    here = [data for data in flat if data.is_cuda]
    if not here:
        return [None] * len(flat)
    levels = list(here)
    while tall := [at for at, level in enumerate(levels) if level.numel() > _LEAF_BYTES]:
        for at, level in zip(tall, _next_levels([levels[at] for at in tall]), strict=True):
            levels[at] = level
    joined = torch.cat(levels).cpu().numpy().tobytes()
    tops: list[bytes | None] = []
    start = 0
    sizes = iter(level.numel() for level in levels)
    for data in flat:
        size = next(sizes) if data.is_cuda else 0
        tops.append(joined[start : start + size] if data.is_cuda else None)
        start += size
    return tops


def _next_levels(levels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """SHA-256 of every piece of each level; small ones are hashed together, since a launch costs more than they do."""
    from epilora.kernels.sha256 import sha256_leaves

    groups: list[list[torch.Tensor]] = []
    room = 0
    for level in levels:
        if level.numel() > room:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(level)
        room -= level.numel()
    found: list[torch.Tensor] = []
    for group in groups:
        if len(group) == 1:
            found.append(sha256_leaves(group[0]).reshape(-1))
            continue
        padded: list[torch.Tensor] = []
        for level in group:
            padded += [level, level.new_zeros(-level.numel() % _LEAF_BYTES)]
        digests = sha256_leaves(torch.cat(padded))
        found += [part.reshape(-1) for part in digests.split([-(-level.numel() // _LEAF_BYTES) for level in group])]
    return found
