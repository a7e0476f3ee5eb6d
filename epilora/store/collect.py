"""Collecting what nothing needs any more: old versions, their content, and files a crash left behind."""

from __future__ import annotations

from .database import Database
from .host_cache import HostCache
from .objects import ObjectFiles


def collect(database: Database, files: ObjectFiles, cache: HostCache, keep_latest: int, *, actor: str) -> list[str]:
    """Digests whose files were removed. What is kept: see `AdapterStore.gc`.

    Under the exclusive file lock, so that no publisher has written a file whose row is still to come.
    """
    with files.lock(exclusive=True):
        with database.write() as db:
            doomed = [
                row[0]
                for row in db.execute(
                    "SELECT v.id FROM versions v JOIN names n ON n.owner=v.owner AND n.name=v.name"
                    " WHERE v.version IS NOT n.current"
                    " AND v.digest NOT IN (SELECT digest FROM pins)"
                    " AND (SELECT COUNT(*) FROM versions w WHERE w.owner=v.owner AND w.name=v.name"
                    "      AND w.version > v.version) >= ?"
                    " AND v.version NOT IN (SELECT p.version FROM pointers p"
                    "      WHERE p.owner=v.owner AND p.name=v.name ORDER BY p.id DESC LIMIT 2)",
                    (keep_latest,),
                )
            ]
            db.executemany("DELETE FROM versions WHERE id=?", [(row,) for row in doomed])
            database.step("gc:versions")
            db.execute(
                "DELETE FROM pointers WHERE NOT EXISTS(SELECT 1 FROM versions v WHERE v.owner=pointers.owner"
                " AND v.name=pointers.name AND v.version=pointers.version)"
            )
            unused = [
                row[0]
                for row in db.execute(
                    "SELECT digest FROM contents WHERE digest NOT IN (SELECT digest FROM versions)"
                    " AND digest NOT IN (SELECT digest FROM pins) ORDER BY digest"
                )
            ]
            db.executemany("DELETE FROM probes WHERE digest=?", [(digest,) for digest in unused])
            db.executemany("DELETE FROM contents WHERE digest=?", [(digest,) for digest in unused])
            database.step("gc:contents")
            if doomed or unused:
                database.audit(db, actor, "gc", ("", "", None, ""), {"versions": len(doomed), "digests": unused})
        cache.drop(unused)
        for digest in unused:
            files.remove(digest)
        known = {row[0] for row in database.connection().execute("SELECT digest FROM contents")}
        orphans = files.sweep(known.__contains__)
    return sorted({*unused, *orphans})
