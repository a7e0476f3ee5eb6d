"""The store's promises: versions are immutable, names move atomically, tenants see their own, content is verified."""

import json
import multiprocessing
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from epilora.errors import AdapterNotFound, AdapterRejected
from epilora.store import AdapterStore, adapter_digest
from epilora.store.objects import DamagedObject
from epilora.types import AdapterSpec
from tests.store.adapters_for_tests import BASE, QV, SPEC, config, tensors

BASE_OF = {"base_model": "org/tiny", "base_digest": "d" * 64}


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store")


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    return set(got) == set(want) and all(np.array_equal(got[name], want[name]) for name in want)


def test_publish_numbers_versions_and_moves_the_name(store: AdapterStore) -> None:
    first = store.publish("a", SPEC, tensors(1), **BASE_OF, metadata={"step": 1}, actor="job")
    second = store.publish("a", SPEC, tensors(2), **BASE_OF)
    assert (first.version, second.version) == (1, 2)
    assert first.digest == adapter_digest(SPEC, tensors(1)) != second.digest
    assert store.resolve("a") == second
    assert store.resolve("a@1") == first
    assert store.resolve(first.digest[:12]) == first
    assert store.resolve("a@1").metadata == {"step": 1}
    assert same(store.tensors(first.digest), tensors(1))
    assert same(AdapterStore(store.root).tensors(first.digest), tensors(1))


def test_publishing_the_latest_content_again_changes_nothing(store: AdapterStore) -> None:
    first = store.publish("a", SPEC, tensors(1), **BASE_OF)
    assert store.publish("a", SPEC, tensors(1), **BASE_OF) == first
    assert len(store.versions("a")) == 1
    other_base = store.publish("a", SPEC, tensors(1), base_model="org/tiny", base_digest="e" * 64)
    assert (other_base.version, other_base.digest) == (2, first.digest)
    assert [row.action for row in store.audit()] == ["publish", "publish"]


def test_digest_sees_content_and_not_its_wrapping() -> None:
    plain = adapter_digest(SPEC, tensors(1))
    reordered = dict(reversed(list(tensors(1).items())))
    assert adapter_digest(AdapterSpec(4, 8.0, ("v_proj", "q_proj")), reordered) == plain
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors(1).items()}
    widened = {name: tensor.astype(np.float32) for name, tensor in halves.items()}
    assert adapter_digest(SPEC, halves) == adapter_digest(SPEC, widened) != plain
    assert adapter_digest(AdapterSpec(4, 9.0, SPEC.target_modules), tensors(1)) != plain
    assert adapter_digest(AdapterSpec(4, 8.0, SPEC.target_modules, use_rslora=True), tensors(1)) != plain
    changed = tensors(1)
    changed[f"base_model.model.{QV[0]}.lora_B.weight"][0, 0] += 1e-6
    assert adapter_digest(SPEC, changed) != plain
    name_a, name_b = f"base_model.model.{QV[0]}.lora_A.weight", f"base_model.model.{QV[2]}.lora_A.weight"
    swapped = tensors(1)
    swapped[name_a], swapped[name_b] = swapped[name_b], swapped[name_a]
    assert adapter_digest(SPEC, swapped) != plain


def test_promote_and_rollback_follow_the_names_history(store: AdapterStore) -> None:
    for seed in (1, 2, 3):
        store.publish("a", SPEC, tensors(seed), **BASE_OF)
    assert store.promote("a", 1).version == 1
    assert store.resolve("a").version == 1
    assert store.rollback("a").version == 3
    assert store.rollback("a").version == 2
    assert store.rollback("a").version == 1
    with pytest.raises(ValueError, match="one version only"):
        store.rollback("a")
    with pytest.raises(AdapterNotFound, match="no version 9; the newest are 3, 2, 1"):
        store.promote("a", 9)
    quiet = store.publish("a", SPEC, tensors(4), **BASE_OF, promote=False)
    assert (quiet.version, store.resolve("a").version) == (4, 1)


def test_unknown_references_list_what_exists(store: AdapterStore) -> None:
    with pytest.raises(AdapterNotFound, match="no adapters yet"):
        store.resolve("ghost")
    store.publish("alpha", SPEC, tensors(1), **BASE_OF)
    store.publish("beta", SPEC, tensors(1), **BASE_OF, owner="acme")
    with pytest.raises(AdapterNotFound, match="existing adapters: alpha, acme/beta"):
        store.resolve("ghost")
    for ref in ("alpha@0", "alpha@x", "alpha@", "@1", "", "../alpha", "alpha@99999999999", "a b", "\0", "alpha@1@1"):
        with pytest.raises(AdapterNotFound):
            store.resolve(ref)


def test_tenants_see_their_own_and_shared_names(store: AdapterStore) -> None:
    shared = store.publish("tone", SPEC, tensors(1), **BASE_OF)
    acme = store.publish("tone", SPEC, tensors(2), **BASE_OF, owner="acme")
    bolt = store.publish("tone", SPEC, tensors(3), **BASE_OF, owner="bolt")
    secret = store.publish("secret", SPEC, tensors(4), **BASE_OF, owner="bolt")
    assert store.resolve("tone", tenant="acme") == acme
    assert store.resolve("tone", tenant="bolt") == bolt
    assert store.resolve("tone", tenant="carol") == shared
    for ref in ("secret", "bolt/secret", "secret@1", secret.digest, secret.digest[:12], "bolt/tone"):
        with pytest.raises(AdapterNotFound) as caught:
            store.resolve(ref, tenant="acme")
        assert "existing adapters: tone" in str(caught.value)
    assert store.resolve("bolt/secret") == secret == store.resolve("secret", tenant="bolt")
    assert store.resolve("tone").owner == ""
    assert [v.ref for v in store.current(tenant="acme")] == ["tone@1"]
    assert store.current(tenant="acme")[0].owner == "acme"
    assert store.names(tenant="bolt") == ["secret", "tone"]
    assert store.names() == ["tone", "acme/tone", "bolt/secret", "bolt/tone"]
    assert store.owner_usage("bolt")[0] == 2


def test_a_bare_name_that_two_owners_have_is_ambiguous(store: AdapterStore) -> None:
    store.publish("tone", SPEC, tensors(2), **BASE_OF, owner="acme")
    assert store.resolve("tone").owner == "acme"
    store.publish("tone", SPEC, tensors(3), **BASE_OF, owner="job:bolt")
    with pytest.raises(AdapterNotFound, match="ask for owner/tone"):
        store.resolve("tone")
    assert store.resolve("job:bolt/tone").owner == "job:bolt"


@pytest.mark.parametrize("name", ["", "a/b", "a@1", "a:b", "../x", "a b", "x" * 129, "-x", "abcdef012345", "a\n"])
def test_names_that_could_be_something_else_are_refused(store: AdapterStore, name: str) -> None:
    with pytest.raises(ValueError, match="adapter name"):
        store.publish(name, SPEC, tensors(1), **BASE_OF)
    assert store.list() == []


def test_gc_keeps_what_names_rollback_and_pins_need(store: AdapterStore) -> None:
    digests = [store.publish("a", SPEC, tensors(seed), **BASE_OF).digest for seed in range(1, 9)]
    store.promote("a", 3)  # rollback would go to 8
    store.pin(digests[0], "job")
    removed = store.gc(keep_latest=1)
    assert {v.version for v in store.versions("a")} == {1, 3, 8}
    assert set(removed) == {digests[index] for index in (1, 3, 4, 5, 6)}
    assert sorted(path.stem for path in store.root.glob("objects/*/*")) == sorted(digests[index] for index in (0, 2, 7))
    assert same(AdapterStore(store.root).tensors(digests[0]), tensors(1))
    with pytest.raises(AdapterNotFound):
        store.tensors(digests[1])
    assert store.rollback("a").version == 8
    assert store.pins(digests[0]) == ["job"]
    store.unpin(digests[0], "job")
    assert digests[0] in store.gc(keep_latest=1)
    assert store.publish("a", SPEC, tensors(1), **BASE_OF).version == 9
    with pytest.raises(ValueError, match="keep_latest=0"):
        store.gc(0)


def test_content_shared_by_two_names_outlives_one_of_them(store: AdapterStore) -> None:
    version = store.publish("a", SPEC, tensors(1), **BASE_OF)
    store.publish("b", SPEC, tensors(1), **BASE_OF, owner="acme")
    assert store.delete("a") == [version.digest]
    assert store.gc() == []
    assert same(store.tensors(version.digest), tensors(1))
    with pytest.raises(AdapterNotFound):
        store.resolve("a")
    assert store.publish("a", SPEC, tensors(1), **BASE_OF).version == 2
    store.pin(version.digest, "engine")
    store.delete("a")
    with pytest.raises(ValueError, match="pinned by engine"):
        store.delete("acme/b")


def test_lists_come_in_pages(store: AdapterStore) -> None:
    for seed in range(5):
        store.publish(f"n{seed}", SPEC, tensors(seed), **BASE_OF)
    assert [v.name for v in store.list(limit=2)] == ["n4", "n3"]
    assert [v.name for v in store.list(offset=4, limit=2)] == ["n0"]
    assert [v.name for v in store.current(offset=3, limit=9)] == ["n3", "n4"]
    assert store.list(owner="nobody") == []
    assert len(store.list(owner="")) == 5


def test_damaged_content_is_an_error_and_can_be_published_again(store: AdapterStore) -> None:
    version = store.publish("a", SPEC, tensors(1), **BASE_OF)
    path = next(store.root.glob("objects/*/*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fresh = AdapterStore(store.root)
    with pytest.raises(DamagedObject, match="has content"):
        fresh.tensors(version.digest)
    path.write_bytes(data[:-4])
    with pytest.raises(DamagedObject, match="is damaged"):
        fresh.tensors(version.digest)
    assert fresh.publish("a", SPEC, tensors(1), **BASE_OF) == version
    assert same(AdapterStore(store.root).tensors(version.digest), tensors(1))
    path.unlink()
    with pytest.raises(AdapterNotFound, match="collected or lost"):
        AdapterStore(store.root).tensors(version.digest)


def test_callers_cannot_change_stored_content(store: AdapterStore) -> None:
    mine = tensors(1)
    version = store.publish("a", SPEC, mine, **BASE_OF)
    for tensor in mine.values():
        tensor[:] = 0
    got = store.tensors(version.digest)
    assert same(got, tensors(1))
    with pytest.raises(ValueError, match="read-only"):
        next(iter(got.values()))[0, 0] = 1.0
    got.clear()
    assert same(store.tensors(version.digest), tensors(1))


def test_host_cache_is_bounded_and_counts(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in tensors(1).values())
    store = AdapterStore(tmp_path, host_cache_bytes=2 * size)
    digests = [store.publish(f"n{seed}", SPEC, tensors(seed), **BASE_OF).digest for seed in range(4)]
    assert store.stats().host_bytes == 2 * size
    store.tensors(digests[3])
    store.tensors(digests[0])
    stats = store.stats()
    assert (stats.host_hits, stats.disk_reads, stats.host_bytes) == (1, 1, 2 * size)
    assert stats.contents == stats.versions == stats.names == 4
    no_cache = AdapterStore(tmp_path, host_cache_bytes=0)
    assert same(no_cache.tensors(digests[1]), tensors(1))


def test_concurrent_readers_of_one_version_read_it_once(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    version = store.publish("a", SPEC, tensors(1), **BASE_OF)
    fresh = AdapterStore(store.root)
    read, calls = fresh._files.read, []

    def slow(*args: object) -> dict[str, np.ndarray]:
        calls.append(args)
        time.sleep(0.05)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fresh._files, "read", slow)
    results: list[dict[str, np.ndarray]] = []
    threads = [threading.Thread(target=lambda: results.append(fresh.tensors(version.digest))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(results) == 8
    assert len(calls) == 1


def _publish_many(root: str, worker: int) -> None:
    store = AdapterStore(root)
    for index in range(5):
        store.publish("a", SPEC, tensors(100 * worker + index), **BASE_OF, metadata={"worker": worker})
        store.gc(keep_latest=1000)


def test_processes_and_threads_publish_side_by_side(store: AdapterStore) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_publish_many, args=(str(store.root), worker)) for worker in range(3)]
    threads = [threading.Thread(target=_publish_many, args=(str(store.root), worker)) for worker in (3, 4)]
    for runner in (*workers, *threads):
        runner.start()
    for runner in (*workers, *threads):
        runner.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    versions = store.versions("a")
    assert [version.version for version in versions] == list(range(1, 26))
    assert len({version.digest for version in versions}) == 25
    for version in versions:
        assert adapter_digest(version.spec, store.tensors(version.digest)) == version.digest


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    AdapterStore(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "store.sqlite")
    connection.execute("UPDATE meta SET value='99' WHERE key='schema_version'")
    connection.commit()
    connection.close()
    with pytest.raises(RuntimeError, match=r"schema version 99; this code knows up to 2\. Upgrade"):
        AdapterStore(tmp_path)


def test_a_second_reader_knows_whether_it_is_the_same_store(store: AdapterStore, tmp_path: Path) -> None:
    root, store_id = store.identity()
    reader = AdapterStore.open_same(root, store_id)
    assert reader is not None
    version = store.publish("a", SPEC, tensors(1), **BASE_OF)
    assert reader.resolve("a") == version
    store.publish("a", SPEC, tensors(2), **BASE_OF)
    store.promote("a", 1)
    assert reader.resolve("a") == version
    other = AdapterStore(tmp_path / "other")
    assert AdapterStore.open_same(other.root, store_id) is None
    assert AdapterStore.open_same(tmp_path / "none", store_id) is None
    assert not (tmp_path / "none").exists()
    assert AdapterStore(root).identity() == (root, store_id)


def test_connections_are_durable_by_setting(store: AdapterStore) -> None:
    assert store.database.connection().execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert store.database.connection().execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


def test_publish_refuses_what_cannot_be_served(store: AdapterStore) -> None:
    broken = tensors(1)
    broken[f"base_model.model.{QV[0]}.lora_A.weight"][0, 0] = np.nan
    with pytest.raises(AdapterRejected, match=f"module {QV[0]}: lora_A has 1 values that are NaN"):
        store.publish("a", SPEC, broken, **BASE_OF)
    with pytest.raises(AdapterRejected, match=r"lora_A has shape \[4, 8\], should have \[8, 8\]"):
        store.publish("a", AdapterSpec(8, 8.0, ("q_proj",)), tensors(1), **BASE_OF)
    assert store.list() == []
    assert list(store.root.glob("objects/*/*")) == []


def test_peft_folder_round_trip(store: AdapterStore, tmp_path: Path) -> None:
    spec = AdapterSpec(4, 8.0, ("q_proj", "v_proj"), True, (("layers.0.self_attn.v_proj", 2),), (("v_proj", 3.0),))
    content = tensors(1, modules=QV[:1] + QV[2:]) | tensors(1, modules=[QV[1]], rank=2)
    version = store.publish("a", spec, content, **BASE_OF)
    folder = store.export_peft("a@1", tmp_path / "out")
    again, report = store.import_peft(folder, "b", base=BASE, base_digest="d" * 64, actor="admin")
    assert again.digest == version.digest
    assert again.spec == spec
    assert (report.covered, report.base_modules) == (tuple(sorted(QV)), 6)
    assert report.ranks[QV[1]] == 2
    assert report.scalings[QV[1]] == pytest.approx(3.0 / 2**0.5)
    assert again.metadata["coverage"] == {"modules": 4, "base_modules": 6}


def test_imports_widen_bf16_and_take_peft_default_names(store: AdapterStore, tmp_path: Path) -> None:
    exact = {name: (tensor.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, tensor in tensors(1).items()}
    header, blobs, at = {}, [], 0
    for name, tensor in exact.items():
        raw = (tensor.view(np.uint32) >> 16).astype("<u2").tobytes()
        key = name.replace(".weight", ".default.weight")
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config()))
    version, _ = store.import_peft(tmp_path, "bf", base=BASE)
    assert version.digest == adapter_digest(SPEC, exact)
    assert version.base_model == "org/tiny"


def test_imports_refuse_links_and_sizes(store: AdapterStore, tmp_path: Path) -> None:
    good, evil = tmp_path / "good", tmp_path / "evil"
    for folder in (good, evil):
        folder.mkdir()
    save_file(tensors(1), good / "adapter_model.safetensors")
    (good / "adapter_config.json").write_text(json.dumps(config()))
    (evil / "adapter_config.json").write_text(json.dumps(config()))
    (evil / "adapter_model.safetensors").symlink_to(good / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match="links are not followed"):
        store.import_peft(evil, "a")
    with pytest.raises(AdapterRejected, match="at most 100 are allowed"):
        store.import_peft(good, "a", max_bytes=100)
    (evil / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterRejected, match=r"adapter_model\.safetensors is missing"):
        store.import_peft(evil, "a")
    with pytest.raises(AdapterRejected, match="is not a folder"):
        store.import_peft(tmp_path / "none", "a")
    assert store.list() == []
    store.import_peft(good, "a", base=BASE)


def test_audit_has_one_row_per_change(store: AdapterStore) -> None:
    version = store.publish("a", SPEC, tensors(1), **BASE_OF, owner="acme", actor="job:1")
    before = store.change_count()
    store.publish("a", SPEC, tensors(2), **BASE_OF, owner="acme", actor="job:1")
    store.promote("a", 1, owner="acme", actor="admin")
    store.rollback("a", owner="acme", actor="admin")
    store.pin(version.digest, "engine", actor="router")
    store.pin(version.digest, "engine", actor="router")
    store.unpin(version.digest, "engine", actor="router")
    store.unpin(version.digest, "engine", actor="router")
    store.note("load", actor="router", ref=version, detail={"slot": 1})
    store.record_probe(version.digest, "d" * 64, {"dlogp": 0.5}, actor="router")
    store.delete("a", owner="acme", actor="admin")
    store.gc(actor="cron")
    rows = store.audit(after_id=before)
    assert [(row.action, row.actor) for row in rows] == [
        ("publish", "job:1"),
        ("promote", "admin"),
        ("rollback", "admin"),
        ("pin", "router"),
        ("unpin", "router"),
        ("load", "router"),
        ("probe", "router"),
        ("delete", "admin"),
        ("gc", "cron"),
    ]
    assert rows[0].owner == "acme"
    assert rows[1].digest == version.digest
    assert rows[2].detail == {"from": 1}
    assert store.change_count() == rows[-1].id
    assert len(store.audit(owner="acme")) == 6


def test_quotas_bound_names_and_bytes(store: AdapterStore) -> None:
    store.publish("a", SPEC, tensors(1), **BASE_OF, owner="acme", quota=(1, 0))
    store.publish("a", SPEC, tensors(2), **BASE_OF, owner="acme", quota=(1, 0))
    with pytest.raises(AdapterRejected, match="acme would have 2 adapters; 1 are allowed"):
        store.publish("b", SPEC, tensors(3), **BASE_OF, owner="acme", quota=(1, 0))
    used = store.owner_usage("acme")
    with pytest.raises(AdapterRejected, match=f"bytes of adapters; {used[1]} are allowed"):
        store.publish("a", SPEC, tensors(3), **BASE_OF, owner="acme", quota=(0, used[1]))
    assert store.names(owner="acme") == ["a"]
    assert [version.version for version in store.versions("a")] == [1, 2]
    assert store.owner_usage("acme") == used
    assert len(store.gc(keep_latest=9)) == 1  # the refused content, never referred to
    store.publish("b", SPEC, tensors(3), **BASE_OF, owner="bolt", quota=(1, used[1]))


def test_probes_are_kept_per_base(store: AdapterStore) -> None:
    version = store.publish("a", SPEC, tensors(1), **BASE_OF)
    store.record_probe(version.digest, "d" * 64, {"dlogp": 0.5})
    store.record_probe(version.digest, "d" * 64, {"dlogp": 0.25})
    assert store.probe(version.digest, "d" * 64) == {"dlogp": 0.25}
    assert store.probe(version.digest, "e" * 64) is None


def test_a_name_that_points_nowhere_yet_is_promoted_with_its_owner(store: AdapterStore) -> None:
    version = store.publish("new", SPEC, tensors(1), base_model="m", base_digest="d", owner="acme", promote=False)
    assert store.names() == []
    with pytest.raises(AdapterNotFound):
        store.promote("new", 1)
    with pytest.raises(AdapterNotFound, match="has no version 2"):
        store.promote("new", 2, owner="acme")
    assert store.promote("new", 1, owner="acme").digest == version.digest
    assert store.resolve("new", tenant="acme").version == 1
    store.delete("new", owner="acme")
    with pytest.raises(AdapterNotFound, match="has no version 1"):
        store.promote("new", 1, owner="acme")
