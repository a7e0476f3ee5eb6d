"""The slot map: nothing in use is ever put out, and a version that leaves waits for its last request."""

import random

import pytest

from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterNotFound, NoFreeSlot


def load(slots: SlotMap, digest: str) -> list[int]:
    int_id, out = slots.reserve(digest)
    if int_id is not None:
        slots.commit(digest, int_id)
    return out


def test_ids_are_never_used_twice():
    slots = SlotMap(1)
    load(slots, "a")
    assert slots.int_id("a") == 1
    assert slots.unload("a") == [1]
    load(slots, "a")
    assert slots.int_id("a") == 2


def test_loading_twice_keeps_the_slot():
    slots = SlotMap(2)
    load(slots, "a")
    assert slots.reserve("a") == (None, [])


def test_least_recently_used_idle_version_makes_room():
    slots = SlotMap(2)
    load(slots, "a")
    load(slots, "b")
    slots.acquire("a")
    slots.release("a")  # a is now the newer one
    assert load(slots, "c") == [2]
    assert slots.loaded() == ("a", "c")
    with pytest.raises(AdapterNotFound, match=r"'a', 'c'"):
        slots.acquire("b")


def test_versions_in_use_or_pinned_stay():
    slots = SlotMap(2)
    load(slots, "a")
    load(slots, "b")
    slots.acquire("a")
    slots.pin("b", "job")
    with pytest.raises(NoFreeSlot, match="job"):
        slots.reserve("c")
    assert slots.loaded() == ("b", "a") or slots.loaded() == ("a", "b")
    slots.unpin("b", "job")
    assert load(slots, "c") == [2]


def test_unload_waits_for_the_last_request():
    slots = SlotMap(1)
    load(slots, "a")
    slots.acquire("a")
    slots.acquire("a")
    assert slots.unload("a") == []
    with pytest.raises(AdapterNotFound):
        slots.acquire("a")
    with pytest.raises(NoFreeSlot):
        slots.reserve("b")
    assert slots.release("a") == []
    assert slots.live("a") == 1
    assert slots.release("a") == [1]
    assert load(slots, "b") == []


def test_a_version_stays_while_another_holder_has_it_pinned():
    """Two jobs with equal seeds publish the same first adapter: one content, one slot, two pins."""
    slots = SlotMap(2)
    load(slots, "a")
    slots.pin("a", "job one")
    slots.pin("a", "job two")
    slots.unpin("a", "job one")
    assert slots.unload("a") == []
    assert slots.acquire("a") == 1
    assert slots.release("a") == []
    slots.unpin("a", "job two")
    assert slots.unload("a") == [1]
    load(slots, "b")
    slots.pin("b", "job")
    assert slots.unload("b", even_pinned=True) == [2]


def test_a_leaving_version_asked_for_again_stays():
    slots = SlotMap(1)
    load(slots, "a")
    slots.acquire("a")
    slots.unload("a")
    assert slots.reserve("a") == (None, [])
    assert slots.acquire("a") == 1
    assert slots.release("a") == []
    assert slots.release("a") == []
    assert slots.loaded() == ("a",)


def test_release_without_acquire_is_an_error():
    slots = SlotMap(1)
    load(slots, "a")
    with pytest.raises(ValueError, match="without a running request"):
        slots.release("a")


def test_random_walk_keeps_the_invariants():
    rng = random.Random(0)
    slots, live, loaded_ids = SlotMap(3), {}, {}
    for _ in range(3000):
        digest = rng.choice("abcdef")
        action = rng.choice(["load", "acquire", "release", "unload"])
        gone: list[int] = []
        try:
            if action == "load":
                int_id, gone = slots.reserve(digest)
                if int_id is not None:
                    loaded_ids[int_id] = digest
                    slots.commit(digest, int_id)
            elif action == "acquire":
                assert loaded_ids[slots.acquire(digest)] == digest
                live[digest] = live.get(digest, 0) + 1
            elif action == "release" and live.get(digest):
                live[digest] -= 1
                gone = slots.release(digest)
            elif action == "unload":
                gone = slots.unload(digest)
        except (AdapterNotFound, NoFreeSlot):
            continue
        for int_id in gone:
            assert not live.get(loaded_ids.pop(int_id)), "a version in use was put out"
        assert len(loaded_ids) <= 3
        assert all(slots.live(d) == n for d, n in live.items() if n)
