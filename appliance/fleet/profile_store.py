"""Keep the machine's profile in an SQLite file of the state folder.

Invariant: several processes may read and write it; a fact is replaced whole; a file that is damaged
or not ours is as good as none, and is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from sqlite_utils import Database

from engine.errors import PenstockError
from engine.profile.facts import Fact, FactKey, Profile, Scope
from engine.system.own_files import open_own
from migrations.profile import migration
from migrations.sqlite_files import is_foreign

log = logging.getLogger("penstock")

FILE_NAME = "profile.db"
BUSY_TIMEOUT_S, _POLL_S = 5.0, 0.02
_told: set[str] = set()
"""Problems that this process has logged: each start reads the file several times."""
_SCOPE = "machine = ? AND build = ? AND model = ? AND dtype = ? AND placement = ?"

MAX_MS, MAX_SAMPLE = 1e6, 1e13
"""Largest time of a step, and largest other sample, that is no damage."""
_DAMAGED = (ValueError, TypeError, KeyError, RecursionError)
"""What damaged text, values and names of columns raise."""


class ProfileUnusable(PenstockError):
    """The profile's file cannot be read or written."""


def _warn(error: ProfileUnusable) -> None:
    """Log once that the profile is not used, and what mends it."""
    if str(error) not in _told:
        _told.add(str(error))
        log.warning("Profile not used, defaults instead: %s. %s", error, error.hint)


def _lock(fd: int) -> None:
    """Lock the file; raises TimeoutError if another program keeps it locked."""
    end_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end_s:
                raise TimeoutError("another program keeps the file locked") from error
        time.sleep(_POLL_S)


def _samples(what: str, text: str) -> list[float]:
    """Read a fact's samples; raises ValueError or TypeError if save() has not written them."""
    samples = json.loads(text)
    most = MAX_MS if what.endswith("_ms") else MAX_SAMPLE
    if not samples or not all(0 < s <= most for s in samples):
        raise ValueError("the samples of a fact are damaged")
    return [float(sample) for sample in samples]


class Row(NamedTuple):
    """A stored fact and its scope."""

    scope: Scope
    key: FactKey
    fact: Fact


class ProfileStore:
    """The profile of one state folder.

    Args:
        state_dir: where the file is, or will be.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE_NAME
        self.is_readable = True
        """False once it could not be read; what is measured cannot be kept then either."""

    def load(self, scope: Scope) -> Profile:
        """Read the facts of a scope; none where there is no file that can be read."""
        try:
            rows = self.rows(scope)
        except ProfileUnusable as error:
            self.is_readable, rows = False, []
            _warn(error)
        return Profile({row.key: row.fact for row in rows})

    def rows(self, scope: Scope | None = None) -> list[Row]:
        """Read every fact, or one scope's facts.

        Raises:
            ProfileUnusable: the file cannot be read.
        """
        if not self.path.exists():
            return []
        where, values = ("1", ()) if scope is None else (_SCOPE, tuple(scope))
        query = f"SELECT * FROM facts WHERE {where} ORDER BY 1, 2, 3, 4, 5, 6, 9, 7, 8"
        with self._open() as db:
            found = db.execute(query, values).fetchall()
            return [
                Row(Scope(*row[:5]), FactKey(*row[5:9]), Fact(_samples(row[5], row[9]), row[-1]))
                for row in found
            ]

    def save(self, scope: Scope, facts: Mapping[FactKey, list[float]]) -> None:
        """Write facts, each with all its samples.

        Raises:
            ProfileUnusable: the file cannot be written.
        """
        at = datetime.now(UTC).isoformat(timespec="seconds")
        rows = []
        for key, samples in facts.items():
            fact = Fact(samples)
            told = json.dumps([float(f"{sample:.6g}") for sample in samples])
            rows.append((*scope, *key, told, fact.value, fact.low, fact.high, at))
        with self._open() as db, db:
            db.executemany(f"INSERT OR REPLACE INTO facts VALUES ({', '.join('?' * 14)})", rows)

    def clear(self) -> int:
        """Forget all facts; return how many there were, 0 if the file cannot be read.

        Raises:
            ProfileUnusable: the file cannot be deleted.
        """
        try:
            num_facts = len(self.rows())
        except ProfileUnusable:
            num_facts = 0
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ProfileUnusable(str(error), where=str(self.path)) from error
        _told.clear()
        return num_facts

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            # closed after the connection: closing the file would drop SQLite's own locks on it
            with open(open_own(self.path, os.O_RDWR | os.O_CREAT, 0o640), "rb") as file:
                _lock(file.fileno())  # two may make or migrate it at once
                with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)) as db:
                    if is_foreign(self.path, migration):
                        raise sqlite3.DatabaseError("another program made it")
                    migration.apply(Database(db))
                    yield db
        except (OSError, sqlite3.Error, *_DAMAGED) as error:
            hint = "`penstock profile clear` starts a new one."
            raise ProfileUnusable(str(error), where=str(self.path), hint=hint) from error


@dataclass(frozen=True, slots=True)
class Known:
    """The facts of one scope, and their store."""

    store: ProfileStore
    scope: Scope
    profile: Profile

    @classmethod
    def of(cls, state_dir: Path, scope: Scope) -> Known:
        store = ProfileStore(state_dir)
        return cls(store, scope, store.load(scope))

    def save(self) -> None:
        """Write the facts that changed since the last call; blocking."""
        self.write(self.profile.take_changed())

    def write(self, changed: Mapping[FactKey, list[float]]) -> None:
        """Write facts, and log once if that fails; from any thread."""
        if not changed:
            return
        try:
            self.store.save(self.scope, changed)
        except ProfileUnusable as error:
            _warn(error)
