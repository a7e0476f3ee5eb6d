"""The durable truth about adapters: immutable versions addressed by digest, and names that point at them.

    publish: digest -> file (fsync, rename, fsync of the folder) -> one transaction (content, version, pointer, audit
    row)

Whatever was acknowledged survives `kill -9`; whatever was not is invisible (a file without a row is swept by `gc`).
Threads and processes may share a root: SQLite in WAL mode with synchronous=FULL, one connection per thread, a file lock
between publishers and the collector.

Names: `publish` makes version n+1 and, unless told `promote=False`, moves the name to it. `promote` moves the name to
any version, `rollback` back to where it pointed before. A name belongs to an owner ("" is shared); a tenant sees its
own and the shared ones, its own first. Numbers are never used twice, deleted names included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epilora.errors import AdapterNotFound, AdapterRejected
from epilora.types import AdapterSpec, AdapterVersion, check_adapter_dtype

from .collect import collect
from .database import COLUMNS, Database, spec_of, version_of
from .digest import adapter_digest, as_fp32_tensors, spec_json
from .host_cache import HostCache
from .objects import ObjectFiles
from .peft_files import MAX_ADAPTER_BYTES, write_peft_folder
from .preflight import PreflightReport, check_tensors, preflight
from .records import AUDIT_COLUMNS, AuditRow, StoreStats
from .refs import DIGEST_PATTERN, NAME_PATTERN, check_name, check_owner, parse_ref, visible
from .sources import is_url, read_peft

Versions = list[AdapterVersion]  # AdapterStore has a method called `list`, so its annotations use these
Strings = list[str]
Rows = list[AuditRow]


class AdapterStore:
    """Adapter versions under one folder.

    root: created if missing. host_cache_bytes: how many bytes of verified tensors stay in memory (LRU).
    on_step: called with a step's name around every durable write; tests kill the process there.
    Satisfies `actors.protocols.AdapterStore`. Raises RuntimeError if the folder was written by newer code.
    """

    def __init__(
        self, root: str | Path, *, host_cache_bytes: int = 256 << 20, on_step: Callable[[str], None] | None = None
    ) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._step = on_step or (lambda name: None)
        self._files = ObjectFiles(self.root, self._step)
        self._cache = HostCache(host_cache_bytes)
        self._remote_reads = self._remote_bytes = 0
        self.database = Database(self.root / "store.sqlite", self._step)

    @classmethod
    def open_same(cls, root: str | Path, store_id: str) -> AdapterStore | None:
        """The store at `root` for reading beside its owner, or None if `root` is not here or is another store."""
        if not (Path(root) / "store.sqlite").exists():
            return None
        store = cls(root, host_cache_bytes=0)
        if store.identity()[1] == store_id:
            return store
        store.close()
        return None

    def close(self) -> None:
        """Close every thread's connection. The store must not be used afterwards."""
        self.database.close()

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(
        self,
        name: str,
        spec: AdapterSpec,
        tensors: Mapping[str, Any],
        *,
        base_model: str,
        base_digest: str,
        metadata: Mapping[str, Any] | None = None,
        owner: str = "",
        base_revision: str = "",
        promote: bool = True,
        actor: str = "",
        quota: tuple[int, int] = (0, 0),
    ) -> AdapterVersion:
        """A new immutable version, or the existing one if content and base are those of the name's latest version.

        name: letters, digits, `.`, `_`, `-`, at most 128. tensors: PEFT keys -> arrays or CPU tensors, scaling not
        folded.
        metadata: JSON-able, kept as it is (ignored when the version exists already). promote: move the name to the
        version. Durable when it returns. Raises AdapterRejected (keys, shapes, NaN), ValueError (name, metadata).
        """
        check_name(name)
        check_owner(owner)
        document = json.dumps(dict(metadata or {}), sort_keys=True, allow_nan=True)
        arrays = as_fp32_tensors(tensors)
        report = check_tensors(spec, arrays)
        digest = adapter_digest(spec, arrays)
        with self._files.lock(exclusive=False):
            size = self._files.write(digest, spec, arrays)
            with self.database.write() as db:
                now = time.time()
                db.execute(
                    "INSERT OR IGNORE INTO contents VALUES(?,?,?,?,?)",
                    (digest, spec_json(spec), size, len(arrays), now),
                )
                self._step("db:content")
                db.execute("INSERT OR IGNORE INTO owners VALUES(?,?)", (owner, now))
                db.execute("INSERT OR IGNORE INTO names VALUES(?,?,NULL,1)", (owner, name))
                current, number = db.execute(
                    "SELECT current, next_version FROM names WHERE owner=? AND name=?", (owner, name)
                ).fetchone()
                latest = db.execute(
                    "SELECT version, digest, base_model, base_digest, base_revision FROM versions"
                    " WHERE owner=? AND name=? ORDER BY version DESC LIMIT 1",
                    (owner, name),
                ).fetchone()
                if latest is not None and latest[1:] == (digest, base_model, base_digest, base_revision):
                    number = latest[0]
                else:
                    db.execute(
                        "INSERT INTO versions(owner,name,version,digest,base_model,base_revision,base_digest,"
                        "created_s,metadata) VALUES(?,?,?,?,?,?,?,?,?)",
                        (owner, name, number, digest, base_model, base_revision, base_digest, now, document),
                    )
                    self._step("db:version")
                    db.execute("UPDATE names SET next_version=? WHERE owner=? AND name=?", (number + 1, owner, name))
                    self._check_quota(owner, quota)
                    detail = {"bytes": size, "modules": len(report.covered), "promote": promote}
                    self.database.audit(db, actor, "publish", (owner, name, number, digest), detail)
                if promote and current != number:
                    self.database.point(db, owner, name, number)
                self._step("db:pointer")
                version = self.database.fetch(db, owner, name, number)
        self._cache.keep(digest, {key: array.copy() for key, array in arrays.items()})
        return version

    def import_peft(
        self,
        folder: str | Path,
        name: str,
        *,
        base: Mapping[str, tuple[int, int]] | None = None,
        base_model: str = "",
        base_digest: str = "",
        base_revision: str = "",
        owner: str = "",
        metadata: Mapping[str, Any] | None = None,
        max_rank: int | None = None,
        max_bytes: int = MAX_ADAPTER_BYTES,
        promote: bool = True,
        actor: str = "",
        quota: tuple[int, int] = (0, 0),
    ) -> tuple[AdapterVersion, PreflightReport]:
        """Publish a PEFT folder or URL (`sources`) after preflight. base: module -> (out, in) of the base's linear
        modules, None if
        unknown.

        Raises AdapterRejected with the reason; nothing is stored then.
        """
        check_name(name)
        config, tensors = read_peft(str(folder), max_bytes=max_bytes)
        if is_url(str(folder)):
            self._remote_reads += 1
            self._remote_bytes += sum(tensor.nbytes for tensor in tensors.values())
        report = preflight(config, tensors, base, max_rank=max_rank)
        plain = {key.replace(".default.weight", ".weight"): tensor for key, tensor in tensors.items()}
        version = self.publish(
            name,
            report.spec,
            plain,
            base_model=base_model or str(config.get("base_model_name_or_path") or ""),
            base_digest=base_digest,
            base_revision=base_revision,
            metadata={
                **(metadata or {}),
                "coverage": {"modules": len(report.covered), "base_modules": report.base_modules},
            },
            owner=owner,
            promote=promote,
            actor=actor,
            quota=quota,
        )
        return version, report

    def export_peft(self, ref: str, folder: str | Path, *, tenant: str | None = None) -> Path:
        """Write a version as a PEFT folder that stock `peft` loads. Returns the folder. Raises AdapterNotFound."""
        version = self.resolve(ref, tenant=tenant)
        return write_peft_folder(folder, version.spec, self.tensors(version.digest), base_model=version.base_model)

    # --- names --------------------------------------------------------------------------------------------------------

    def resolve(self, ref: str, *, tenant: str | None = None) -> AdapterVersion:
        """`name`, `name@version`, `owner/name`, or a digest (at least its first 12 characters).

        tenant: what that tenant may see: its own names first, then shared ones, nothing else. None: everything; a bare
        name is the shared one, or the only one there is. Raises AdapterNotFound listing the names that exist.
        """
        db = self.database.connection()
        owner, name, number = parse_ref(ref)
        if name:
            found = self.database.owner_of(db, owner, name, tenant)
            if found is not None:
                rows = self.database.select(
                    db,
                    "WHERE v.owner=? AND v.name=? AND v.version="
                    + ("?" if number else "(SELECT current FROM names WHERE owner=v.owner AND name=v.name)"),
                    (found, name, number) if number else (found, name),
                )
                if rows:
                    return rows[0]
                raise AdapterNotFound(self.database.no_version(db, found, name, number))
        if DIGEST_PATTERN.fullmatch(ref):
            seen = "" if tenant is None else " AND v.owner IN (?, '')"
            args = (ref, ref + "g") if tenant is None else (ref, ref + "g", tenant)
            rows = self.database.select(db, f"WHERE v.digest >= ? AND v.digest < ?{seen} ORDER BY v.id LIMIT 50", args)
            digests = {row.digest for row in rows}
            if len(digests) > 1:
                raise AdapterNotFound(f"digest {ref} is the beginning of {len(digests)} digests; give more characters")
            if rows:
                return rows[0]
        raise AdapterNotFound(f"no adapter {ref!r}; {self.database.existing(tenant)}")

    def names(self, *, owner: str | None = None, tenant: str | None = None, limit: int = 100_000) -> Strings:
        """Names that exist: of one owner, or all a tenant sees, or (neither given) all, as `owner/name` where owned."""
        return self.database.names(owner=owner, tenant=tenant, limit=limit)

    def current(self, *, tenant: str | None = None, offset: int = 0, limit: int = 100) -> Versions:
        """What each visible name points at, ordered by name, one page. A tenant's own name hides a shared one."""
        where, args = visible(None, tenant, "n")
        hidden = ""
        if tenant is not None:
            hidden = (
                " AND NOT (n.owner='' AND ?<>'' AND EXISTS(SELECT 1 FROM names o WHERE o.owner=? AND o.name=n.name"
                " AND o.current IS NOT NULL))"
            )
            args = (*args, tenant, tenant)
        rows = self.database.connection().execute(
            f"SELECT {COLUMNS} FROM names n"
            " JOIN versions v ON v.owner=n.owner AND v.name=n.name AND v.version=n.current"
            f" JOIN contents c ON c.digest=v.digest WHERE n.current IS NOT NULL{where}{hidden}"
            " ORDER BY n.name, n.owner LIMIT ? OFFSET ?",
            (*args, limit, offset),
        )
        return [version_of(row) for row in rows]

    def versions(self, name: str, *, owner: str | None = None, tenant: str | None = None) -> Versions:
        """All versions of a name, oldest first. Raises AdapterNotFound."""
        db = self.database.connection()
        given, name, _ = parse_ref(name)
        found = self.database.owner_of(db, owner if owner is not None else given, name, tenant) if name else None
        if found is None:
            raise AdapterNotFound(f"no adapter {name!r}; {self.database.existing(tenant)}")
        return self.database.select(db, "WHERE v.owner=? AND v.name=? ORDER BY v.version", (found, name))

    def list(self, *, offset: int = 0, limit: int = 100, owner: str | None = None) -> Versions:
        """All versions, newest first, one page. owner: only its own ("" for the shared ones)."""
        where, args = ("WHERE owner=? ", (owner,)) if owner is not None else ("", ())
        page = f"(SELECT id FROM versions {where}ORDER BY id DESC LIMIT ? OFFSET ?)"
        return self.database.select(
            self.database.connection(), f"WHERE v.id IN {page} ORDER BY v.id DESC", (*args, limit, offset)
        )

    def promote(self, name: str, version: int, *, owner: str | None = None, actor: str = "") -> AdapterVersion:
        """Point the name at one of its versions. Atomic and durable. Raises AdapterNotFound.

        With its owner given, a name may be one that points nowhere yet (published with `promote=False`).
        """
        with self.database.write() as db:
            found = owner
            if owner is None or not NAME_PATTERN.fullmatch(name):
                found, name = self.database.own(db, name, owner)
            assert found is not None
            target = self.database.fetch(db, found, name, version)
            if self.database.current(db, found, name) != version:
                self.database.point(db, found, name, version)
            self._step("db:pointer")
            self.database.audit(db, actor, "promote", (found, name, version, target.digest), {})
        return target

    def rollback(self, name: str, *, owner: str | None = None, actor: str = "") -> AdapterVersion:
        """Point the name at what it pointed at before.

        Raises ValueError if there is nothing before, AdapterNotFound.
        """
        with self.database.write() as db:
            found, name = self.database.own(db, name, owner)
            history = db.execute(
                "SELECT id, version FROM pointers WHERE owner=? AND name=? ORDER BY id DESC LIMIT 2", (found, name)
            ).fetchall()
            if len(history) < 2:
                raise ValueError(f"adapter {name!r} has pointed at one version only; promote another version instead")
            db.execute("DELETE FROM pointers WHERE id=?", (history[0][0],))
            db.execute("UPDATE names SET current=? WHERE owner=? AND name=?", (history[1][1], found, name))
            self._step("db:pointer")
            target = self.database.fetch(db, found, name, history[1][1])
            self.database.audit(
                db, actor, "rollback", (found, name, target.version, target.digest), {"from": history[0][1]}
            )
        return target

    def delete(self, name: str, *, owner: str | None = None, actor: str = "") -> Strings:
        """Forget a name and all its versions; their numbers stay used. Content is removed by the next `gc`.

        Returns the digests it had. Raises AdapterNotFound, ValueError if one of them is pinned.
        """
        with self.database.write() as db:
            found, name = self.database.own(db, name, owner)
            digests = [row.digest for row in self.database.select(db, "WHERE v.owner=? AND v.name=?", (found, name))]
            for digest in digests:
                holders = [row[0] for row in db.execute("SELECT holder FROM pins WHERE digest=?", (digest,))]
                elsewhere = db.execute(
                    "SELECT 1 FROM versions WHERE digest=? AND NOT (owner=? AND name=?)", (digest, found, name)
                ).fetchone()
                if holders and elsewhere is None:
                    raise ValueError(f"adapter {name!r} is pinned by {', '.join(holders)}; unpin {digest[:12]} first")
            db.execute("DELETE FROM versions WHERE owner=? AND name=?", (found, name))
            self._step("db:deleted")
            db.execute("DELETE FROM pointers WHERE owner=? AND name=?", (found, name))
            db.execute("UPDATE names SET current=NULL WHERE owner=? AND name=?", (found, name))
            self.database.audit(db, actor, "delete", (found, name, None, ""), {"digests": digests})
        return digests

    # --- content --------------------------------------------------------------------------------------------------

    def tensors(self, digest: str) -> dict[str, np.ndarray]:
        """Verified fp32 tensors of a version, read-only, from memory or disk; concurrent readers share one read.

        Raises AdapterNotFound, DamagedObject.
        """
        digest, spec = self._content(digest)
        try:
            return self._cache.get(digest, lambda: self._files.read(digest, spec))
        except FileNotFoundError as err:
            raise AdapterNotFound(f"content {digest[:12]} has been collected or lost") from err

    def _content(self, digest: str) -> tuple[str, AdapterSpec]:
        """Full digest and spec of stored content; names play no part here."""
        rows = []
        if DIGEST_PATTERN.fullmatch(digest):
            rows = (
                self.database.connection()
                .execute(
                    "SELECT digest, spec FROM contents WHERE digest >= ? AND digest < ? LIMIT 2", (digest, digest + "g")
                )
                .fetchall()
            )
        if len(rows) != 1:
            raise AdapterNotFound(
                f"{len(rows) or 'no'} adapter contents have the digest {digest!r}; give all 64 characters"
            )
        return rows[0][0], spec_of(rows[0][1])

    def pin(self, digest: str, holder: str, *, actor: str = "") -> None:
        """Keep this content while `holder` needs it. Idempotent. Raises AdapterNotFound."""
        digest, _ = self._content(digest)
        with self.database.write() as db:
            if db.execute("SELECT 1 FROM contents WHERE digest=?", (digest,)).fetchone() is None:
                raise AdapterNotFound(f"content {digest[:12]} was collected before it could be pinned")
            made = db.execute("INSERT OR IGNORE INTO pins VALUES(?,?,?)", (digest, holder, time.time())).rowcount
            self._step("db:pin")
            if made:
                self.database.audit(db, actor, "pin", ("", "", None, digest), {"holder": holder})

    def unpin(self, digest: str, holder: str, *, actor: str = "") -> None:
        """Give up a pin. Does nothing if there is none."""
        with self.database.write() as db:
            gone = db.execute(
                "DELETE FROM pins WHERE holder=? AND digest >= ? AND digest < ?", (holder, digest, digest + "g")
            ).rowcount
            self._step("db:pin")
            if gone:
                self.database.audit(db, actor, "unpin", ("", "", None, digest), {"holder": holder})

    def pins(self, digest: str) -> Strings:
        """Who holds this content, sorted."""
        return [
            row[0]
            for row in self.database.connection().execute(
                "SELECT holder FROM pins WHERE digest=? ORDER BY holder", (digest,)
            )
        ]

    def gc(self, keep_latest: int = 3, *, actor: str = "") -> Strings:
        """Drop old versions and content nothing needs. Returns the digests whose files were removed.

        Kept: per name the `keep_latest` newest versions, the one it points at and the one `rollback` would go to; and
        whatever is pinned. Files and temporary files that a crash left behind go too. Raises ValueError if keep_latest
        < 1.
        """
        if keep_latest < 1:
            raise ValueError(f"gc: keep_latest={keep_latest}; at least 1 version of a name is kept")
        return collect(self.database, self._files, self._cache, keep_latest, actor=actor)

    # --- probes, audit, counters ----------------------------------------------------------------------------------

    def record_probe(self, digest: str, base_digest: str, result: Mapping[str, Any], *, actor: str = "") -> None:
        """Keep what a loaded version was measured to do on one base (replaces an earlier result)."""
        with self.database.write() as db:
            db.execute(
                "INSERT OR REPLACE INTO probes VALUES(?,?,?,?)",
                (digest, base_digest, time.time(), json.dumps(dict(result), sort_keys=True)),
            )
            self._step("db:probe")
            self.database.audit(db, actor, "probe", ("", "", None, digest), {"base_digest": base_digest})

    def probe(self, digest: str, base_digest: str) -> dict[str, Any] | None:
        """The recorded result, None if there is none."""
        row = (
            self.database.connection()
            .execute("SELECT result FROM probes WHERE digest=? AND base_digest=?", (digest, base_digest))
            .fetchone()
        )
        return None if row is None else json.loads(row[0])

    def record_conversion(
        self,
        original: str,
        base_digest: str,
        adapter_dtype: str,
        copy: str,
        *,
        accepted: bool,
        report: Mapping[str, Any],
        actor: str = "",
    ) -> None:
        """Keep what the quality gate found of a low-precision copy (digest `copy`) of version `original` on one base.

        adapter_dtype: "fp8" or "nvfp4". Replaces an earlier finding. Raises ValueError for another adapter_dtype.
        """
        check_adapter_dtype(adapter_dtype)
        with self.database.write() as db:
            row = (original, base_digest, adapter_dtype, copy, int(accepted), time.time(), json.dumps(dict(report)))
            db.execute("INSERT OR REPLACE INTO conversions VALUES(?,?,?,?,?,?,?)", row)
            self._step("db:conversion")
            detail = {"base_digest": base_digest, "adapter_dtype": adapter_dtype, "copy": copy, "accepted": accepted}
            self.database.audit(db, actor, "conversion", ("", "", None, original), detail)

    def conversion(self, original: str, base_digest: str, adapter_dtype: str) -> dict[str, Any] | None:
        """What was recorded: {"copy": digest, "accepted": bool, "report": {...}}; None if nothing was."""
        row = (
            self.database.connection()
            .execute(
                "SELECT copy, accepted, report FROM conversions WHERE original=? AND base_digest=? AND adapter_dtype=?",
                (original, base_digest, adapter_dtype),
            )
            .fetchone()
        )
        return None if row is None else {"copy": row[0], "accepted": bool(row[1]), "report": json.loads(row[2])}

    def stored_as(self, original: str, base_digest: str, adapter_dtype: str) -> AdapterVersion | None:
        """The copy that may be served in place of `original`: accepted by the gate on this base, and still here. None: serve the
        original. adapter_dtype "bf16" has no copies. Raises ValueError for one that is unknown.
        """
        check_adapter_dtype(adapter_dtype)
        found = self.conversion(original, base_digest, adapter_dtype)
        if found is None or not found["accepted"]:
            return None
        copies = self.database.select(
            self.database.connection(), "WHERE v.digest=? ORDER BY v.id LIMIT 1", (found["copy"],)
        )
        return copies[0] if copies else None

    def note(
        self,
        action: str,
        *,
        actor: str = "",
        ref: AdapterVersion | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an audit row for something done with a version elsewhere (load, unload, refuse)."""
        with self.database.write() as db:
            owner, name, version, digest = (
                ("", "", None, "") if ref is None else (ref.owner, ref.name, ref.version, ref.digest)
            )
            self.database.audit(db, actor, action, (owner, name, version, digest), dict(detail or {}))

    def audit(self, *, after_id: int = 0, limit: int = 100, owner: str | None = None) -> Rows:
        """Audit rows with id > after_id, oldest first."""
        where, args = (" AND owner=?", (owner,)) if owner is not None else ("", ())
        rows = self.database.connection().execute(
            f"SELECT * FROM audit WHERE id>?{where} ORDER BY id LIMIT ?", (after_id, *args, limit)
        )
        return [AuditRow(**dict(zip(AUDIT_COLUMNS, row)) | {"detail": json.loads(row[-1])}) for row in rows]

    def owner_usage(self, owner: str) -> tuple[int, int]:
        """(names, bytes of distinct content) an owner has."""
        db = self.database.connection()
        names = db.execute("SELECT COUNT(*) FROM names WHERE owner=? AND current IS NOT NULL", (owner,)).fetchone()[0]
        size = db.execute(
            "SELECT COALESCE(SUM(bytes),0) FROM contents WHERE digest IN (SELECT digest FROM versions WHERE owner=?)",
            (owner,),
        ).fetchone()[0]
        return int(names), int(size)

    def _check_quota(self, owner: str, quota: tuple[int, int]) -> None:
        """Within a transaction, after the new version's row: undone by raising."""
        names, size = self.owner_usage(owner)
        names += (
            self.database.connection()
            .execute(  # a name that is new in this transaction points nowhere yet
                "SELECT COUNT(*) FROM names n WHERE owner=? AND current IS NULL AND EXISTS(SELECT 1 FROM versions v"
                " WHERE v.owner=n.owner AND v.name=n.name)",
                (owner,),
            )
            .fetchone()[0]
        )
        for what, used, allowed in (("adapters", names, quota[0]), ("bytes of adapters", size, quota[1])):
            if allowed and used > allowed:
                raise AdapterRejected(
                    f"{owner or 'shared'} would have {used} {what}; {allowed} are allowed: delete some first"
                )

    def change_count(self) -> int:
        """Grows with every change by any process: the id of the last audit row."""
        return int(self.database.connection().execute("SELECT COALESCE(MAX(id),0) FROM audit").fetchone()[0])

    def identity(self) -> tuple[str, str]:
        """(absolute folder, random id made with the store): tells whether a folder elsewhere is this very store."""
        found = self.database.connection().execute("SELECT value FROM meta WHERE key='store_id'").fetchone()
        return str(self.root.resolve()), str(found[0])

    def stats(self) -> StoreStats:
        db = self.database.connection()
        names, versions, contents, size = (
            int(db.execute(query).fetchone()[0])
            for query in (
                "SELECT COUNT(*) FROM names WHERE current IS NOT NULL",
                "SELECT COUNT(*) FROM versions",
                "SELECT COUNT(*) FROM contents",
                "SELECT COALESCE(SUM(bytes),0) FROM contents",
            )
        )
        cache = self._cache
        counters = (cache.bytes, cache.hits, cache.reads, cache.read_bytes, self._remote_reads, self._remote_bytes)
        return StoreStats(names, versions, contents, size, *counters)

    def content_bytes(self, digests: Sequence[str]) -> dict[str, int]:
        """Size on disk of those contents the store has."""
        db, sizes = self.database.connection(), dict[str, int]()
        for digest in digests:
            row = db.execute("SELECT bytes FROM contents WHERE digest=?", (digest,)).fetchone()
            if row is not None:
                sizes[digest] = int(row[0])
        return sizes
