"""`epilora key`: keys that work at once, rotate, and are kept as hashes only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epilora import cli
from epilora.errors import Unauthorized
from epilora.serving.tenants import TenantFile, TenantRegistry


def key(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["key", *arguments]) == 0
    return capsys.readouterr().out.strip()


def test_keys_are_issued_rotated_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "tenants.json"
    first = key(capsys, "acme", "--file", str(path), "p99_ttft_ms=500", "weight=2.5", 'adapters=["tone*"]')
    registry = TenantRegistry()
    file = TenantFile(path, registry)
    assert file.refresh(), file.error
    tenant = registry.authenticate(f"Bearer {first}")
    assert (tenant.p99_ttft_ms, tenant.weight, tenant.adapters, tenant.admin) == (500, 2.5, ("tone*",), False)
    assert first not in path.read_text()
    second = key(capsys, "acme", "--file", str(path), "weight=1")
    operator = key(capsys, "operator", "--file", str(path), "--admin")
    file.refresh()
    assert [registry.authenticate(f"Bearer {k}").weight for k in (first, second)] == [1, 1]
    assert registry.authenticate(f"Bearer {second}").p99_ttft_ms == 500  # what is not said stays
    assert registry.authenticate(f"Bearer {operator}").admin
    third = key(capsys, "acme", "--file", str(path), "--revoke")
    file.refresh()
    assert registry.authenticate(f"Bearer {third}").name == "acme"
    for gone in (first, second):
        with pytest.raises(Unauthorized):
            registry.authenticate(f"Bearer {gone}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["acme", "wieght=2"], "'wieght=2': allowed are adapter_dtype, adapters, base"),
        (["acme", "weight=0"], "weight=0; it must be above 0"),
        (["acme", "admin=true"], "'admin=true': allowed are"),
        (["a/b"], "tenant name 'a/b'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": []}))
    assert cli.main(["key", *arguments, "--file", str(path)]) == 1
    assert words in capsys.readouterr().err
    assert json.loads(path.read_text()) == {"tenants": []}
