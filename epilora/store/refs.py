"""Names, owners and references of adapters: what is allowed and what a reference means."""

from __future__ import annotations

import re
from typing import Any

from .digest import DIGEST_CHARS

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")
OWNER_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")  # tenants, and jobs as `job:<name>`
DIGEST_PATTERN = re.compile(rf"[0-9a-f]{{12,{DIGEST_CHARS}}}")


def check_name(name: str) -> None:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or DIGEST_PATTERN.fullmatch(name):
        raise ValueError(
            f"adapter name {name!r}: allowed are 1 to 128 letters, digits, '.', '_' and '-', the first a letter or"
            " digit, and nothing that could be a digest"
        )


def check_owner(owner: str) -> None:
    if owner and not OWNER_PATTERN.fullmatch(owner):
        raise ValueError(f"owner {owner!r}: allowed are 1 to 128 letters, digits, '.', '_', '-' and ':'")


def parse_ref(ref: str) -> tuple[str | None, str, int | None]:
    """(owner or None, name or "" if it cannot be one, version or None) of `[owner/]name[@version]`."""
    if not isinstance(ref, str):
        return None, "", None
    owner, slash, rest = ref.rpartition("/")
    name, at, number = rest.partition("@")
    if not NAME_PATTERN.fullmatch(name) or (slash and owner and not OWNER_PATTERN.fullmatch(owner)):
        return None, "", None
    if at and not (number.isascii() and number.isdigit() and 1 <= len(number) <= 9 and int(number) > 0):
        return None, "", None
    return (owner if slash else None), name, int(number) if at else None


def visible(owner: str | None, tenant: str | None, table: str) -> tuple[str, tuple[Any, ...]]:
    """SQL condition and its arguments: rows of one owner, or of what a tenant sees, or all."""
    if owner is not None:
        return f" AND {table}.owner=?", (owner,)
    if tenant is not None:
        return f" AND {table}.owner IN (?, '')", (tenant,)
    return "", ()
