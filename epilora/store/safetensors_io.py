"""Strict reading of safetensors bytes with numpy alone, bf16 included.

Layout (https://huggingface.co/docs/safetensors): u64 header length, JSON header, then the buffer. Every claim of the
header is checked against the bytes that are there before an array is made, so a hostile file is refused rather than
believed. Writing goes through the safetensors package.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

import numpy as np

from epilora.errors import AdapterRejected

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def read_header(data: bytes | memoryview, total_bytes: int | None = None) -> tuple[dict[str, Any], dict[str, str], int]:
    """Checked header of safetensors bytes: ({tensor: {dtype, shape, data_offsets}}, metadata, offset of the buffer).

    data: at least the header's bytes; total_bytes: the file's size where `data` is only its beginning.
    Raises AdapterRejected with what is wrong.
    """
    total_bytes = len(data) if total_bytes is None else total_bytes
    if len(data) < 8:
        raise AdapterRejected(f"safetensors file has {len(data)} bytes; a header needs at least 8")
    header_bytes = int.from_bytes(bytes(data[:8]), "little")
    if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > total_bytes:
        raise AdapterRejected(f"safetensors header claims {header_bytes} bytes; the file has {total_bytes} in all")
    try:
        header = json.loads(bytes(data[8 : 8 + header_bytes]).decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as err:
        raise AdapterRejected(f"safetensors header is not valid JSON: {err}") from err
    if not isinstance(header, dict):
        raise AdapterRejected("safetensors header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise AdapterRejected("safetensors __metadata__ is not a JSON object")
    if len(header) > MAX_TENSORS:
        raise AdapterRejected(f"safetensors header lists {len(header)} tensors; at most {MAX_TENSORS} are allowed")
    return header, metadata, 8 + header_bytes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice")
    return out


def read_tensors(data: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays (fp32 as views of `data`, fp16 and bf16 widened to fp32) and metadata of a whole safetensors file.

    Raises AdapterRejected: other dtypes, shapes that do not match their bytes, overlaps, gaps, bytes left over.
    """
    header, metadata, start = read_header(data)
    spans: list[tuple[int, int, str]] = []
    arrays: dict[str, np.ndarray] = {}
    buffer = memoryview(data)[start:]
    for name, entry in header.items():
        if not isinstance(entry, dict):
            raise AdapterRejected(f"tensor {name!r}: its header entry is not an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if dtype not in _ITEM_BYTES:
            raise AdapterRejected(f"tensor {name!r}: dtype {dtype!r} is not supported; allowed are F32, F16, BF16")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise AdapterRejected(f"tensor {name!r}: shape {shape!r} or data_offsets {offsets!r} are not whole numbers")
        count = 1
        for size in shape:
            count *= size
        begin, end = offsets
        if not (begin <= end <= len(buffer)) or end - begin != count * _ITEM_BYTES[dtype]:
            raise AdapterRejected(
                f"tensor {name!r}: {dtype} {shape} needs {count * _ITEM_BYTES[dtype]} bytes;"
                f" offsets {offsets} of a buffer of {len(buffer)} bytes do not give them"
            )
        spans.append((begin, end, name))
        arrays[name] = _decode(buffer[begin:end], dtype).reshape(shape)
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise AdapterRejected(f"tensor {name!r} begins at byte {begin}; the one before it ends at {at}")
        at = end
    if at != len(buffer):
        raise AdapterRejected(f"safetensors file has {len(buffer) - at} bytes that belong to no tensor")
    return arrays, metadata


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _decode(raw: memoryview, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return np.frombuffer(raw, dtype="<f4")
    if dtype == "F16":
        return np.frombuffer(raw, dtype="<f2").astype("<f4")
    return (np.frombuffer(raw, dtype="<u2").astype("<u4") << np.uint32(16)).view("<f4")
