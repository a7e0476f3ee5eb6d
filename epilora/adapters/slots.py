"""Which adapter version sits in which engine slot, who uses it, and what may be put out.

A version (by digest) is *loaded* under an integer id of its own, never used twice. Live requests and pins hold it. A
version asked to leave while requests run is *leaving*: new requests no longer find it, its slot is freed with the last
request. When all slots are taken, the least recently used version that nobody holds makes room; if all are held,
NoFreeSlot.

A plain state machine without locks or tensors: its owner calls it from one place at a time and does what it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from epilora.errors import AdapterNotFound, NoFreeSlot


@dataclass
class Slot:
    """One loaded version. int_id: the engine's adapter id; live: running requests; pins: who pinned it; leaving: see
    module.
    """

    digest: str
    int_id: int
    live: int = 0
    pins: set[str] = field(default_factory=set)
    leaving: bool = False

    @property
    def held(self) -> bool:
        return self.live > 0 or bool(self.pins)


class SlotMap:
    """State of `num_slots` slots. Methods that return int ids tell the owner to unload those from the engine."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"SlotMap: num_slots={num_slots}; at least 1 is needed")
        self.num_slots = num_slots
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._next_id = 1

    def loaded(self) -> tuple[str, ...]:
        """Digests new requests may use, least recently used first."""
        return tuple(slot.digest for slot in self._slots.values() if not slot.leaving)

    def int_id(self, digest: str) -> int:
        """Id of a loaded version. Raises AdapterNotFound."""
        return self._find(digest).int_id

    def live(self, digest: str) -> int:
        """Running requests of a version, leaving ones included; 0 if it is not here."""
        slot = self._slots.get(digest)
        return slot.live if slot else 0

    def reserve(self, digest: str) -> tuple[int | None, list[int]]:
        """Make room for a version. Call `commit` once it is loaded.

        Returns (int id to load it under, ids to unload first); (None, []) if it is loaded already. A leaving version
        that is asked for again simply stays. Raises NoFreeSlot (nothing changes then).
        """
        slot = self._slots.get(digest)
        if slot is not None:
            slot.leaving = False
            self._slots.move_to_end(digest)
            return None, []
        out: list[int] = []
        if len(self._slots) >= self.num_slots:
            idle = next((s for s in self._slots.values() if not s.held), None)
            if idle is None:
                holders = ", ".join(
                    f"{s.digest[:12]} (live {s.live}, pins {sorted(s.pins)})" for s in self._slots.values()
                )
                raise NoFreeSlot(
                    f"all {self.num_slots} adapter slots are in use: {holders}; unload or unpin one, or raise max_loras"
                )
            del self._slots[idle.digest]
            out.append(idle.int_id)
        int_id = self._next_id
        self._next_id += 1
        return int_id, out

    def commit(self, digest: str, int_id: int) -> None:
        """The version is loaded under `int_id`."""
        if len(self._slots) >= self.num_slots:
            raise NoFreeSlot(f"{self.num_slots} slots are taken; reserve before commit")
        self._slots[digest] = Slot(digest, int_id)

    def acquire(self, digest: str) -> int:
        """One more running request; returns the int id. Raises AdapterNotFound (not loaded, or leaving)."""
        slot = self._find(digest)
        slot.live += 1
        self._slots.move_to_end(digest)
        return slot.int_id

    def release(self, digest: str) -> list[int]:
        """One running request less. Returns ids to unload now (a leaving version's last request ended)."""
        slot = self._slots.get(digest)
        if slot is None or slot.live < 1:
            raise ValueError(f"SlotMap: release of {digest[:12]} without a running request")
        slot.live -= 1
        return self._leave(slot)

    def unload(self, digest: str, *, even_pinned: bool = False) -> list[int]:
        """Ask a version to leave. Returns its id if nothing runs on it, else [] (it leaves with the last request).

        A pin keeps it: whoever pinned the same content (two jobs can publish equal adapters) still needs it, so one takes
        one's own pin back first. even_pinned: it must go whoever needs it. Raises AdapterNotFound.
        """
        slot = self._find(digest)
        if slot.pins and not even_pinned:
            return []
        slot.leaving = True
        slot.pins.clear()
        return self._leave(slot)

    def rename(self, old: str, new: str) -> None:
        """A loaded version goes by another digest from now on; its id, requests and pins stay.

        Raises AdapterNotFound (`old`), ValueError if `new` is loaded.
        """
        slot = self._find(old)
        if new in self._slots:
            raise ValueError(f"SlotMap: {new[:12]} is loaded already, {old[:12]} cannot take its name")
        self._slots = OrderedDict((new if key == old else key, value) for key, value in self._slots.items())
        slot.digest = new

    def pin(self, digest: str, holder: str) -> None:
        """Keep a version from being put out for another. Raises AdapterNotFound."""
        self._find(digest).pins.add(holder)

    def unpin(self, digest: str, holder: str) -> None:
        """Take a pin back; unknown versions and holders are fine."""
        slot = self._slots.get(digest)
        if slot is not None:
            slot.pins.discard(holder)

    def _leave(self, slot: Slot) -> list[int]:
        if not slot.leaving or slot.live:
            return []
        del self._slots[slot.digest]
        return [slot.int_id]

    def _find(self, digest: str) -> Slot:
        slot = self._slots.get(digest)
        if slot is None or slot.leaving:
            names = [d[:12] for d in self.loaded()]
            raise AdapterNotFound(f"adapter {digest[:12]} is not loaded in this engine; loaded are {names}")
        return slot
