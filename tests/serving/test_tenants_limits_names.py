"""Keys, limits, model names and the routing policy: plain classes, injected clocks."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path

import pytest

from epilora.errors import AdapterNotFound, Unauthorized
from epilora.serving.limits import Limiter, RateLimited
from epilora.serving.names import ModelRef, not_found, parse_model
from epilora.serving.routing import Member, Roster, choose_engine
from epilora.serving.tenants import (
    TenantConfig,
    TenantFile,
    TenantRegistry,
    hash_key,
    issue_key,
    tenant_from_dict,
)


def test_keys_are_kept_hashed_with_a_salt_each() -> None:
    key = issue_key("acme")
    assert key.startswith("tml-acme-")
    assert len(key) >= 50
    first, second = hash_key(key), hash_key(key)
    assert first != second
    assert key not in first
    registry = TenantRegistry([TenantConfig("acme", (first,)), TenantConfig("bolt", (hash_key("other"),))])
    assert registry.authenticate(f"Bearer {key}").name == "acme"
    assert registry.authenticate("bearer other").name == "bolt"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic a2V5", "key", "Bearer wrong", "Bearer ké\udcff"]
)
def test_other_headers_are_unauthorized(header: str | None) -> None:
    registry = TenantRegistry([TenantConfig("acme", (hash_key("key"),))])
    with pytest.raises(Unauthorized):
        registry.authenticate(header)


def test_comparison_is_constant_time_and_visits_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = TenantRegistry([TenantConfig(name, (hash_key(f"{name}-key"),)) for name in ("a", "b", "c")])
    calls = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda x, y: calls.append(1) or compare(x, y))
    for key in ("a-key", "c-key", "nope"):
        calls.clear()
        try:
            registry.authenticate(f"Bearer {key}")
        except Unauthorized:
            assert key == "nope"
        assert len(calls) == 3


def test_tenants_from_dicts_hash_plain_keys_and_refuse_nonsense() -> None:
    tenant = tenant_from_dict({"name": "acme", "key": "k1", "keys": ["k2"], "adapters": ["a-*"], "weight": 2})
    registry = TenantRegistry([tenant])
    assert registry.authenticate("Bearer k1") is registry.authenticate("Bearer k2") is tenant
    assert (tenant.may_use("a-1"), tenant.may_use("b")) == (True, False)
    for bad, words in (
        ({"name": "acme", "colour": 1}, "unknown fields"),
        ({"name": "a/b"}, "tenant name"),
        ({"name": "job:x"}, "tenant name"),
        ({"name": "acme", "key_hashes": ["plain"]}, "make it with hash_key"),
        ({"name": "acme", "weight": 0}, "above 0"),
        ({"name": "acme", "concurrency": -1}, "must be 0"),
    ):
        with pytest.raises(ValueError, match=words):
            tenant_from_dict(bad)
    with pytest.raises(ValueError, match="configured twice"):
        TenantRegistry([tenant, tenant])
    shared = hash_key("same")
    with pytest.raises(ValueError, match="share a key"):
        TenantRegistry([TenantConfig("a", (shared,)), TenantConfig("b", (shared,))])


def test_the_tenants_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps([{"name": "acme", "key": "old"}]))
    registry = TenantRegistry()
    file = TenantFile(path, registry)
    assert file.refresh()
    assert not file.refresh()
    registry.authenticate("Bearer old")
    replacement = tmp_path / "new.json"
    replacement.write_text(json.dumps({"tenants": [{"name": "acme", "key": "new"}]}))
    os.replace(replacement, path)
    assert file.refresh()
    registry.authenticate("Bearer new")
    with pytest.raises(Unauthorized):
        registry.authenticate("Bearer old")
    for broken in ("{", "3", '{"tenants": 3}', '[{"name": 1}]', '[{"nam": "x"}]', "[[]]"):
        path.write_text(broken)
        assert not file.refresh(), broken
        assert "the previous tenants stay in force" in file.error
        registry.authenticate("Bearer new")
    path.unlink()
    assert not file.refresh()
    registry.authenticate("Bearer new")


def test_request_buckets_refill_at_their_rate() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    tenant = TenantConfig("acme", requests_per_min=6)
    for _ in range(6):
        limiter.admit(tenant, 1).release()
    with pytest.raises(RateLimited) as caught:
        limiter.admit(tenant, 1)
    assert (caught.value.limit, caught.value.retry_after_s) == ("requests_per_min", pytest.approx(10.0))
    now[0] = 10.0
    limiter.admit(tenant, 1)
    with pytest.raises(RateLimited):
        limiter.admit(tenant, 1)
    now[0] = 1000.0
    for _ in range(6):
        limiter.admit(tenant, 1)
    with pytest.raises(RateLimited):
        limiter.admit(tenant, 1)


def test_token_buckets_settle_and_may_owe() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    tenant = TenantConfig("acme", tokens_per_min=600)
    lease = limiter.admit(tenant, 100)
    lease.settle(900)  # used more than it said: the bucket owes 300
    lease.settle(0)  # only the first counts
    lease.release()
    with pytest.raises(RateLimited) as caught:
        limiter.admit(tenant, 1)
    assert caught.value.retry_after_s == pytest.approx(30.1)
    now[0] = 31.0
    limiter.admit(tenant, 1).release()  # failed: what it reserved comes back
    limiter.admit(tenant, 10)
    with pytest.raises(RateLimited):
        limiter.admit(tenant, 10)
    now[0] = 200.0
    limiter.admit(tenant, 5000)  # more than a full bucket is let through when the bucket is full


def test_limits_change_with_the_tenants_configuration() -> None:
    limiter = Limiter(lambda: 0.0)
    limiter.admit(TenantConfig("acme", requests_per_min=1), 1)
    with pytest.raises(RateLimited):
        limiter.admit(TenantConfig("acme", requests_per_min=1), 1)
    limiter.admit(TenantConfig("acme", requests_per_min=2), 1)
    limiter.admit(TenantConfig("acme"), 1)
    assert limiter.running("acme") == 3
    with pytest.raises(RateLimited, match="concurrency=3"):
        limiter.admit(TenantConfig("acme", concurrency=3), 1)


@pytest.mark.parametrize(
    ("model", "want"),
    [
        ("tiny", ModelRef(None)),
        ("org/tiny", ModelRef(None)),
        ("tone", ModelRef("tone", "tone")),
        ("tone@3", ModelRef("tone@3", "tone")),
        ("tiny:tone", ModelRef("tone", "tone")),
        ("org/tiny:tone@3", ModelRef("tone@3", "tone")),
        ("acme/tone@3", ModelRef("acme/tone@3", "tone")),
        ("tinytone", ModelRef("tinytone", "tinytone")),
        ("tiny@1", ModelRef("tiny@1", "tiny")),
    ],
)
def test_model_names(model: str, want: ModelRef) -> None:
    assert parse_model(model, ("tiny", "org/tiny")) == want


@pytest.mark.parametrize("model", ["tiny:", "", "@1", "tiny:@2"])
def test_model_names_without_an_adapter(model: str) -> None:
    with pytest.raises(AdapterNotFound):
        parse_model(model, ("tiny",))


def test_not_found_lists_only_what_the_tenant_may_use() -> None:
    tenant = TenantConfig("acme", adapters=("a*",), base=False)
    assert str(not_found("x", tenant, ["tiny"], ["b1", "a2", "a1"])).endswith("Models you can use: a1, a2")
    assert str(not_found("x", TenantConfig("t"), ["tiny"], [])).endswith("tiny")
    assert str(not_found("x", tenant, ["tiny"], [])).endswith("none")


def test_routing_prefers_residence_then_load() -> None:
    a, b, c = Member("a", running=5), Member("b", {"d": None}, 20), Member("c", {"d": None}, 9)
    assert choose_engine([a, b, c], "d") is c
    assert choose_engine([a, b, c], None) is a
    assert choose_engine([a, b, c], "other") is a
    assert choose_engine([a, b, c], "d", spread=3) is a
    assert choose_engine([], None) is None
    fuller, emptier = Member("d", {"x": None}, running=5), Member("e", running=7)
    assert choose_engine([fuller, emptier], "other") is emptier  # near the idlest: where fewest adapters are
    assert choose_engine([fuller, emptier], "other", slack=1) is fuller
    assert choose_engine([c, Member("b", running=9), Member("a", running=9)], None).name == "a"


def test_engines_that_failed_drain_or_leave_are_asked_only_if_no_other_is_left() -> None:
    a, b, c = Member("a"), Member("b", running=7), Member("c", {"d": None}, running=9)
    roster = Roster([a, b, c])
    assert roster.choose("d", (), 0.0) is c
    roster.lost(c, 10.0)
    assert (c.resident, roster.choose("d", (), 10.1)) == ({}, a)
    roster.draining = {"a"}
    assert [engine.name for engine in roster.working(10.1)] == ["b"]
    assert [engine.name for engine in roster.working(15.0)] == ["b", "c"]
    roster.update({"a": "1", "c": "1"}, lambda name, start: Member(name, start=start))
    assert [engine.name for engine in roster.working(15.0)] == ["c"]  # b leaves with its last request
    roster.draining = {"a", "c"}
    assert len(roster.working(15.0)) == 3
