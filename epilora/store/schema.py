"""The store's SQLite schema and how connections are opened.

contents   one row per digest: what bytes exist in `objects/`
versions   (owner, name, version) -> digest, base model and digest of the base codes; immutable rows
names      (owner, name) -> the version the name points at now; the next version number (numbers are never used twice)
pointers   the history of what each name pointed at, for rollback
pins       digest x holder: content that gc must keep
owners     tenants that own names ("" owns the shared ones)
probes     what a loaded version was measured to do (log-probabilities of a fixed prompt, drift on another precision)
conversions  low-precision copies of a version: digest of the copy, and whether the quality gate accepted it on one base
audit      one row per change, written in the same transaction as the change
meta       schema_version, store_id (random, made once)

WAL with synchronous=FULL: a committed transaction survives a crash of process or machine.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

SCHEMA_VERSION = 2

_DDL = """
CREATE TABLE contents(
    digest TEXT PRIMARY KEY, spec TEXT NOT NULL, bytes INTEGER NOT NULL, tensors INTEGER NOT NULL,
    created_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE owners(owner TEXT PRIMARY KEY, created_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE names(
    owner TEXT NOT NULL REFERENCES owners(owner), name TEXT NOT NULL, current INTEGER, next_version INTEGER NOT NULL,
    PRIMARY KEY(owner, name)
) WITHOUT ROWID;
CREATE TABLE versions(
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    digest TEXT NOT NULL REFERENCES contents(digest),
    base_model TEXT NOT NULL, base_revision TEXT NOT NULL, base_digest TEXT NOT NULL,
    created_s REAL NOT NULL, metadata TEXT NOT NULL,
    UNIQUE(owner, name, version), FOREIGN KEY(owner, name) REFERENCES names(owner, name)
);
CREATE INDEX versions_digest ON versions(digest);
CREATE TABLE pointers(
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    at_s REAL NOT NULL
);
CREATE INDEX pointers_name ON pointers(owner, name, id);
CREATE INDEX names_name ON names(name);
CREATE TABLE pins(
    digest TEXT NOT NULL REFERENCES contents(digest), holder TEXT NOT NULL, at_s REAL NOT NULL,
    PRIMARY KEY(digest, holder)
) WITHOUT ROWID;
CREATE TABLE probes(
    digest TEXT NOT NULL REFERENCES contents(digest), base_digest TEXT NOT NULL, at_s REAL NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY(digest, base_digest)
) WITHOUT ROWID;
CREATE TABLE audit(
    id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
    owner TEXT NOT NULL, name TEXT NOT NULL, version INTEGER, digest TEXT NOT NULL, detail TEXT NOT NULL
);
"""

# What a database of the version before lacks, by version. No reference to contents: a copy may be collected.
_ADDED = {
    2: """CREATE TABLE conversions(
    original TEXT NOT NULL, base_digest TEXT NOT NULL, adapter_dtype TEXT NOT NULL, copy TEXT NOT NULL, accepted INTEGER NOT NULL,
    at_s REAL NOT NULL, report TEXT NOT NULL,
    PRIMARY KEY(original, base_digest, adapter_dtype)
) WITHOUT ROWID"""
}


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode (transactions are begun by hand), waiting up to 60 s for other writers."""
    connection = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA busy_timeout=60000")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


def ensure_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in one transaction, or bring an older database's up to this code's version.

    Raises RuntimeError for a database written by newer code.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        has_meta = connection.execute("SELECT 1 FROM sqlite_master WHERE type='table' AND name='meta'").fetchone()
        if has_meta is None:
            connection.execute("CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
            for statement in _DDL.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES('schema_version', '1')")
            connection.execute("INSERT INTO owners VALUES('', strftime('%s','now'))")
        connection.execute("INSERT OR IGNORE INTO meta VALUES('store_id', lower(hex(randomblob(16))))")
        found = int(connection.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone()[0])
        if found > SCHEMA_VERSION:
            raise RuntimeError(
                f"adapter store {path} has schema version {found}; this code knows up to {SCHEMA_VERSION}."
                " Upgrade EpiLoRA, or point store.root at another folder"
            )
        for version in range(found + 1, SCHEMA_VERSION + 1):
            connection.execute(_ADDED[version])
        connection.execute("UPDATE meta SET value=? WHERE key='schema_version'", (str(SCHEMA_VERSION),))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
