"""Checkpoints: complete or absent, newest kept."""

from pathlib import Path

import pytest

from jobs.checkpoints import Checkpoints, LoopState


def state(step: int) -> LoopState:
    return LoopState(step, step * 4, f"digest-{step}", "config")


def test_latest_is_the_newest_and_old_ones_go(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        kept.save(state(step), f"trainer {step}".encode())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000010"]
    assert kept.latest() == (state(10), b"trainer 10")


def test_none_at_first_and_half_written_ones_do_not_count(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    assert kept.latest() is None
    kept.save(state(4), b"whole")
    half = tmp_path / ".partial-000005-1"
    half.mkdir()
    (half / "trainer.bin").write_bytes(b"ha")
    torn = tmp_path / "step-000006"
    torn.mkdir()
    (torn / "trainer.bin").write_bytes(b"no loop.json")
    assert kept.latest() == (state(4), b"whole")


def test_a_crash_before_the_rename_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    kept.save(state(1), b"one")
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        kept.save(state(2), b"two")
    monkeypatch.undo()
    assert kept.latest() == (state(1), b"one")
