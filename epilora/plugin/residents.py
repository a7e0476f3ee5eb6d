"""The adapter versions an engine holds: loading them into slots, checked and read back, and who uses them.

`epilora.adapters.slots.SlotMap` decides which slot; the worker methods do the work. Methods that reach the worker run in
the step thread; the others take a lock and run anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epilora.adapters.device_tensors import HandedOver
from epilora.adapters.digest import adapter_digest
from epilora.adapters.peft_io import config_of
from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterRejected, BaseMismatch
from epilora.types import AdapterDraft, AdapterVersion, DraftReceipt, LoadReceipt


class Residents:
    """Versions in slots. workers: calls a worker method on every rank by name; used in the step thread only."""

    def __init__(self, num_slots: int, workers: Callable[..., list[Any]]) -> None:
        self._workers = workers
        self._lock = threading.RLock()
        self._slots = SlotMap(num_slots)
        self._namespaces: dict[str, str] = {}  # digest or draft id -> KV namespace of what lies in the slot
        self._receipts: dict[str, LoadReceipt | DraftReceipt] = {}
        self._sealed: dict[str, str] = {}  # draft id -> digest, while the version is here

    def loaded(self) -> tuple[str, ...]:
        """Digests of the versions new requests may use."""
        with self._lock:
            return tuple(key for key in self._slots.loaded() if not self._is_draft(key))

    def drafts(self) -> tuple[str, ...]:
        """Ids of the drafts new requests may use."""
        with self._lock:
            return tuple(key for key in self._slots.loaded() if self._is_draft(key))

    def _is_draft(self, key: str) -> bool:
        return isinstance(self._receipts.get(key), DraftReceipt)

    def acquire(self, digest: str) -> tuple[int, str]:
        """One more running request: (the engine's adapter id, KV namespace). Raises AdapterNotFound."""
        with self._lock:
            digest = self._sealed.get(digest, digest)
            int_id = self._slots.acquire(digest)
            return int_id, self._namespaces[digest]

    def release(self, digest: str) -> list[int]:
        """One running request less; ids to give to `unload_ids` now."""
        with self._lock:
            return self._slots.release(self._sealed.get(digest, digest))

    def pin(self, digest: str, holder: str) -> None:
        """Keep a loaded version from making room for another. Raises AdapterNotFound."""
        with self._lock:
            self._slots.pin(self._sealed.get(digest, digest), holder)

    def unpin(self, digest: str, holder: str) -> None:
        """Take a pin back."""
        with self._lock:
            self._slots.unpin(self._sealed.get(digest, digest), holder)

    # ---- step thread ----------------------------------------------------------------------------------------------

    def load(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        """Put a version into a slot and read it back. Idempotent by digest.

        Raises AdapterRejected, NoFreeSlot; nothing a request could see has changed then.
        """
        began = time.perf_counter()
        with self._lock:
            known = self._receipts.get(version.digest)
        config = config_of(version.spec, version.base_model)
        placed = self._place(version.digest, version.ref, config, dict(tensors))
        if placed is None:
            assert isinstance(known, LoadReceipt), "a loaded version has its receipt"
            return known
        int_id, facts = placed
        read = self._verify(version.ref, int_id)
        load_ms = (time.perf_counter() - began) * 1e3
        receipt = LoadReceipt(
            version.digest, readback_digest=read[0], expected_digest=read[1], load_ms=load_ms, **facts
        )
        self._commit(version.digest, int_id, version.kv_namespace, receipt)
        return receipt

    def load_draft(self, draft: AdapterDraft, tensors: HandedOver) -> DraftReceipt:
        """Put what a trainer on this GPU handed over into a slot. Raises as `load`, ValueError if the draft's id was used.

        The slot is read back when the draft is sealed: a draft is sampled from before that.
        """
        began = time.perf_counter()
        key = draft.draft_id
        with self._lock:
            if key in self._namespaces or key in self._sealed:
                raise ValueError(f"draft {key!r} is loaded already; every content needs an id of its own")
        placed = self._place(key, f"draft {key}", config_of(draft.spec, draft.base_model), tensors)
        assert placed is not None, "no slot has the id of a new draft"
        int_id, facts = placed
        receipt = DraftReceipt(key, load_ms=(time.perf_counter() - began) * 1e3, **facts)
        self._commit(key, int_id, draft.kv_namespace, receipt)
        return receipt

    def seal(self, draft_id: str, version: AdapterVersion, folded_digest: str) -> LoadReceipt:
        """The draft has become a version: requests find it by the version's digest too.

        folded_digest: of the version's tensors (`adapters.fold`). Raises AdapterNotFound; AdapterRejected if the engine
        read other tensors or the slot holds others (the draft leaves then). If the version is loaded already, the draft
        leaves and its id means that version.
        """
        with self._lock:
            int_id = self._slots.int_id(draft_id)
            draft = self._receipts[draft_id]
            assert isinstance(draft, DraftReceipt), "a draft has its receipt"
            known = self._receipts.get(version.digest)
        try:
            readback, expected, folded = self._verify(f"draft {draft_id}", int_id)
            if folded != folded_digest:
                raise AdapterRejected(
                    f"adapter {version.ref}: its tensors fold to {folded_digest[:12]}, the engine read {folded[:12]} as"
                    f" draft {draft_id}: they changed while they were handed over"
                )
        except AdapterRejected:
            with self._lock:
                leaving = self._slots.unload(draft_id, even_pinned=True)
            self.unload_ids(leaving)
            raise
        if isinstance(known, LoadReceipt):
            with self._lock:
                leaving = self._slots.unload(draft_id, even_pinned=True)
                if leaving:  # nobody runs on the draft: its id may mean the version at once
                    self._sealed[draft_id] = version.digest
            self.unload_ids(leaving)
            return known
        receipt = LoadReceipt(
            version.digest, draft.slot, readback, expected, draft.modules, draft.base_modules, draft.load_ms
        )
        with self._lock:
            self._slots.rename(draft_id, version.digest)
            self._namespaces[version.digest] = self._namespaces.pop(draft_id)
            del self._receipts[draft_id]
            self._receipts[version.digest] = receipt
            self._sealed[draft_id] = version.digest
        return receipt

    def _place(
        self, key: str, what: str, config: dict[str, Any], tensors: dict[str, Any] | HandedOver
    ) -> tuple[int, dict[str, Any]] | None:
        """Check, make room, fill the slot: (adapter id, receipt's fields); None if `key` is loaded already."""
        self._rpc("epilora_stage_adapter", what, config, tensors)  # before anything makes room for it
        with self._lock:
            int_id, leaving = self._slots.reserve(key)
            if int_id is None:
                return None
        self.unload_ids(leaving, refill=True)
        return int_id, self._rpc("epilora_place_adapter", int_id)

    def _verify(self, what: str, int_id: int) -> tuple[str, str, str]:
        """(what rank 0's slot holds, what it should hold, folded digest). Raises AdapterRejected if any rank's slot holds
        something else.
        """
        ranks = self._workers("epilora_verify_adapter", int_id)
        for rank, read in enumerate(ranks):
            if read["readback_digest"] != read["expected_digest"]:
                self._rpc("epilora_unload_adapter", int_id)
                raise AdapterRejected(f"adapter {what}: rank {rank}'s slot reads back other bytes than were loaded")
        return ranks[0]["readback_digest"], ranks[0]["expected_digest"], ranks[0]["folded_digest"]

    def _rpc(self, method: str, *args: Any) -> Any:
        """Rank 0's result."""
        return self._workers(method, *args)[0]

    def _commit(self, key: str, int_id: int, namespace: str, receipt: LoadReceipt | DraftReceipt) -> None:
        with self._lock:
            self._slots.commit(key, int_id)
            self._namespaces[key], self._receipts[key] = namespace, receipt

    def unload(self, digest: str) -> None:
        """Free the slot once no live request uses it, unless somebody has the version pinned. Raises AdapterNotFound."""
        with self._lock:
            leaving = self._slots.unload(self._sealed.get(digest, digest))
        self.unload_ids(leaving)

    def unload_ids(self, int_ids: Sequence[int], *, refill: bool = False) -> None:
        """Take these adapters out of the engine and forget what is no longer here. refill: another takes the slot now."""
        for int_id in int_ids:
            self._rpc("epilora_unload_adapter", int_id, refill)
        with self._lock:
            here = set(self._slots.loaded()) | {key for key in self._namespaces if self._slots.live(key)}
            for key in [key for key in self._namespaces if key not in here]:
                del self._namespaces[key]
                self._receipts.pop(key, None)
            self._sealed = {draft: digest for draft, digest in self._sealed.items() if digest in here}


def check_base(what: str, wanted: str, held: str) -> None:
    """Raise BaseMismatch if an adapter was trained on another base; "" means that it does not say."""
    if wanted and wanted != held:
        raise BaseMismatch(f"adapter {what} was trained on base {wanted[:12]}; this engine holds {held[:12]}")


def check_content(version: AdapterVersion, tensors: Mapping[str, Any]) -> None:
    """Raise AdapterRejected if the tensors are not the version's content."""
    try:
        content = adapter_digest(version.spec, tensors)
    except TypeError as err:
        raise AdapterRejected(f"adapter {version.ref}: {err}") from err
    if content != version.digest:
        raise AdapterRejected(
            f"adapter {version.ref}: its spec and tensors have digest {content[:12]}, not {version.digest[:12]}"
        )
