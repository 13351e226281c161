"""Frames into the log: packed against a template that is renewed now and then.

Owns: the template in use.
Invariant: a frame's template is in the file before it or with it.
Never: commits; keeps requests or events, which have rows of their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from appliance.frame.protocol import MAX_FRAME_EVENTS, Frame
from appliance.frame.recording import APPLICATION_ID, RECORDING_VERSION, FramePacker, template_of
from appliance.log.query import Span, log_time, reading
from engine.errors import RequestError

TEMPLATE_FRAMES = 600
"""So many share one at most: ten minutes."""


class Recorder:
    """The frames of one run."""

    def __init__(self) -> None:
        self._packer: FramePacker | None = None
        self._template_id = 0
        self._state = ""
        self._num_packed = 0

    def reset(self) -> None:
        """The template may not be in the file: the next frame brings a new one."""
        self._packer = None

    def insert(self, db: sqlite3.Connection, run_id: int, frames: Iterable[Frame]) -> None:
        """Insert frames in their order; after an error, reset()."""
        for frame in frames:
            packer = self._packer_for(db, frame)
            db.execute(
                "INSERT OR IGNORE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    frame.at,
                    run_id,
                    frame.seq,
                    round(frame.uptime_s * 1000),
                    frame.version,
                    self._template_id,
                    packer.pack(frame),
                ),
            )

    def _packer_for(self, db: sqlite3.Connection, frame: Frame) -> FramePacker:
        # A frame of another state, as loading, has little in common with those that follow.
        is_stale = self._num_packed == TEMPLATE_FRAMES or frame.state != self._state
        if self._packer is None or is_stale:
            template = template_of(frame)
            inserted = db.execute("INSERT INTO frame_templates (frame) VALUES (?)", (template,))
            self._packer = FramePacker(template)
            self._template_id = inserted.lastrowid or 0
            self._state = frame.state
            self._num_packed = 0
        self._num_packed += 1
        return self._packer


# A recording out of the log: frames of a span, and what it takes to show all that was then.
#
# Owns: which rows a recording has.
# Invariant: a recording is one moment of the log, and complete or not there at all.
# Never: takes the text of a prompt; writes to the log.


_PREFIX = ".recording-"
LONGEST_REQUEST = timedelta(days=1)
"""Requests that began longer ago than this before the span are not looked for in it."""
_NEVER = "9"
"""After every time."""

# Text of prompts is in a table of its own, which is not among these.
_COPIES = (
    "CREATE TABLE made.frames AS SELECT * FROM main.frames WHERE at >= :since AND at < :until",
    "CREATE UNIQUE INDEX made.ix_frames ON frames(at, run_id, seq)",
    "CREATE TABLE made.frame_templates AS SELECT * FROM main.frame_templates"
    " WHERE template_id IN (SELECT template_id FROM made.frames)",
    "CREATE TABLE made.requests AS SELECT * FROM main.requests"
    " WHERE received_at >= :begun AND received_at < :until AND"
    " julianday(received_at) + coalesce(t_finished_us, 0) / 86400e6 >= julianday(:since)",
    "CREATE INDEX made.ix_requests ON requests(run_id, received_at)",
    "CREATE TABLE made.events AS SELECT * FROM main.events WHERE at >= :since AND at < :until"
    " UNION ALL SELECT * FROM (SELECT * FROM main.events WHERE at < :since"
    f" ORDER BY at DESC LIMIT {MAX_FRAME_EVENTS})",
    "CREATE INDEX made.ix_events ON events(run_id, at)",
    "CREATE TABLE made.runs AS SELECT * FROM main.runs"
    " WHERE run_id IN (SELECT run_id FROM made.frames)",
)


def write_recording(log_path: Path, target: Path, span: Span) -> None:
    """Write a recording into an empty file.

    Raises:
        PenstockError: the log is missing, unreadable, or of a release that did not record.
        RequestError: 404 `nothing_recorded`: it has no frames of that span.
    """
    until = span.until or _NEVER
    with reading(log_path) as db:
        # Also what is written by others meanwhile stays out: one transaction sees one moment.
        db.execute("ATTACH ? AS made", (f"{target.absolute().as_uri()}?mode=rw",))
        db.execute("PRAGMA made.journal_mode = OFF")
        db.execute("PRAGMA made.synchronous = OFF")
        db.execute(f"PRAGMA made.application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA made.user_version = {RECORDING_VERSION}")
        db.execute("BEGIN")
        (since,) = db.execute(
            "SELECT min(at) FROM frames WHERE at >= ? AND at < ?", (span.since or "", until)
        ).fetchone()
        if since is None:
            raise RequestError(
                "nothing was recorded in that time", code="nothing_recorded", status=404
            )
        begun = log_time(datetime.fromisoformat(since) - LONGEST_REQUEST)
        for copy in _COPIES:
            db.execute(copy, {"since": since, "until": until, "begun": begun})
        db.execute("COMMIT")


def remove_unfinished(log_path: Path) -> None:
    """Remove recordings that a daemon was making when it was killed."""
    for left in log_path.parent.glob(f"{_PREFIX}*"):
        left.unlink(missing_ok=True)


def temporary_recording(log_path: Path, span: Span) -> IO[bytes]:
    """A recording as an open file that is gone when it is closed; raises as write_recording()."""
    with NamedTemporaryFile(prefix=_PREFIX, dir=log_path.parent) as made:
        write_recording(log_path, Path(made.name), span)
        return open(made.name, "rb")
