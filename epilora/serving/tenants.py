"""Who may ask: tenants, their API keys (kept hashed) and what each may do.

A key is stored as `hmac-sha256:<salt>:<hmac>` and compared in constant time; the plain key exists only in the caller's
hands. Keys issued here begin with `tml-<tenant>-`, which Tinker's clients insist on; any other string works too.
Several hashes per
tenant allow rotation: add the new one, move the clients, remove the old one. `TenantFile` re-reads its file when it
changes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from epilora.errors import Unauthorized
from epilora.types import check_adapter_dtype

_SCHEME = "hmac-sha256"
_HASH = re.compile(r"hmac-sha256:[0-9a-f]{16,64}:[0-9a-f]{64}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")
MAX_KEY_CHARS = 512


@dataclass(frozen=True)
class TenantConfig:
    """One tenant. Limits of 0 mean none.

    name: also the owner of its adapters in the store. key_hashes: from `hash_key`; any of them opens.
    adapters: shell patterns over the adapter names it may use, own and shared ones alike. base: may it use the plain
    base.
    weight: its share under contention, relative to others. p99_ttft_ms: latency promise that rollouts yield to, 0 for
    none.
    max_adapters, max_adapter_bytes: what it may keep in the store. other_precision: may it be served an adapter that
    was trained on other codes of the same model. adapter_dtype: "bf16", or "fp8" or "nvfp4": copies in that format are served in place
    of the adapters, where the quality gate accepted one. admin: may it load, promote and delete anybody's adapters.
    """

    name: str
    key_hashes: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ("*",)
    base: bool = True
    requests_per_min: float = 0.0
    tokens_per_min: float = 0.0
    concurrency: int = 0
    weight: float = 1.0
    p99_ttft_ms: float = 0.0
    max_adapters: int = 0
    max_adapter_bytes: int = 0
    other_precision: bool = False
    adapter_dtype: str = "bf16"
    admin: bool = False

    def __post_init__(self) -> None:
        if not _TENANT_NAME.fullmatch(self.name):
            raise ValueError(f"tenant name {self.name!r}: allowed are 1 to 128 letters, digits, '.', '_' and '-'")
        for key_hash in self.key_hashes:
            if not _HASH.fullmatch(key_hash):
                raise ValueError(
                    f"tenant {self.name}: a key hash is not {_SCHEME}:<salt>:<hmac>; make it with hash_key(key)"
                )
        check_adapter_dtype(self.adapter_dtype, f"tenant {self.name}: ")
        if self.weight <= 0:
            raise ValueError(f"tenant {self.name}: weight={self.weight}; it must be above 0")
        for limit in ("requests_per_min", "tokens_per_min", "concurrency", "p99_ttft_ms", "max_adapters"):
            if getattr(self, limit) < 0:
                raise ValueError(f"tenant {self.name}: {limit}={getattr(self, limit)}; it must be 0 (none) or above")

    @property
    def limited(self) -> bool:
        """Is there anything to count for it?"""
        return bool(self.requests_per_min or self.tokens_per_min or self.concurrency)

    def may_use(self, adapter_name: str) -> bool:
        """Does the tenant's pattern list allow this adapter name?"""
        return any(fnmatchcase(adapter_name, pattern) for pattern in self.adapters)


def tenant_from_dict(data: Mapping[str, Any]) -> TenantConfig:
    """A tenant from YAML or JSON. A plain `key` (or `keys`) is hashed at once. Raises ValueError for unknown fields."""
    values = dict(data)
    plain = [*values.pop("keys", ()), *([values.pop("key")] if "key" in values else [])]
    known = {entry.name for entry in fields(TenantConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"tenant {values.get('name')!r}: unknown fields {unknown}; allowed are {sorted(known)} and key, keys"
        )
    for name in ("key_hashes", "adapters"):
        if name in values:
            values[name] = tuple(values[name])
    values["key_hashes"] = (*values.get("key_hashes", ()), *(hash_key(key) for key in plain))
    return TenantConfig(**values)


def issue_key(tenant: str) -> str:
    """A new API key, 256 random bits. Show it once and keep `hash_key` of it."""
    return f"tml-{tenant}-{secrets.token_urlsafe(32)}"


def hash_key(key: str, *, salt: str | None = None) -> str:
    """What is stored of a key. salt: hex; keys that share one cost a single hash at look-up."""
    salt = secrets.token_hex(16) if salt is None else salt
    return f"{_SCHEME}:{salt}:{_mac(key, salt)}"


def _mac(key: str, salt: str) -> str:
    return hmac.new(bytes.fromhex(salt), key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


class TenantRegistry:
    """Finds the tenant of a key. `replace` swaps the whole table at once, so rotation needs no restart."""

    def __init__(self, tenants: Iterable[TenantConfig] = ()) -> None:
        self.replace(tenants)

    def replace(self, tenants: Iterable[TenantConfig]) -> None:
        """Install a new table. Raises ValueError for a name or a key hash that two tenants share."""
        by_name: dict[str, TenantConfig] = {}
        by_salt: dict[str, dict[str, TenantConfig]] = {}
        for tenant in tenants:
            if tenant.name in by_name:
                raise ValueError(f"tenant {tenant.name} is configured twice")
            by_name[tenant.name] = tenant
            for key_hash in tenant.key_hashes:
                _, salt, mac = key_hash.split(":")
                if mac in by_salt.setdefault(salt, {}):
                    raise ValueError(f"tenants {tenant.name} and {by_salt[salt][mac].name} share a key")
                by_salt[salt][mac] = tenant
        self._by_name, self._by_salt = by_name, by_salt

    def tenants(self) -> list[TenantConfig]:
        return list(self._by_name.values())

    def get(self, name: str) -> TenantConfig | None:
        return self._by_name.get(name)

    def authenticate(self, authorization: str | None) -> TenantConfig:
        """The tenant behind an `Authorization: Bearer <key>` header.

        Every stored hash is compared in constant time, matched or not. Raises Unauthorized.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key given; send the header 'Authorization: Bearer <key>'")
        if len(key) > MAX_KEY_CHARS:
            raise Unauthorized("incorrect API key provided")
        found: TenantConfig | None = None
        for salt, table in self._by_salt.items():
            mac = _mac(key, salt)
            for stored, tenant in table.items():
                if hmac.compare_digest(mac, stored):
                    found = tenant
        if found is None:
            raise Unauthorized("incorrect API key provided")
        return found


@dataclass
class TenantFile:
    """Tenants from a JSON file (`{"tenants": [...]}` or a list), read again whenever it changes.

    A file that has become unreadable leaves the last good table in force; `error` says what is wrong.
    """

    path: Path
    registry: TenantRegistry
    error: str = ""
    _seen: tuple[int, int, int] | None = field(default=None, repr=False)

    def refresh(self) -> bool:
        """Re-read if the file's identity, size or time changed; True if a new table was installed."""
        try:
            status = os.stat(self.path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return False
            self._seen = seen
            data = json.loads(self.path.read_text())
            rows = data["tenants"] if isinstance(data, dict) else data
            self.registry.replace(tenant_from_dict(row) for row in rows)
        except (OSError, ValueError, KeyError, TypeError) as err:
            self.error = f"{self.path.name}: {err}; the previous tenants stay in force"
            return False
        self.error = ""
        return True
