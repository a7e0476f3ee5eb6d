"""`kill -9` at every durable step of every operation: nothing acknowledged is lost, nothing is half visible.

A forked child performs one operation on a copy of a prepared store and is killed at step k, for every k. The parent
then opens the folder and checks it as a whole.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epilora.store import AdapterStore, adapter_digest
from tests.store.adapters_for_tests import SPEC, tensors

BASE_OF = {"base_model": "org/tiny", "base_digest": "d" * 64}

OPERATIONS: dict[str, Callable[[AdapterStore], object]] = {
    "publish": lambda store: store.publish("a", SPEC, tensors(9), **BASE_OF, metadata={"step": 9}),
    "publish-new-owner": lambda store: store.publish("z", SPEC, tensors(9), **BASE_OF, owner="acme"),
    "promote": lambda store: store.promote("a", 1),
    "rollback": lambda store: store.rollback("a"),
    "delete": lambda store: store.delete("b"),
    "pin": lambda store: store.pin(adapter_digest(SPEC, tensors(1)), "job"),
    "unpin": lambda store: store.unpin(adapter_digest(SPEC, tensors(2)), "keeper"),
    "gc": lambda store: store.gc(keep_latest=1),
    "probe": lambda store: store.record_probe(adapter_digest(SPEC, tensors(1)), "d" * 64, {"dlogp": 1.0}),
}


def prepare(root: Path) -> None:
    store = AdapterStore(root)
    for seed in (1, 2, 3, 4):
        store.publish("a", SPEC, tensors(seed), **BASE_OF)
    store.publish("b", SPEC, tensors(5), **BASE_OF)
    store.pin(adapter_digest(SPEC, tensors(2)), "keeper")
    store.close()


def run_in_child(
    root: Path, operation: Callable[[AdapterStore], object], kill_at: int | None
) -> tuple[bool, list[str]]:
    """(did the operation return, names of the steps passed). kill_at: index of the step at which the child dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        steps = 0

        def on_step(name: str) -> None:
            nonlocal steps
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writer, name.encode() + b"\n")
            steps += 1

        try:
            operation(AdapterStore(root, on_step=on_step))
            os.write(writer, b"ACK\n")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = pipe.read().decode().split()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (kill_at is not None)
    return "ACK" in lines, [line for line in lines if line != "ACK"]


def snapshot(root: Path) -> dict[str, object]:
    """Everything a reader can see, after checking that it is whole."""
    store = AdapterStore(root)
    seen: dict[str, object] = {"names": {name: store.resolve(name).version for name in store.names()}}
    seen["versions"] = sorted((v.owner, v.ref, v.digest) for v in store.list(limit=1000))
    for version in store.list(limit=1000):
        found = store.tensors(version.digest)
        assert adapter_digest(version.spec, found) == version.digest
        seen[f"pins {version.digest}"] = store.pins(version.digest)
        seen[f"probe {version.digest}"] = store.probe(version.digest, "d" * 64)
    seen["actions"] = [row.action for row in store.audit(limit=1000)]
    assert store.database.connection().execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert store.database.connection().execute("PRAGMA foreign_key_check").fetchall() == []
    store.close()
    return seen


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kill_at_every_step(operation: str, tmp_path: Path) -> None:
    template = tmp_path / "template"
    prepare(template)
    before = snapshot(template)
    whole = tmp_path / "whole"
    shutil.copytree(template, whole)
    acknowledged, steps = run_in_child(whole, OPERATIONS[operation], None)
    assert acknowledged
    assert len(steps) >= 4
    after = snapshot(whole)
    assert after != before
    for kill_at in range(len(steps)):
        root = tmp_path / f"at{kill_at}"
        shutil.copytree(template, root)
        acknowledged, passed = run_in_child(root, OPERATIONS[operation], kill_at)
        assert not acknowledged
        assert passed == steps[:kill_at]
        seen = snapshot(root)
        committed = "db:committed" in steps[: kill_at + 1]
        assert seen == (after if committed else before), f"killed at {steps[kill_at]}"
        # The store goes on: the same operation succeeds, and gc leaves exactly the files that rows refer to.
        store = AdapterStore(root)
        if not committed:
            OPERATIONS[operation](store)
            assert snapshot(root) == after
        store.gc(keep_latest=1000)
        files = {path.stem for path in root.glob("objects/*/*")}
        rows = {row[0] for row in store.database.connection().execute("SELECT digest FROM contents")}
        assert files == rows
        assert list((root / "temp").iterdir()) == []
        store.close()
        shutil.rmtree(root)


def test_steps_cover_every_write_of_publish(tmp_path: Path) -> None:
    prepare(tmp_path)
    _, steps = run_in_child(tmp_path, OPERATIONS["publish"], None)
    assert steps == [
        "object:open",
        "object:half-written",
        "object:written",
        "object:synced",
        "object:renamed",
        "object:folder-synced",
        "db:begin",
        "db:content",
        "db:version",
        "db:audit",
        "db:pointer",
        "db:before-commit",
        "db:committed",
    ]


def test_an_exception_in_a_transaction_leaves_nothing(tmp_path: Path) -> None:
    prepare(tmp_path)
    before = snapshot(tmp_path)

    def fail(name: str) -> None:
        if name == "db:pointer":
            raise OSError("disk full")

    store = AdapterStore(tmp_path, on_step=fail)
    with pytest.raises(OSError, match="disk full"):
        OPERATIONS["publish"](store)
    assert snapshot(tmp_path) == before
    assert np.array_equal(
        AdapterStore(tmp_path).tensors(adapter_digest(SPEC, tensors(1)))[next(iter(tensors(1)))],
        next(iter(tensors(1).values())),
    )
