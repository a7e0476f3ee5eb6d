"""A run's checkpoints: complete folders, or none. Written beside and renamed, so a crash leaves no half of one."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoopState:
    """What the loop needs to go on. step: optimizer steps done; cursor: next training problem; policy_digest: the version
    that step published; config_digest: of the settings that must not change under a resumed run."""

    step: int
    cursor: int
    policy_digest: str
    config_digest: str


class Checkpoints:
    """Folders `step-000012` under `root`, each with loop.json and trainer.bin; the newest `keep` stay."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep

    def save(self, state: LoopState, trainer_state: bytes) -> Path:
        """Write one checkpoint durably; it exists completely when this returns."""
        self._root.mkdir(parents=True, exist_ok=True)
        final = self._root / f"step-{state.step:06d}"
        partial = self._root / f".partial-{state.step:06d}-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_durably(partial / "trainer.bin", trainer_state)
        _write_durably(partial / "loop.json", json.dumps(asdict(state), indent=1).encode())
        if final.exists():  # a resumed run repeats a step whose checkpoint was the last one
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(self._root)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> tuple[LoopState, bytes] | None:
        """The newest complete checkpoint, or None."""
        complete = self._complete()
        if not complete:
            return None
        folder = complete[-1]
        state = LoopState(**json.loads((folder / "loop.json").read_text()))
        return state, (folder / "trainer.bin").read_bytes()

    def _complete(self) -> list[Path]:
        return sorted(p for p in self._root.glob("step-*") if (p / "loop.json").exists())


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
