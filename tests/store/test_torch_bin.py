"""`.bin` adapters: the numbers torch saved, and refusals of everything a pickle could do."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epilora.errors import AdapterRejected
from epilora.store import AdapterStore, adapter_digest
from epilora.store.torch_bin import read_torch_bin
from tests.store.adapters_for_tests import BASE, SPEC, config, tensors

LIMIT = 1 << 20


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


GOOD = {name: torch.from_numpy(tensor) for name, tensor in tensors(1).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_torch_saved(dtype: torch.dtype) -> None:
    content = {name: tensor.to(dtype) for name, tensor in GOOD.items()}
    shared = torch.arange(24.0).reshape(4, 6).to(dtype)
    content |= {"transposed": shared.T, "slice": shared[1:3, 2:5], "stepped": shared[::2, ::3], "none": shared[:0]}
    got = read_torch_bin(saved(content), max_bytes=LIMIT)
    assert set(got) == set(content)
    for name, tensor in content.items():
        assert got[name].dtype == np.float32
        assert np.array_equal(got[name], tensor.float().numpy()), name


def test_a_bin_folder_imports_as_its_safetensors_would(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "adapter_model.bin").write_bytes(saved(GOOD))
    (tmp_path / "in" / "adapter_config.json").write_text(json.dumps(config()))
    version, _ = AdapterStore(tmp_path / "store").import_peft(tmp_path / "in", "a", base=BASE)
    assert version.digest == adapter_digest(SPEC, tensors(1))


class Evil:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def zipped(pickled: bytes, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in members.items():
            archive.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a zip"),
    "old-format": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "not a zip"),
    "system": (zipped(pickle.dumps({"a": Evil(os.system, "touch /tmp/owned")})), r"names (posix|nt)\.system"),
    "eval": (zipped(pickle.dumps({"a": Evil(eval, "1")})), r"names builtins\.eval"),
    "getattr": (zipped(pickle.dumps(Evil(getattr, "a", "b"))), r"names builtins\.getattr"),
    "module": (saved(torch.nn.Linear(2, 2)), r"the \.bin file names"),
    "parameter": (saved({"a": torch.nn.Parameter(torch.ones(2))}), r"names torch\._utils\._rebuild_parameter"),
    "int64": (saved({"a": torch.ones(2, dtype=torch.int64)}), r"names torch\.LongStorage"),
    "sparse": (saved({"a": torch.eye(3).to_sparse()}), "names torch"),
    "a-list": (saved([torch.ones(2)]), "does not hold a dictionary"),
    "not-tensors": (saved({"a": 3}), "'a' of the .bin file is not a plain tensor"),
    "number-keys": (saved({3: torch.ones(2)}), "named tensors"),
    "nested": (saved({"a": {"b": torch.ones(2)}}), "'a' of the .bin file is not a plain tensor"),
    "no-pickle": (zipped(b"")[:0] + saved({})[:40], "not a zip"),
    "broken-pickle": (zipped(b"\x80\x02}q"), "cannot be read"),
    "stack-bomb": (zipped(b"\x80\x02" + b"(" * 100_000), "cannot be read"),
    "memo-bomb": (zipped(b"\x80\x02Kar\xff\xff\xff\xff."), "cannot be read|dictionary"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    data, message = CASES[case]
    with pytest.raises(AdapterRejected, match=message):
        read_torch_bin(data, max_bytes=LIMIT)
    assert not Path("/tmp/owned").exists()


def edited(edit: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(4, 4)}))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_archives_that_lie_about_their_content_are_refused() -> None:
    with pytest.raises(AdapterRejected, match="reaches beyond its storage of 2 values"):
        read_torch_bin(edited(lambda m: m.update({"archive/data/0": b"\0" * 8})), max_bytes=LIMIT)
    with pytest.raises(AdapterRejected, match="not whole FloatStorage values"):
        read_torch_bin(edited(lambda m: m.update({"archive/data/0": b"\0" * 7})), max_bytes=LIMIT)
    with pytest.raises(AdapterRejected, match="lacks its storage 0"):
        read_torch_bin(edited(lambda m: m.pop("archive/data/0") and None), max_bytes=LIMIT)
    with pytest.raises(AdapterRejected, match=r"has 2 data\.pkl members"):
        read_torch_bin(edited(lambda m: m.update({"b/data.pkl": b""})), max_bytes=LIMIT)
    with pytest.raises(AdapterRejected, match="compressed members"):
        read_torch_bin(edited(lambda m: None, zipfile.ZIP_DEFLATED), max_bytes=LIMIT)
    whole = bytearray(edited(lambda m: None))
    whole[whole.index(b"\x00\x00\x80\x3f" * 4)] ^= 1
    with pytest.raises(AdapterRejected, match="is damaged: Bad CRC-32"):
        read_torch_bin(bytes(whole), max_bytes=LIMIT)
    with pytest.raises(AdapterRejected, match="unpacks to more than the 100 bytes"):
        read_torch_bin(saved(GOOD), max_bytes=100)


SMALL = saved({"a": torch.ones(2, 2)})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_are_refused_or_read(edits: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for position, value in edits:
        data[position] = value
    try:
        seen: Any = read_torch_bin(bytes(data), max_bytes=LIMIT)
    except AdapterRejected as err:
        seen = str(err)
    assert isinstance(seen, (dict, str))
