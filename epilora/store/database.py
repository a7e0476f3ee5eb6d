"""The store's database: connections, transactions, and the questions that several of its parts ask."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from epilora.errors import AdapterNotFound
from epilora.types import AdapterSpec, AdapterVersion

from .digest import spec_from_dict
from .refs import parse_ref, visible
from .schema import connect, ensure_schema

COLUMNS = (
    "v.owner, v.name, v.version, v.digest, c.spec,"
    " v.base_model, v.base_digest, v.created_s, v.metadata, v.base_revision"
)
FROM = " FROM versions v JOIN contents c ON c.digest = v.digest "
MAX_NAMES_IN_ERROR = 20


class Database:
    """One SQLite file, one connection per thread. step: called with a step's name around every durable write."""

    def __init__(self, path: Path, step: Callable[[str], None]) -> None:
        self.path, self.step = path, step
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        ensure_schema(self.connection(), path)

    def connection(self) -> sqlite3.Connection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self.path)
            with self._connections_lock:
                self._connections.append(connection)
        return connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is durable when the block ends, none of it if the block raises or the process
        dies.
        """
        db = self.connection()
        self.step("db:begin")
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            self.step("db:before-commit")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        self.step("db:committed")

    def close(self) -> None:
        """Close every thread's connection."""
        with self._connections_lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._local = threading.local()

    # --- questions ------------------------------------------------------------------------------------------------

    def select(self, db: sqlite3.Connection, tail: str, args: tuple[Any, ...]) -> list[AdapterVersion]:
        return [version_of(row) for row in db.execute(f"SELECT {COLUMNS}{FROM}{tail}", args)]

    def fetch(self, db: sqlite3.Connection, owner: str, name: str, version: int) -> AdapterVersion:
        rows = self.select(db, "WHERE v.owner=? AND v.name=? AND v.version=?", (owner, name, version))
        if not rows:
            raise AdapterNotFound(self.no_version(db, owner, name, version))
        return rows[0]

    def no_version(self, db: sqlite3.Connection, owner: str, name: str, version: int | None) -> str:
        numbers = [
            str(row[0])
            for row in db.execute(
                "SELECT version FROM versions WHERE owner=? AND name=? ORDER BY version DESC LIMIT ?",
                (owner, name, MAX_NAMES_IN_ERROR),
            )
        ]
        return f"adapter {name!r} has no version {version}; the newest are {', '.join(numbers) or 'none'}"

    def own(self, db: sqlite3.Connection, name: str, owner: str | None) -> tuple[str, str]:
        given, bare, number = parse_ref(name)
        found = self.owner_of(db, owner if owner is not None else given, bare, None) if bare and not number else None
        if found is None:
            raise AdapterNotFound(f"no adapter {name!r}; {self.existing(None)}")
        return found, bare

    def current(self, db: sqlite3.Connection, owner: str, name: str) -> int | None:
        return db.execute("SELECT current FROM names WHERE owner=? AND name=?", (owner, name)).fetchone()[0]

    def point(self, db: sqlite3.Connection, owner: str, name: str, version: int) -> None:
        db.execute("UPDATE names SET current=? WHERE owner=? AND name=?", (version, owner, name))
        db.execute("INSERT INTO pointers(owner,name,version,at_s) VALUES(?,?,?,?)", (owner, name, version, time.time()))

    def owner_of(self, db: sqlite3.Connection, owner: str | None, name: str, tenant: str | None) -> str | None:
        """Which owner's name a reference means, or None if there is none it may see."""
        if owner is not None and tenant is not None and owner not in (tenant, ""):
            return None
        owners = [
            row[0]
            for row in db.execute(
                "SELECT owner FROM names WHERE name=? AND current IS NOT NULL ORDER BY owner", (name,)
            )
            if (owner is None or row[0] == owner) and (tenant is None or row[0] in (tenant, ""))
        ]
        if tenant is not None:
            return tenant if tenant in owners else owners[0] if owners else None
        if len(owners) > 1 and "" not in owners:
            raise AdapterNotFound(f"adapter name {name!r} belongs to {', '.join(owners)}; ask for owner/{name}")
        return owners[0] if owners else None

    def names(self, *, owner: str | None = None, tenant: str | None = None, limit: int = 100_000) -> list[str]:
        """Names that exist: of one owner, or all a tenant sees, or (neither given) all, as `owner/name` where owned."""
        where, args = visible(owner, tenant, "n")
        rows = self.connection().execute(
            f"SELECT n.owner, n.name FROM names n WHERE n.current IS NOT NULL{where} ORDER BY n.owner, n.name LIMIT ?",
            (*args, limit),
        )
        if owner is not None or tenant is not None:
            return sorted({name for _, name in rows})
        return [f"{found}/{name}" if found else name for found, name in rows]

    def audit(
        self,
        db: sqlite3.Connection,
        actor: str,
        action: str,
        subject: tuple[str, str, int | None, str],
        detail: Mapping[str, Any],
    ) -> None:
        """subject: owner, name, version, digest of what changed."""
        db.execute(
            "INSERT INTO audit(at_s,actor,action,owner,name,version,digest,detail) VALUES(?,?,?,?,?,?,?,?)",
            (time.time(), actor, action, *subject, json.dumps(detail, sort_keys=True)),
        )
        self.step("db:audit")

    def existing(self, tenant: str | None) -> str:
        names = self.names(tenant=tenant, limit=MAX_NAMES_IN_ERROR + 1)
        if not names:
            return "there are no adapters yet"
        more = ", ..." if len(names) > MAX_NAMES_IN_ERROR else ""
        return f"existing adapters: {', '.join(names[:MAX_NAMES_IN_ERROR])}{more}"


@lru_cache(maxsize=4096)
def spec_of(document: str) -> AdapterSpec:
    return spec_from_dict(json.loads(document))


def version_of(row: tuple[Any, ...]) -> AdapterVersion:
    owner, name, version, digest, spec, base_model, base_digest, created_s, metadata, revision = row
    document = json.loads(metadata)
    if revision:
        document["base_revision"] = revision
    return AdapterVersion(
        name=name,
        version=version,
        digest=digest,
        spec=spec_of(spec),
        base_digest=base_digest,
        base_model=base_model,
        created_s=created_s,
        metadata=document,
        owner=owner,
    )
