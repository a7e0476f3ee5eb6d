"""Immutable files addressed by digest: `objects/<first two>/<digest>.safetensors`.

A file appears whole or not at all: temporary file, write, fsync, rename, fsync of the folder. Readers verify the
content against the digest in its name, so a damaged file is an error and never an adapter. Shared file locks keep the
collector from deleting a file between its rename and the row that refers to it.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save as save_safetensors

from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

from .digest import adapter_digest, spec_json
from .safetensors_io import read_tensors

Step = Callable[[str], None]


class DamagedObject(RuntimeError):
    """A stored file does not have the content its name says."""


def fsync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectFiles:
    """The files of one store. step: called with a name before and after every durable write (crash injection)."""

    def __init__(self, root: Path, step: Step) -> None:
        self._objects, self._temp, self._lock = root / "objects", root / "temp", root / "gc.lock"
        self._step = step
        for folder in (self._objects, self._temp):
            folder.mkdir(parents=True, exist_ok=True)
        fsync_dir(root)

    @contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Held shared by publishers (file first, row after), exclusively by the collector. Dies with the process."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def path(self, digest: str) -> Path:
        return self._objects / digest[:2] / f"{digest}.safetensors"

    def write(self, digest: str, spec: AdapterSpec, tensors: Mapping[str, np.ndarray]) -> int:
        """Make the file durable if it is not there (or is damaged) and return its size in bytes."""
        target = self.path(digest)
        if target.exists():
            try:
                self.read(digest, spec)
                fsync_dir(target.parent)
                return target.stat().st_size
            except DamagedObject:
                pass  # written anew below, over the damaged one
        data = save_safetensors(dict(tensors), metadata={"spec": spec_json(spec), "digest": digest})
        if not target.parent.exists():
            target.parent.mkdir(exist_ok=True)
            fsync_dir(self._objects)
        temp = self._temp / f"{digest}.{os.getpid()}.{uuid.uuid4().hex}"
        self._step("object:open")
        with open(temp, "xb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self._step("object:half-written")
            file.write(data[len(data) // 2 :])
            file.flush()
            self._step("object:written")
            os.fsync(file.fileno())
        self._step("object:synced")
        os.rename(temp, target)
        self._step("object:renamed")
        fsync_dir(target.parent)
        self._step("object:folder-synced")
        return len(data)

    def read(self, digest: str, spec: AdapterSpec) -> dict[str, np.ndarray]:
        """Verified fp32 arrays (read-only views of one buffer). Raises FileNotFoundError, DamagedObject."""
        data = self.path(digest).read_bytes()
        try:
            tensors, _ = read_tensors(data)
        except AdapterRejected as err:
            raise DamagedObject(
                f"{self.path(digest)} is damaged ({err}); publish the adapter again or restore it"
            ) from err
        found = adapter_digest(spec, tensors)
        if found != digest:
            raise DamagedObject(
                f"{self.path(digest)} has content {found[:12]}, its name says {digest[:12]};"
                " publish it again or restore it"
            )
        return tensors

    def remove(self, digest: str) -> None:
        """Unlink and make it durable. The caller holds the exclusive lock."""
        target = self.path(digest)
        self._step("gc:unlink")
        target.unlink(missing_ok=True)
        if target.parent.exists():
            fsync_dir(target.parent)
        self._step("gc:unlinked")

    def sweep(self, keep: Callable[[str], bool]) -> list[str]:
        """Delete temporary files and objects that `keep` does not know (left by a crash). Exclusive lock held."""
        for temp in self._temp.iterdir():
            temp.unlink(missing_ok=True)
        orphans = [path.stem for path in sorted(self._objects.glob("*/*.safetensors")) if not keep(path.stem)]
        for digest in orphans:
            self.remove(digest)
        return orphans
