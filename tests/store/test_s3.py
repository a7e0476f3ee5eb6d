"""s3:// against a server that speaks S3, over HTTP, through s3fs: what works, and what every failure says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer
from safetensors.numpy import save

from epilora.errors import AdapterRejected
from epilora.store import AdapterStore, adapter_digest
from epilora.store.sources import read_peft
from tests.store.adapters_for_tests import BASE, SPEC, config, tensors


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A good adapter at s3://adapters/good, reached as a user would: by the SDK's own environment variables."""
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="adapters")
    put = {
        "good/adapter_config.json": json.dumps(config()).encode(),
        "good/adapter_model.safetensors": save(tensors(1)),
        "half/adapter_config.json": json.dumps(config()).encode(),
        "evil/adapter_config.json": json.dumps({**config(), "use_dora": True}).encode(),
        "evil/adapter_model.safetensors": save(tensors(1)),
        "bin/adapter_config.json": json.dumps(config()).encode(),
    }
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors(1).items()}, buffer)
    put["bin/adapter_model.bin"] = buffer.getvalue()
    for key, body in put.items():
        client.put_object(Bucket="adapters", Key=key, Body=body)
    yield "s3://adapters"
    for key in put:
        client.delete_object(Bucket="adapters", Key=key)
    client.delete_bucket(Bucket="adapters")
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_adapter_in_a_bucket_imports_like_a_folder(bucket: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    version, report = store.import_peft(f"{bucket}/good", "a", base=BASE)
    assert version.digest == adapter_digest(SPEC, tensors(1))
    assert len(report.covered) == 4
    assert store.import_peft(f"{bucket}/bin/", "b", base=BASE)[0].digest == version.digest
    stats = store.stats()
    assert (stats.remote_reads, stats.remote_read_bytes) == (2, 2 * sum(t.nbytes for t in tensors(1).values()))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("none", "adapter_config.json is missing in s3://adapters/none"),
        ("half", "adapter_model.safetensors is missing in s3://adapters/half"),
        ("evil", "use_dora=True cannot be served"),
    ],
)
def test_what_is_wrong_in_a_bucket_is_said(bucket: str, place: str, message: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    with pytest.raises(AdapterRejected, match=message):
        store.import_peft(f"{bucket}/{place}", "a", base=BASE)
    assert store.names() == []


def test_no_bucket_no_server_and_a_size_bomb(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterRejected, match="s3://no-such-bucket/a"):
        read_peft("s3://no-such-bucket/a")
    with pytest.raises(AdapterRejected, match="more than the 64 bytes"):
        read_peft(f"{bucket}/good", max_bytes=64)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(
        AdapterRejected, match=r"adapter_config.json of s3://adapters/good cannot be read: EndpointConn"
    ):
        read_peft(f"{bucket}/good")


def test_an_object_that_is_replaced_is_read_anew(bucket: str) -> None:
    first = read_peft(f"{bucket}/good")[1]
    boto3.client("s3").put_object(Bucket="adapters", Key="good/adapter_model.safetensors", Body=save(tensors(2)))
    second = read_peft(f"{bucket}/good")[1]
    assert adapter_digest(SPEC, first) == adapter_digest(SPEC, tensors(1))
    assert adapter_digest(SPEC, second) == adapter_digest(SPEC, tensors(2))
