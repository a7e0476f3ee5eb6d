"""Digest of an adapter's content: what makes two versions the same.

    digest = sha256( MAGIC | canonical spec JSON | for each tensor by name: name, shape, fp32 little-endian bytes )

The order of tensors and of target modules does not matter; the order of rank and alpha patterns does (PEFT takes the
first that matches). Tensors are widened to fp32 first, so that a bf16 file and its fp32 copy are one version. numpy
only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from epilora.types import AdapterSpec

MAGIC = b"epilora-adapter-1\n"
DIGEST_CHARS = 64


def spec_to_dict(spec: AdapterSpec) -> dict[str, Any]:
    """Plain JSON-able form of a spec; `spec_from_dict` reverses it."""
    return {
        "rank": int(spec.rank),
        "alpha": float(spec.alpha),
        "target_modules": sorted(set(spec.target_modules)),
        "use_rslora": bool(spec.use_rslora),
        "rank_pattern": [[str(pattern), int(rank)] for pattern, rank in spec.rank_pattern],
        "alpha_pattern": [[str(pattern), float(alpha)] for pattern, alpha in spec.alpha_pattern],
    }


def spec_from_dict(data: Mapping[str, Any]) -> AdapterSpec:
    """The spec `spec_to_dict` wrote (target modules come back sorted)."""
    return AdapterSpec(
        rank=int(data["rank"]),
        alpha=float(data["alpha"]),
        target_modules=tuple(data["target_modules"]),
        use_rslora=bool(data["use_rslora"]),
        rank_pattern=tuple((str(pattern), int(rank)) for pattern, rank in data["rank_pattern"]),
        alpha_pattern=tuple((str(pattern), float(alpha)) for pattern, alpha in data["alpha_pattern"]),
    )


def spec_json(spec: AdapterSpec) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(spec_to_dict(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def as_fp32(tensor: Any) -> np.ndarray:
    """C-contiguous little-endian fp32 array of a numpy array or anything that looks like a torch CPU tensor.

    Torch is not imported: a tensor is recognised by its methods, moved to the CPU and widened by them.
    Raises TypeError for anything that holds no real floating-point numbers.
    """
    if hasattr(tensor, "detach") and hasattr(tensor, "cpu"):
        tensor = tensor.detach().cpu().float().numpy()
    array = np.asarray(tensor)
    if array.dtype.kind != "f":
        raise TypeError(f"adapter tensor has dtype {array.dtype}; allowed are fp32, fp16 and bf16")
    return np.ascontiguousarray(array, dtype="<f4")


def as_fp32_tensors(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`as_fp32` of every tensor, sorted by name. Arrays that are fp32 and contiguous already are not copied."""
    return {name: as_fp32(tensors[name]) for name in sorted(tensors)}


def adapter_digest(spec: AdapterSpec, tensors: Mapping[str, Any]) -> str:
    """sha256 (64 hex characters) of the content.

    tensors: name -> numpy array or torch tensor, any float dtype; compared as fp32.
    """
    sha = hashlib.sha256(MAGIC)
    sha.update(spec_json(spec).encode("ascii"))
    for name in sorted(tensors):
        array = as_fp32(tensors[name])
        shape = ",".join(str(size) for size in array.shape)
        sha.update(f"\n{name}\0{shape}\0".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
