"""Adapters from URLs: the same checks as for folders, bounded sizes, no place outside what the operator allows."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.numpy import save

from epilora.errors import AdapterRejected
from epilora.store import AdapterStore, adapter_digest
from epilora.store.sources import read_peft, resolve_source
from tests.store.adapters_for_tests import BASE, SPEC, config, tensors


@pytest.fixture
def bucket() -> Iterator[str]:
    """A good adapter at memory://bucket/good."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/good/adapter_config.json", json.dumps(config()).encode())
    memory.pipe("/bucket/good/adapter_model.safetensors", save(tensors(1)))
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def test_a_url_imports_like_a_folder(bucket: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    version, report = store.import_peft(f"{bucket}/good", "a", base=BASE)
    assert version.digest == adapter_digest(SPEC, tensors(1))
    assert len(report.covered) == 4
    folder = store.export_peft("a", tmp_path / "out")
    assert store.import_peft(f"file://{folder}", "b", base=BASE)[0].digest == version.digest
    assert store.import_peft(f"{bucket}/x/../good/", "c", base=BASE)[0].digest == version.digest


def test_a_bin_at_a_url(bucket: str) -> None:
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors(1).items()}, buffer)
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/bin/adapter_config.json", json.dumps(config()).encode())
    memory.pipe("/bucket/bin/adapter_model.bin", buffer.getvalue())
    assert adapter_digest(SPEC, read_peft(f"{bucket}/bin")[1]) == adapter_digest(SPEC, tensors(1))


def test_what_is_wrong_at_a_url_is_said(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/half/adapter_config.json", json.dumps(config()).encode())
    for source, message in (
        (f"{bucket}/none", "adapter_config.json is missing in memory://bucket/none"),
        (f"{bucket}/half", "adapter_model.safetensors is missing in memory://bucket/half"),
        ("http://example.org/a", "sources of the kind http:// are not read"),
        ("ftp://example.org/a", "sources of the kind ftp:// are not read"),
        ("local:///etc", "sources of the kind local:// are not read"),
        ("file:///none/such", "/none/such is not a folder"),
    ):
        with pytest.raises(AdapterRejected) as caught:
            read_peft(source)
        assert message in str(caught.value)
    with pytest.raises(AdapterRejected, match="more than the 64 bytes"):
        read_peft(f"{bucket}/good", max_bytes=64)

    def missing(scheme: str) -> None:
        raise ImportError(scheme)

    monkeypatch.setattr(fsspec, "filesystem", missing)
    for scheme, package in (("s3", "remote.*s3fs"), ("gs", "remote.*gcsfs"), ("hf", "huggingface_hub")):
        with pytest.raises(
            AdapterRejected, match=rf"{scheme}:// needs a package that is not installed .*: pip install .*{package}"
        ):
            read_peft(f"{scheme}://bucket/a")


def test_roots_bound_sources(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    roots = [str(tmp_path / "in"), "s3://bucket/adapters"]
    for source in (f"{tmp_path}/in/a", f"{tmp_path}/link/a", "s3://bucket/adapters/a", "S3://bucket/adapters/b/../a"):
        resolve_source(source, roots)
    for source in (
        f"{tmp_path}/in/../other",
        f"{tmp_path}/inside",
        "s3://bucket/adapters-other/a",
        "s3://bucket/adapters/../secret",
        "s3://other/adapters/a",
        "gs://bucket/adapters/a",
        f"file://{tmp_path}/in/a",
    ):
        with pytest.raises(AdapterRejected, match="where adapters may be read from"):
            resolve_source(source, roots)
    assert resolve_source("/anywhere/../x", []) == "/x"
    assert resolve_source(f"{tmp_path}/link/a", roots) == str(tmp_path / "in" / "a")


def test_a_path_the_system_refuses_is_a_reason_and_no_crash() -> None:
    with pytest.raises(AdapterRejected, match="cannot be read: File name too long"):
        read_peft("0" * 4000)
    with pytest.raises(AdapterRejected, match="cannot be read: File name too long"):
        read_peft("file:///" + "0" * 4000)
    assert resolve_source("0" * 300, []).endswith("0" * 300)
