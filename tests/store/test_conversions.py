"""Low-precision copies in the store: recorded verdicts, what is served in place of what, older databases."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from epilora.store import AdapterStore
from epilora.types import AdapterSpec

SPEC = AdapterSpec(2, 4.0, ("q_proj",))


def publish(store, name, seed):
    rng = np.random.default_rng(seed)
    tensors = {
        "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(2, 8)).astype(np.float32),
        "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(8, 2)).astype(np.float32),
    }
    return store.publish(name, SPEC, tensors, base_model="m", base_digest="b" * 64)


def test_only_an_accepted_copy_on_the_same_base_is_served(tmp_path):
    store = AdapterStore(tmp_path)
    original, copy = publish(store, "a", 1), publish(store, "a.nvfp4", 2)
    base = original.base_digest
    assert store.stored_as(original.digest, base, "nvfp4") is None
    store.record_conversion(original.digest, base, "nvfp4", copy.digest, accepted=False, report={"reasons": ["drift"]})
    assert store.stored_as(original.digest, base, "nvfp4") is None
    assert store.conversion(original.digest, base, "nvfp4") == {
        "copy": copy.digest, "accepted": False, "report": {"reasons": ["drift"]},
    }  # fmt: skip
    store.record_conversion(original.digest, base, "nvfp4", copy.digest, accepted=True, report={})
    assert store.stored_as(original.digest, base, "nvfp4").digest == copy.digest
    assert store.stored_as(original.digest, base, "fp8") is None
    assert store.stored_as(original.digest, base, "bf16") is None
    assert store.stored_as(original.digest, "c" * 64, "nvfp4") is None
    assert [(row.action, row.detail["accepted"]) for row in store.audit() if row.action == "conversion"] == [
        ("conversion", False), ("conversion", True),
    ]  # fmt: skip
    for method in (store.stored_as, lambda *a: store.record_conversion(*a, "d", accepted=True, report={})):
        with pytest.raises(ValueError, match=r"adapter_dtype='int4'; allowed: bf16, fp8, nvfp4"):
            method(original.digest, base, "int4")


def test_the_original_is_served_when_the_copy_is_gone(tmp_path):
    store = AdapterStore(tmp_path)
    original, copy = publish(store, "a", 1), publish(store, "a.fp8", 2)
    store.record_conversion(original.digest, "", "fp8", copy.digest, accepted=True, report={})
    store.delete("a.fp8")
    store.gc()
    assert store.stored_as(original.digest, "", "fp8") is None
    assert store.conversion(original.digest, "", "fp8")["copy"] == copy.digest


def test_a_store_of_the_version_before_is_brought_up(tmp_path):
    store = AdapterStore(tmp_path)
    original = publish(store, "a", 1)
    store.close()
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("DROP TABLE conversions")
        db.execute("UPDATE meta SET value='1' WHERE key='schema_version'")
    db.close()
    again = AdapterStore(tmp_path)
    assert again.resolve("a").digest == original.digest
    assert again.stored_as(original.digest, "", "fp8") is None
    again.close()
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        assert db.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone() == ("2",)
    db.close()
