"""The adapter versions an engine holds: loading them into slots, checked and read back, and who uses them.

`epilora.adapters.slots.SlotMap` decides which slot; the worker methods do the work. Methods that reach the worker run in
the step thread; the others take a lock and run anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epilora.adapters.digest import adapter_digest
from epilora.adapters.peft_io import config_of
from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterRejected, BaseMismatch
from epilora.types import AdapterVersion, LoadReceipt


class Residents:
    """Versions in slots. rpc: calls a worker method (of rank 0) by name; used in the step thread only."""

    def __init__(self, num_slots: int, rpc: Callable[..., Any]) -> None:
        self._rpc = rpc
        self._lock = threading.RLock()
        self._slots = SlotMap(num_slots)
        self._versions: dict[str, AdapterVersion] = {}
        self._receipts: dict[str, LoadReceipt] = {}

    def loaded(self) -> tuple[str, ...]:
        """Digests new requests may use."""
        with self._lock:
            return self._slots.loaded()

    def acquire(self, digest: str) -> tuple[int, str]:
        """One more running request: (the engine's adapter id, KV namespace). Raises AdapterNotFound."""
        with self._lock:
            int_id = self._slots.acquire(digest)
            return int_id, self._versions[digest].kv_namespace

    def release(self, digest: str) -> list[int]:
        """One running request less; ids to give to `unload_ids` now."""
        with self._lock:
            return self._slots.release(digest)

    def pin(self, digest: str, holder: str) -> None:
        """Keep a loaded version from making room for another. Raises AdapterNotFound."""
        with self._lock:
            self._slots.pin(digest, holder)

    def unpin(self, digest: str, holder: str) -> None:
        """Take a pin back."""
        with self._lock:
            self._slots.unpin(digest, holder)

    # ---- step thread ----------------------------------------------------------------------------------------------

    def load(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        """Put a version into a slot and read it back. Idempotent by digest.

        Raises AdapterRejected, NoFreeSlot; nothing a request could see has changed then.
        """
        digest, config = version.digest, config_of(version.spec, version.base_model)
        self._rpc("epilora_check_adapter", config, dict(tensors))  # before anything makes room for it
        with self._lock:
            int_id, leaving = self._slots.reserve(digest)
            if int_id is None:
                return self._receipts[digest]
        self.unload_ids(leaving)
        loaded = self._rpc("epilora_load_adapter", int_id, version.kv_namespace, config, dict(tensors))
        if loaded["readback_digest"] != loaded["expected_digest"]:
            self._rpc("epilora_unload_adapter", int_id)
            raise AdapterRejected(
                f"adapter {version.ref}: slot {loaded['slot']} reads back other bytes than were loaded"
            )
        receipt = LoadReceipt(digest=digest, **loaded)
        with self._lock:
            self._slots.commit(digest, int_id)
            self._versions[digest], self._receipts[digest] = version, receipt
        return receipt

    def unload(self, digest: str) -> None:
        """Free the slot once no live request uses it. Raises AdapterNotFound."""
        with self._lock:
            leaving = self._slots.unload(digest)
        self.unload_ids(leaving)

    def unload_ids(self, int_ids: Sequence[int]) -> None:
        """Take these adapters out of the engine and forget what is no longer here."""
        for int_id in int_ids:
            self._rpc("epilora_unload_adapter", int_id)
        with self._lock:
            here = set(self._slots.loaded()) | {d for d in self._versions if self._slots.live(d)}
            for digest in [d for d in self._versions if d not in here]:
                del self._versions[digest]
                self._receipts.pop(digest, None)


def check_version(version: AdapterVersion, tensors: Mapping[str, Any], base_digest: str) -> None:
    """Raise BaseMismatch or AdapterRejected if a version is for another base or its tensors are not its content."""
    if version.base_digest and version.base_digest != base_digest:
        raise BaseMismatch(
            f"adapter {version.ref} was trained on base {version.base_digest[:12]}; this engine holds {base_digest[:12]}"
        )
    try:
        content = adapter_digest(version.spec, tensors)
    except TypeError as err:
        raise AdapterRejected(f"adapter {version.ref}: {err}") from err
    if content != version.digest:
        raise AdapterRejected(
            f"adapter {version.ref}: its spec and tensors have digest {content[:12]}, not {version.digest[:12]}"
        )
