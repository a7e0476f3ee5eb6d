"""Digests of what must not differ: an adapter's content, an engine slot's buffers, a base model's bytes.

adapter_digest   sha256( MAGIC | canonical spec JSON | per tensor by name: name, shape, fp32 little-endian bytes )
slot_digest      sha256( per module by name: name, dtype, shape and tree digest of A and B as they lie in the slot )
weights_digest   sha256( per stored tensor by name: name, dtype, shape, tree digest of its bytes )

Tree digests (`tree_digest`) are computed where the tensors lie, so a GPU checks its own memory.

`adapter_digest` gives the values of `epilora.store.digest` (which does without torch); tests/adapters/test_digest.py
holds the two together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from epilora.types import AdapterSpec

from .tree_digest import tree_digests

MAGIC = b"epilora-adapter-1\n"


def as_tensor(value: Any) -> torch.Tensor:
    """A CPU tensor of a torch tensor or a numpy array (shares memory where it can). Raises TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    raise TypeError(f"expected a torch tensor or numpy array, got {type(value).__name__}")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order (copied only if it is not contiguous)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def adapter_digest(spec: AdapterSpec, tensors: Mapping[str, Any]) -> str:
    """sha256 (64 hex characters) of spec and tensors. Tensors of any float dtype are compared as fp32, in the order of
    names.

    Raises TypeError for tensors that hold no floating-point numbers.
    """
    plain = {
        "rank": int(spec.rank),
        "alpha": float(spec.alpha),
        "target_modules": sorted(set(spec.target_modules)),
        "use_rslora": bool(spec.use_rslora),
        "rank_pattern": [[str(pattern), int(rank)] for pattern, rank in spec.rank_pattern],
        "alpha_pattern": [[str(pattern), float(alpha)] for pattern, alpha in spec.alpha_pattern],
    }
    sha = hashlib.sha256(MAGIC)
    sha.update(
        json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    )
    for name in sorted(tensors):
        tensor = as_tensor(tensors[name])
        if not tensor.is_floating_point():
            raise TypeError(f"adapter tensor {name!r} has dtype {tensor.dtype}; allowed are fp32, fp16 and bf16")
        shape = ",".join(str(size) for size in tensor.shape)
        sha.update(f"\n{name}\0{shape}\0".encode())
        sha.update(raw_bytes(tensor.to(torch.float32)))
    return sha.hexdigest()


def slot_digest(modules: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """sha256 of one adapter slot.

    modules: checkpoint module name -> (A [R, K], B [N, R]) as stored: the engine's dtype, rank padded with zeros to the
    slot's R. Modules whose A and B are all zero count as absent, so a slot needs no entry for what its adapter does not
    cover.
    """
    named = []
    for name in sorted(modules):
        named += [(f"{name}.{side}", tensor) for side, tensor in zip("AB", modules[name], strict=True)]
    found = tree_digests([tensor for _, tensor in named])
    sha = hashlib.sha256()
    for at in range(0, len(named), 2):
        pair = named[at : at + 2]
        if all(found[at + side] == _zero_digest(tensor.nbytes) for side, (_, tensor) in enumerate(pair)):
            continue
        for side, (name, tensor) in enumerate(pair):
            _update(sha, name, tensor, found[at + side])
    return sha.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 of a base model's stored tensors.

    tensors: (name, tensor) in any order, on any device; names unique. A weight is given as [N, K], rows contiguous.
    """
    named = sorted(tensors, key=lambda pair: pair[0])
    sha = hashlib.sha256()
    for (name, tensor), found in zip(named, tree_digests([tensor for _, tensor in named]), strict=True):
        _update(sha, name, tensor, found)
    return sha.hexdigest()


def ranks_digest(digests: Sequence[str]) -> str:
    """Digest of a base that tensor-parallel ranks hold parts of: of their `weights_digest`s in the ranks' order.

    That of the only rank is the base's.
    """
    return digests[0] if len(digests) == 1 else hashlib.sha256("\0".join(digests).encode()).hexdigest()


def _update(sha: hashlib._Hash, name: str, tensor: torch.Tensor, found: bytes) -> None:
    sha.update(f"{name}\0{str(tensor.dtype)[6:]}\0{tuple(tensor.shape)}\0".encode() + found)


@cache
def _zero_digest(num_bytes: int) -> bytes:
    return tree_digests([torch.zeros(num_bytes, dtype=torch.uint8)])[0]
