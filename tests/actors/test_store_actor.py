"""The store as a detached actor: same values and errors as the class, and everything still there after it
was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.adapter_store import start_store
from epilora.errors import AdapterNotFound, AdapterRejected
from tests.store.adapters_for_tests import SPEC, tensors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]
BASE_OF = {"base_model": "org/tiny", "base_digest": "d" * 64}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray.init(
        address="local",
        namespace="epilora",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
        _system_config={"prestart_worker_first_driver": False},
    )
    yield start_store(tmp_path_factory.mktemp("store"))
    ray.shutdown()


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=30)


def test_values_and_errors_are_the_classs_own(store: Any) -> None:
    version = get(store.publish.remote("a", SPEC, tensors(1), **BASE_OF, metadata={"step": 1}, owner="acme"))
    assert get(store.resolve.remote("acme/a")) == version
    got = get(store.tensors.remote(version.digest))
    assert all(np.array_equal(got[name], tensor) for name, tensor in tensors(1).items())
    assert get(store.names.remote(tenant="acme")) == ["a"]
    assert get(store.current.remote(tenant="bolt")) == []
    with pytest.raises(AdapterNotFound, match="existing adapters: acme/a"):
        get(store.resolve.remote("ghost"))
    with pytest.raises(AdapterRejected, match="no LoRA tensors"):
        get(store.publish.remote("b", SPEC, {}, **BASE_OF))
    with pytest.raises(ValueError, match="adapter name"):
        get(store.publish.remote("a/b/c", SPEC, tensors(1), **BASE_OF))


def test_start_store_finds_the_running_one(store: Any, tmp_path: Path) -> None:
    again = start_store(tmp_path / "elsewhere")
    assert get(again.ready.remote()) == get(store.ready.remote())
    assert not (tmp_path / "elsewhere").exists()


def test_imports_only_from_allowed_roots(store: Any, tmp_path: Path) -> None:
    get(store.publish.remote("exported", SPEC, tensors(2), **BASE_OF))
    folder = get(store.export_peft.remote("exported", str(tmp_path / "in" / "peft")))
    (tmp_path / "link").symlink_to(folder)
    roots = [str(tmp_path / "other")]
    for path in (folder, f"{tmp_path}/other/../in/peft", str(tmp_path / "link")):
        with pytest.raises(AdapterRejected, match="where adapters may be read from"):
            get(store.import_peft.remote(path, "b", import_roots=roots))
    imported = get(store.import_peft.remote(folder, "b", import_roots=[str(tmp_path / "in")]))
    assert imported.digest == get(store.resolve.remote("exported")).digest


def test_a_killed_store_comes_back_with_everything(store: Any) -> None:
    version = get(store.publish.remote("kept", SPEC, tensors(3), **BASE_OF))
    pid = get(store.pid.remote())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    found = None
    while found is None and time.monotonic() < deadline:
        try:
            found = ray.get(store.resolve.remote("kept"), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            time.sleep(0.2)
    assert found == version
    assert get(store.pid.remote()) != pid
    assert get(store.publish.remote("kept", SPEC, tensors(4), **BASE_OF)).version == 2
    assert get(store.gc.remote()) == []
