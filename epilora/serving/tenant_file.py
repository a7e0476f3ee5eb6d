"""Writing the tenants file that routers read (`epilora.serving.tenants.TenantFile`): merged by name,
replaced in one rename.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from epilora.serving.tenants import TenantConfig, tenant_from_dict


def put_tenants(path: Path, tenants: Iterable[TenantConfig]) -> None:
    """Add `tenants` to the file, or replace those of the same name; others stay. Readers see the old or the new file.

    Two writers take turns (a lock file beside it). Raises ValueError if the file there is not a tenants file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = json.loads(path.read_text())["tenants"] if path.exists() else []
        merged = {row["name"]: tenant_from_dict(row) for row in rows}
        merged |= {tenant.name: tenant for tenant in tenants}
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("w") as sink:
            json.dump({"tenants": [asdict(tenant) for tenant in merged.values()]}, sink, indent=1)
            sink.flush()
            os.fsync(sink.fileno())
        partial.rename(path)
