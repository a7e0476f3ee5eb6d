"""Ray shell around AdapterStore: one detached actor "store" in namespace "epilora" that everything on the cluster asks.

    handle = start_store("runs/store")          # the running one, if there is one
    version = ray.get(handle.resolve.remote("name@3"))

A restarted actor finds everything on disk again. Methods run in threads; the class below them is thread-safe. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from epilora.store import AdapterStore, AuditRow, StoreStats
from epilora.store.peft_files import base_from_checkpoint
from epilora.store.sources import resolve_source
from epilora.types import AdapterSpec, AdapterVersion

NAMESPACE = "epilora"
STORE_NAME = "store"

Versions = list[AdapterVersion]  # the actor has a method called `list`
Strings = list[str]
Rows = list[AuditRow]


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=16)  # type: ignore[call-overload]
class AdapterStoreActor:
    """See `epilora.store.AdapterStore`; same methods, same errors. root: folder on the actor's node."""

    def __init__(self, root: str, host_cache_bytes: int = 256 << 20) -> None:
        self._store = AdapterStore(root, host_cache_bytes=host_cache_bytes)

    def ready(self) -> str:
        """The store's folder."""
        return str(self._store.root.resolve())

    def identity(self) -> tuple[str, str]:
        return self._store.identity()

    def pid(self) -> int:
        return os.getpid()

    def publish(
        self,
        name: str,
        spec: AdapterSpec,
        tensors: Mapping[str, Any],
        *,
        base_model: str,
        base_digest: str,
        metadata: Mapping[str, Any] | None = None,
        owner: str = "",
        **options: Any,
    ) -> AdapterVersion:
        return self._store.publish(
            name,
            spec,
            tensors,
            base_model=base_model,
            base_digest=base_digest,
            metadata=metadata,
            owner=owner,
            **options,
        )

    def import_peft(
        self,
        folder: str,
        name: str,
        *,
        base_checkpoint: str = "",
        linear_modules: Sequence[str] = (),
        import_roots: Sequence[str] = (),
        **options: Any,
    ) -> AdapterVersion:
        """Import a PEFT folder or URL after preflight against the base's shapes.

        base_checkpoint: the base's folder, where shapes are read; a name without local files checks what needs no base.
        linear_modules: the modules that may be adapted, () for all linear ones. import_roots: folders `folder` must be
        in.
        """
        source = resolve_source(folder, import_roots)
        base = None
        if base_checkpoint and any(Path(base_checkpoint).glob("*.safetensors")):
            base = base_from_checkpoint(base_checkpoint)
            if linear_modules:
                base = {module: shape for module, shape in base.items() if module in set(linear_modules)}
        version, _ = self._store.import_peft(source, name, base=base, **options)
        return version

    def export_peft(self, ref: str, folder: str, *, tenant: str | None = None) -> str:
        return str(self._store.export_peft(ref, folder, tenant=tenant))

    @ray.method(max_task_retries=3)
    def resolve(self, ref: str, *, tenant: str | None = None) -> AdapterVersion:
        return self._store.resolve(ref, tenant=tenant)

    @ray.method(max_task_retries=3)
    def tensors(self, digest: str) -> dict[str, Any]:
        return self._store.tensors(digest)

    @ray.method(max_task_retries=3)
    def names(self, *, owner: str | None = None, tenant: str | None = None) -> Strings:
        return self._store.names(owner=owner, tenant=tenant)

    @ray.method(max_task_retries=3)
    def current(self, *, tenant: str | None = None, offset: int = 0, limit: int = 100) -> Versions:
        return self._store.current(tenant=tenant, offset=offset, limit=limit)

    @ray.method(max_task_retries=3)
    def versions(self, name: str, *, owner: str | None = None, tenant: str | None = None) -> Versions:
        return self._store.versions(name, owner=owner, tenant=tenant)

    @ray.method(max_task_retries=3)
    def list(self, *, offset: int = 0, limit: int = 100, owner: str | None = None) -> Versions:
        return self._store.list(offset=offset, limit=limit, owner=owner)

    def promote(self, name: str, version: int, *, owner: str | None = None, actor: str = "") -> AdapterVersion:
        return self._store.promote(name, version, owner=owner, actor=actor)

    def rollback(self, name: str, *, owner: str | None = None, actor: str = "") -> AdapterVersion:
        return self._store.rollback(name, owner=owner, actor=actor)

    def delete(self, name: str, *, owner: str | None = None, actor: str = "") -> Strings:
        return self._store.delete(name, owner=owner, actor=actor)

    @ray.method(max_task_retries=3)
    def pin(self, digest: str, holder: str, *, actor: str = "") -> None:
        self._store.pin(digest, holder, actor=actor)

    @ray.method(max_task_retries=3)
    def unpin(self, digest: str, holder: str, *, actor: str = "") -> None:
        self._store.unpin(digest, holder, actor=actor)

    @ray.method(max_task_retries=3)
    def pins(self, digest: str) -> Strings:
        return self._store.pins(digest)

    def gc(self, keep_latest: int = 3, *, actor: str = "") -> Strings:
        return self._store.gc(keep_latest, actor=actor)

    def note(self, action: str, **fields: Any) -> None:
        self._store.note(action, **fields)

    def record_probe(self, digest: str, base_digest: str, result: Mapping[str, Any], *, actor: str = "") -> None:
        self._store.record_probe(digest, base_digest, result, actor=actor)

    @ray.method(max_task_retries=3)
    def record_conversion(self, original: str, base_digest: str, adapter_dtype: str, copy: str, **found: Any) -> None:
        self._store.record_conversion(original, base_digest, adapter_dtype, copy, **found)

    def conversion(self, original: str, base_digest: str, adapter_dtype: str) -> dict[str, Any] | None:
        return self._store.conversion(original, base_digest, adapter_dtype)

    def stored_as(self, original: str, base_digest: str, adapter_dtype: str) -> AdapterVersion | None:
        return self._store.stored_as(original, base_digest, adapter_dtype)

    def probe(self, digest: str, base_digest: str) -> dict[str, Any] | None:
        return self._store.probe(digest, base_digest)

    @ray.method(max_task_retries=3)
    def audit(self, *, after_id: int = 0, limit: int = 100, owner: str | None = None) -> Rows:
        return self._store.audit(after_id=after_id, limit=limit, owner=owner)

    @ray.method(max_task_retries=3)
    def owner_usage(self, owner: str) -> tuple[int, int]:
        return self._store.owner_usage(owner)

    @ray.method(max_task_retries=3)
    def change_count(self) -> int:
        return self._store.change_count()

    @ray.method(max_task_retries=3)
    def content_bytes(self, digests: Sequence[str]) -> dict[str, int]:
        return self._store.content_bytes(digests)

    @ray.method(max_task_retries=3)
    def stats(self) -> StoreStats:
        return self._store.stats()


def start_store(root: str | Path, *, name: str = STORE_NAME, namespace: str = NAMESPACE, **kwargs: Any) -> Any:
    """Handle of the detached store actor, started if it does not run. kwargs: host_cache_bytes."""
    options = {"name": name, "namespace": namespace, "lifetime": "detached", "get_if_exists": True}
    return AdapterStoreActor.options(**options).remote(str(Path(root).resolve()), **kwargs)  # type: ignore[attr-defined]
