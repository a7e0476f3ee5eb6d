"""Routing by prefix, draining, tiers in the metrics, and freeing only what no name has any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from epilora.serving.prefixes import MAX_BLOCKS, PrefixMap, block_keys
from epilora.serving.routing import Member, choose_engine
from tests.actors.fake_engine import PlainFakeEngine
from tests.serving.serving_parts import Parts, error, events, run


def test_block_keys_chain_and_depend_on_the_adapter() -> None:
    one, other = block_keys("a" * 64 + "b" * 64 + "tail", None), block_keys("a" * 64 + "c" * 64, None)
    assert (len(one), one[0], one[1] != other[1]) == (2, other[0], True)
    assert block_keys("a" * 64, "digest")[0] != one[0]
    assert block_keys("x" * 64 + "b" * 64, None)[1] != one[1]  # the same second block after another first one
    assert block_keys("short", None) == []
    assert len(block_keys(tuple(range(40)), None)) == 2
    assert len(block_keys("a" * 100_000, None)) == MAX_BLOCKS


def test_a_prefix_map_is_bounded_and_forgets() -> None:
    seen = PrefixMap(max_keys=3)
    seen.add("a", [1, 2, 3])
    assert [seen.matched("a", keys) for keys in ([1, 2, 3], [1, 9, 3], [9, 1], [])] == [3, 1, 0, 0]
    seen.add("a", [4])
    assert seen.matched("a", [1]) == 0  # the oldest made room
    seen.forget("a")
    assert seen.matched("a", [4]) == 0


def test_residence_then_load_then_prefix() -> None:
    holder = {"d": None}
    a, b, c = Member("a", holder, running=3), Member("b", holder), Member("c")
    blocks = {"a": 5, "b": 0, "c": 9}

    def matched(engine: Member) -> int:
        return blocks[engine.name]

    assert choose_engine([a, b, c], "d", matched) is a  # within the slack: the one that has met the prompt
    assert choose_engine([a, b, c], None, matched) is c
    a.running = 5
    assert choose_engine([a, b, c], "d", matched) is b  # load comes before prefix


def test_requests_that_share_a_beginning_meet_one_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = [PlainFakeEngine("a", token_s=0.02), PlainFakeEngine("b")]
        parts = Parts(tmp_path, engines=engines)
        hold = await parts.complete(stream=True, prompt=list(range(48)), max_tokens=4)  # keeps engine a busier
        first = await parts.complete(prompt=[7] * 48, max_tokens=2)
        await events(hold)
        again = [await parts.complete(prompt=[7] * 48, max_tokens=2) for _ in range(3)]
        assert first.headers["x-epilora-engine"] == "b"
        assert {reply.headers["x-epilora-engine"] for reply in again} == {"b"}
        assert (await parts.complete(prompt=[8] * 48, max_tokens=2)).headers["x-epilora-engine"] == "a"

    run(scenario())


def test_a_draining_engine_ends_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = [PlainFakeEngine("a", token_s=0.02), PlainFakeEngine("b", token_s=0.02)]
        parts = Parts(tmp_path, engines=engines)
        stream = await parts.complete(stream=True, max_tokens=5)
        assert stream.headers["x-epilora-engine"] == "a"
        refused = await parts.ask("/v1/engines/drain", {"engine": "a"})
        assert (refused.status, error(refused)["code"]) == (403, "admin_only")
        reply = await parts.ask("/v1/engines/drain", {"engine": "a"}, key="admin-key")
        assert reply.body == {"engine": "a", "draining": True, "running": 1, "waiting": 0}
        others = [await parts.complete(max_tokens=1) for _ in range(3)]
        assert {other.headers["x-epilora-engine"] for other in others} == {"b"}
        assert len(await events(stream)) == 5
        unknown = await parts.ask("/v1/engines/drain", {"engine": "z"}, key="admin-key")
        assert (unknown.status, error(unknown)["message"]) == (404, "no engine 'z'; there are a, b")
        text = (await parts.ask("/metrics")).body.decode()  # type: ignore[union-attr]
        assert 'epilora_engine{engine="a",what="draining"} 1.0' in text
        await parts.ask("/v1/engines/drain", {"engine": "a", "drain": False}, key="admin-key")
        assert (await parts.complete(max_tokens=1)).headers["x-epilora-engine"] == "a"
        actions = [row.action for row in parts.store.store.audit()]
        assert actions == ["drain", "undrain"]

    run(scenario())


def test_tiers_are_in_the_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[PlainFakeEngine(slots=1)])
        one, other = parts.publish("one", 1), parts.publish("other", 2)
        for name in ("one", "one", "one", "other", "one"):
            assert (await parts.complete(model=name)).status == 200
        text = (await parts.ask("/metrics")).body.decode()  # type: ignore[union-attr]
        sizes = parts.store.store.content_bytes([one.digest, other.digest, "f" * 64])
        assert set(sizes) == {one.digest, other.digest}
        assert "epilora_adapter_slot_hits_total 3.0" in text
        assert "epilora_adapter_slot_stale_total 1.0" in text  # the last: `other` had taken its slot
        assert f'epilora_engine{{engine="base",what="slot_bytes"}} {float(sizes[one.digest])}' in text
        assert 'epilora_store{what="host_hits"} 3.0' in text  # three loads, published tensors still in memory
        assert f'epilora_store{{what="disk_bytes"}} {float(sum(sizes.values()))}' in text
        assert 'epilora_store{what="disk_reads"} 0.0' in text

    run(scenario())


def test_unloading_a_name_keeps_content_that_another_name_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PlainFakeEngine()
        parts = Parts(tmp_path, engines=[engine])
        version = parts.publish("tone", 1)
        twin = parts.publish("twin", 1)
        assert version.digest == twin.digest
        assert (await parts.complete(model="tone")).status == 200
        assert (await parts.ask("/v1/unload_lora_adapter", {"lora_name": "tone"}, key="admin-key")).status == 200
        assert version.digest in engine.loaded
        # another replica may have loaded it: this core never did
        other = Parts(tmp_path, engines=[engine])
        assert (await other.ask("/v1/unload_lora_adapter", {"lora_name": "twin"}, key="admin-key")).status == 200
        assert not engine.loaded

    run(scenario())


def test_a_url_counts_as_the_remote_tier(tmp_path: Path) -> None:
    import fsspec

    parts = Parts(tmp_path / "store")
    parts.publish("tone", 1)
    folder = parts.store.store.export_peft("tone", tmp_path / "peft")
    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe(f"/tiers/{file.name}", file.read_bytes())
    before = parts.store.store.stats()
    parts.store.store.import_peft("memory://tiers", "far")
    after = parts.store.store.stats()
    assert (before.remote_reads, after.remote_reads) == (0, 1)
    assert after.remote_read_bytes == 2 * 16 * np.dtype(np.float32).itemsize
    memory.rm("/tiers", recursive=True)


@pytest.mark.parametrize("what", ["slots_used", "rollout_seats", "seat_cuts", "kv_usage"])
def test_engine_state_is_in_the_metrics(what: str, tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    text = run(parts.ask("/metrics")).body.decode()
    assert f'epilora_engine{{engine="base",what="{what}"}}' in text
