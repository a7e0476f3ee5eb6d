"""Digests of what must not differ: an adapter's content, an engine slot's buffers, a base model's bytes.

adapter_digest   sha256( MAGIC | canonical spec JSON | per tensor by name: name, shape, fp32 little-endian bytes )
slot_digest      sha256( per module by name: name, shape and bytes of A and B as they lie in the slot )
weights_digest   sha256( per stored tensor by name: name, dtype, shape, bytes )

`adapter_digest` gives the values of `epilora.store.digest` (which does without torch); tests/adapters/test_digest.py
holds the two together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from epilora.types import AdapterSpec

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
    sha = hashlib.sha256()
    for name in sorted(modules):
        a_RK, b_NR = modules[name]
        if not a_RK.any() and not b_NR.any():
            continue
        for tensor in (a_RK, b_NR):
            sha.update(f"{name}\0{str(tensor.dtype)[6:]}\0{tuple(tensor.shape)}\0".encode())
            sha.update(raw_bytes(tensor))
    return sha.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 of a base model's stored tensors.

    tensors: (name, CPU tensor) in any order; names unique. A weight is given as [N, K], rows contiguous.
    """
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        sha.update(f"{name}\0{str(tensor.dtype)[6:]}\0{tuple(tensor.shape)}\0".encode())
        sha.update(raw_bytes(tensor))
    return sha.hexdigest()
