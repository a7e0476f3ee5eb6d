"""`epilora key`: issue an API key, print it once, and put its hash into the tenants file that running routers re-read.

    epilora key acme --file runs/store/tenants.json p99_ttft_ms=500 requests_per_min=600
    epilora key operator --file runs/store/tenants.json --admin
    epilora key acme --file runs/store/tenants.json --revoke      # the new key alone is valid from now on

Without --revoke earlier keys of the tenant stay valid: move the clients, then issue once more with --revoke.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from .tenant_file import put_tenants
from .tenants import TenantConfig, hash_key, issue_key, tenant_from_dict

SETTINGS = {entry.name for entry in fields(TenantConfig)} - {"name", "key_hashes", "admin"}


def _settings(pairs: list[str]) -> dict[str, object]:
    """`name=value` pairs, values as JSON or else as text. Raises ValueError for a name that is no setting."""
    out: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in SETTINGS:
            raise ValueError(f"{pair!r}: allowed are {', '.join(sorted(SETTINGS))}, each as name=value")
        try:
            out[name] = json.loads(text)
        except ValueError:
            out[name] = text
    return out


def issue(path: Path, tenant: str, settings: dict[str, object], *, admin: bool, revoke: bool) -> str:
    """Put a new key's hash into the file (made if missing) and return the key. Raises ValueError."""
    rows = json.loads(path.read_text())["tenants"] if path.exists() else []
    found = next((row for row in rows if row["name"] == tenant), {"name": tenant})
    config = tenant_from_dict({**found, **settings})
    key = issue_key(tenant)
    kept = () if revoke else config.key_hashes
    put_tenants(path, [replace(config, key_hashes=(*kept, hash_key(key)), admin=admin or config.admin)])
    return key


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="epilora key", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tenant")
    parser.add_argument("settings", nargs="*", metavar="name=value", help="weight, p99_ttft_ms, requests_per_min ...")
    parser.add_argument("--file", type=Path, required=True, help="the routers' tenants file")
    parser.add_argument("--admin", action="store_true", help="may load, promote and delete anybody's adapters")
    parser.add_argument("--revoke", action="store_true", help="earlier keys of this tenant stop working")
    given = parser.parse_intermixed_args(arguments)
    try:
        settings = _settings(given.settings)
        key = issue(given.file, given.tenant, settings, admin=given.admin, revoke=given.revoke)
    except (ValueError, TypeError, KeyError, OSError) as err:
        print(f"epilora key: {err}", file=sys.stderr)
        return 1
    print(key)
    return 0
