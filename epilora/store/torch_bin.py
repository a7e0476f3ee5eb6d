"""Tensors of a PyTorch `.bin` file without torch and without running anything the file says.

A `.bin` is a zip with `*/data.pkl` and one raw member per storage (`*/data/<key>`). The pickle is read by an unpickler
that
knows three harmless names and refuses every other: nothing the file names is imported or called. The same rule as
torch's `weights_only=True`, narrower. fp32, fp16 and bf16 only; the old (pre-1.6) format is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np

from epilora.errors import AdapterRejected

MAX_PICKLE_BYTES = 16 << 20
MAX_MEMBERS = 200_000


class _StorageType:
    """Stands for a torch storage class; `item_bytes` wide values."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Storage:
    def __init__(self, kind: _StorageType, key: str, count: int) -> None:
        self.kind, self.key, self.count = kind, key, count


_STORAGES = {name: _StorageType(name) for name in ("FloatStorage", "HalfStorage", "BFloat16Storage")}
_ITEM_BYTES = {"FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2}


class _Tensor:
    def __init__(self, storage: Any, offset: Any, shape: Any, stride: Any) -> None:
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise AdapterRejected(f"the .bin file names {module}.{name}; only plain fp32, fp16 and bf16 tensors are read")

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise AdapterRejected("the .bin file refers to something that is not a tensor's storage")
        _, kind, key, _, count = pid
        if not isinstance(key, str) or not key.isalnum() or type(count) is not int or count < 0:
            raise AdapterRejected("the .bin file has a storage without a proper name or size")
        return _Storage(kind, key, count)


def read_torch_bin(data: bytes, *, max_bytes: int) -> dict[str, np.ndarray]:
    """Name -> fp32 array. max_bytes: bound on everything unpacked. Raises AdapterRejected with what is wrong."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as err:
        raise AdapterRejected(f"the .bin file is not a zip of tensors ({err}); save it as .safetensors") from err
    pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(pickles) != 1 or len(members) > MAX_MEMBERS:
        raise AdapterRejected(f"the .bin file has {len(pickles)} data.pkl members, should have 1")
    if sum(info.file_size for info in members.values()) > max_bytes:
        raise AdapterRejected(f"the .bin file unpacks to more than the {max_bytes} bytes that are allowed")
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise AdapterRejected("the .bin file has compressed members, which torch never writes")
    if members[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise AdapterRejected(f"the .bin file's pickle is larger than {MAX_PICKLE_BYTES} bytes")
    prefix = pickles[0].removesuffix("data.pkl")
    try:
        content = _Unpickler(io.BytesIO(_member(archive, pickles[0]))).load()
    except AdapterRejected:
        raise
    except Exception as err:  # a hostile pickle fails in any way it likes
        raise AdapterRejected(f"the .bin file's pickle cannot be read: {type(err).__name__}") from err
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise AdapterRejected("the .bin file does not hold a dictionary of named tensors")
    out = {}
    for name, tensor in content.items():
        if not isinstance(tensor, _Tensor) or not isinstance(tensor.storage, _Storage):
            raise AdapterRejected(f"tensor {name!r} of the .bin file is not a plain tensor")
        member = members.get(f"{prefix}data/{tensor.storage.key}")
        if member is None:
            raise AdapterRejected(f"tensor {name!r}: the .bin file lacks its storage {tensor.storage.key}")
        out[name] = _array(name, tensor, _member(archive, member.filename))
    return out


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, ValueError) as err:
        raise AdapterRejected(f"member {name} of the .bin file is damaged: {err}") from err


def _array(name: str, tensor: _Tensor, raw: bytes) -> np.ndarray:
    kind, shape, stride, offset = tensor.storage.kind.name, tensor.shape, tensor.stride, tensor.offset
    whole = all(isinstance(v, tuple) and all(type(n) is int and 0 <= n < 1 << 40 for n in v) for v in (shape, stride))
    if not whole or len(shape) != len(stride) or type(offset) is not int or offset < 0:
        raise AdapterRejected(f"tensor {name!r} of the .bin file has no proper shape, stride or offset")
    if len(raw) % _ITEM_BYTES[kind]:
        raise AdapterRejected(f"tensor {name!r}: its storage has {len(raw)} bytes, not whole {kind} values")
    values = np.frombuffer(raw, dtype="<f4" if kind == "FloatStorage" else "<f2" if kind == "HalfStorage" else "<u2")
    if kind == "BFloat16Storage":
        values = (values.astype("<u4") << np.uint32(16)).view("<f4")
    values = values.astype("<f4", copy=False)
    if 0 in shape:
        return np.zeros(shape, dtype="<f4")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    count = 1
    for size in shape:
        count *= size
    if last >= len(values) or count > len(values):
        raise AdapterRejected(
            f"tensor {name!r}: shape {list(shape)} reaches beyond its storage of {len(values)} values"
        )
    view = np.lib.stride_tricks.as_strided(values[offset:], shape, [4 * step for step in stride], writeable=False)
    return np.ascontiguousarray(view)
