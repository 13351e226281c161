"""Tell an SQLite file of ours from another program's, before anything is written to it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database, Migrations


def is_foreign(path: Path, migration: Migrations, application_id: int | None = None) -> bool:
    """Say whether a file has tables, but neither our migrations nor our application id.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        found = db.execute("PRAGMA application_id").fetchone()[0]
        if found == application_id or migration.applied(Database(db, execute_plugins=False)):
            return False
        return bool(found or db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
