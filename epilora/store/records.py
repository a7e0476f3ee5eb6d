"""What the store tells about itself: audit rows and counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AuditRow:
    """One change.

    at_s: unix time. actor: who asked (tenant, job, admin), action: publish, promote, rollback, pin ...
    """

    id: int
    at_s: float
    actor: str
    action: str
    owner: str
    name: str
    version: int | None
    digest: str
    detail: dict[str, Any]


AUDIT_COLUMNS = ("id", "at_s", "actor", "action", "owner", "name", "version", "digest", "detail")


@dataclass(frozen=True)
class StoreStats:
    """Totals of the store, and counters of this process: how often each tier gave a version's tensors, and bytes.

    host: tensors in memory. disk: the store's files (fp32). remote: adapters read from URLs.
    """

    names: int
    versions: int
    contents: int
    disk_bytes: int
    host_bytes: int
    host_hits: int
    disk_reads: int
    disk_read_bytes: int
    remote_reads: int
    remote_read_bytes: int
