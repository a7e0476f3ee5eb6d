"""Where adapters come from: a folder, or a URL that fsspec can open (file, s3, gs, hf).

Only the named files of an adapter are read, into memory and up to a stated size; nothing else of the place is listed,
and a URL's content goes through the same checks as a folder's. Credentials are the cloud SDK's own (environment,
instance role).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epilora.errors import AdapterRejected

from .peft_files import (
    BIN_FILE,
    CONFIG_FILE,
    MAX_ADAPTER_BYTES,
    MAX_CONFIG_BYTES,
    TENSOR_FILE,
    parse_config_bytes,
    read_peft_folder,
)
from .safetensors_io import read_tensors
from .torch_bin import read_torch_bin

SCHEMES = {  # what the user installs when fsspec lacks the package
    "file": "",
    "s3": "'epilora[remote]' (s3fs)",
    "gs": "'epilora[remote]' (gcsfs)",
    "hf": "huggingface_hub",
    "memory": "",
}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://(?P<path>.*)", re.DOTALL)


def is_url(source: str) -> bool:
    return _URL.fullmatch(source) is not None


def resolve_source(source: str, roots: Sequence[str]) -> str:
    """The source with links and `..` resolved, if it lies inside `roots` (folders or URL prefixes; () allows all).

    Raises AdapterRejected.
    """
    if is_url(source):
        resolved = _normal(source)
        inside = any(is_url(root) and f"{resolved}/".startswith(f"{_normal(root)}/") for root in roots)
    else:
        try:
            path = Path(source).resolve()
        except OSError as err:
            raise AdapterRejected(f"{source[:200]} cannot be read: {err.strerror or type(err).__name__}") from err
        resolved = str(path)
        inside = any(not is_url(root) and path.is_relative_to(Path(root).resolve()) for root in roots)
    if roots and not inside:
        raise AdapterRejected(f"{source} is not inside {', '.join(roots)}, where adapters may be read from")
    return resolved


def _normal(url: str) -> str:
    """The URL with `.` and `..` resolved and without query or trailing slash."""
    found = _URL.fullmatch(url)
    assert found is not None
    path = posixpath.normpath("/" + found["path"]).lstrip("/")
    return f"{found['scheme'].lower()}://{path}"


def read_peft(source: str, *, max_bytes: int = MAX_ADAPTER_BYTES) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and fp32 tensors of a PEFT adapter at a folder or URL. Raises AdapterRejected with what is wrong."""
    if not is_url(source):
        return _read_folder(source, max_bytes)
    plain = _normal(source)
    scheme, _, path = plain.partition("://")
    if scheme == "file":
        return _read_folder("/" + path, max_bytes)
    system = _filesystem(scheme)
    config = parse_config_bytes(_read(system, f"{path}/{CONFIG_FILE}", plain, MAX_CONFIG_BYTES))
    if not _exists(system, f"{path}/{TENSOR_FILE}", plain) and _exists(system, f"{path}/{BIN_FILE}", plain):
        return config, read_torch_bin(_read(system, f"{path}/{BIN_FILE}", plain, max_bytes), max_bytes=max_bytes)
    tensors, _ = read_tensors(_read(system, f"{path}/{TENSOR_FILE}", plain, max_bytes))
    return config, tensors


def _read_folder(folder: str, max_bytes: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        return read_peft_folder(folder, max_bytes=max_bytes)
    except OSError as err:  # a name too long, no permission, a device that fails
        raise AdapterRejected(f"{folder[:200]} cannot be read: {err.strerror or type(err).__name__}") from err


def _filesystem(scheme: str) -> Any:
    if scheme not in SCHEMES:
        raise AdapterRejected(f"sources of the kind {scheme}:// are not read; allowed are {', '.join(sorted(SCHEMES))}")
    import fsspec

    try:
        return fsspec.filesystem(scheme)
    except ImportError as err:
        raise AdapterRejected(
            f"{scheme}:// needs a package that is not installed ({err}): pip install {SCHEMES[scheme]}"
        ) from err


def _exists(system: Any, path: str, source: str) -> bool:
    try:
        return bool(system.exists(path))
    except Exception as err:  # every cloud's client has errors of its own: no credentials, no such bucket, no network
        raise AdapterRejected(f"{source} cannot be read: {type(err).__name__}: {err}") from err


def _read(system: Any, path: str, source: str, max_bytes: int) -> bytes:
    name = posixpath.basename(path)
    try:
        with system.open(path, "rb") as file:
            data: bytes = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise AdapterRejected(f"{name} is missing in {source}") from None
    except Exception as err:
        raise AdapterRejected(f"{name} of {source} cannot be read: {type(err).__name__}: {err}") from err
    if len(data) > max_bytes:
        raise AdapterRejected(f"{name} of {source} has more than the {max_bytes} bytes that are allowed")
    return data
