"""Copy a span of the request log into a recording: its frames, and the rows that they need.

Invariant: a recording is one moment of the log, and complete or absent.
Never: takes the text of a prompt; writes to the log.
"""

from __future__ import annotations

import shlex
import shutil
import sqlite3
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from appliance.observe.frame.protocol import MAX_FRAME_EVENTS
from appliance.observe.frame.recording import APPLICATION_ID, RECORDING_VERSION
from appliance.observe.log.query import Span, log_time
from appliance.observe.log.reader import reading
from engine.errors import RequestError
from engine.units import size_text

_PREFIX = ".recording-"
MAX_BYTES = 512 << 20
"""Days of frames have a tenth of it; without it a viewer could fill the daemon's disk."""
ROOM_BYTES = 256 << 20
"""Bytes of the disk that a recording leaves free."""
LONGEST_REQUEST = timedelta(days=1)
"""Maximum age of requests to include that began before the span."""
_NEVER = "9"
"""A text after every time."""

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
        RequestError: 404 `nothing_recorded`: it has no frames of that span; 413
            `recording_too_large`: it exceeds MAX_BYTES, or would fill the disk.
    """
    until = span.until or _NEVER
    free_bytes = shutil.disk_usage(target.parent).free - ROOM_BYTES
    if free_bytes <= 0:
        raise RequestError(
            f"the disk has no room for a recording: it leaves {size_text(ROOM_BYTES)} free",
            code="recording_too_large",
            status=413,
            hint=f"free space there: df -h {shlex.quote(str(target.parent))}",
        )
    with reading(log_path) as db:
        # Also what is written by others meanwhile stays out: one transaction sees one moment.
        db.execute("ATTACH ? AS made", (f"{target.absolute().as_uri()}?mode=rw",))
        db.execute("PRAGMA made.journal_mode = OFF")
        db.execute("PRAGMA made.synchronous = OFF")
        db.execute(f"PRAGMA made.application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA made.user_version = {RECORDING_VERSION}")
        (page_bytes,) = db.execute("PRAGMA made.page_size").fetchone()
        most_pages = max(min(MAX_BYTES, free_bytes) // page_bytes, 1)
        db.execute(f"PRAGMA made.max_page_count = {most_pages}")
        db.execute("BEGIN")
        (since,) = db.execute(
            "SELECT min(at) FROM frames WHERE at >= ? AND at < ?", (span.since or "", until)
        ).fetchone()
        if since is None:
            raise RequestError(
                "nothing was recorded in that time", code="nothing_recorded", status=404
            )
        begun = log_time(datetime.fromisoformat(since) - LONGEST_REQUEST)
        try:
            for copy in _COPIES:
                db.execute(copy, {"since": since, "until": until, "begun": begun})
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise RequestError(
                f"the recording would take more than {size_text(most_pages * page_bytes)}",
                code="recording_too_large",
                status=413,
                hint="ask for a shorter time with since and until",
            ) from error


def remove_unfinished(log_path: Path) -> None:
    """Remove unfinished recordings of a daemon that was killed."""
    for left in log_path.parent.glob(f"{_PREFIX}*"):
        left.unlink(missing_ok=True)


def temporary_recording(log_path: Path, span: Span) -> IO[bytes]:
    """Open a recording as a file that vanishes when closed; raises as write_recording()."""
    with NamedTemporaryFile(prefix=_PREFIX, dir=log_path.parent) as made:
        write_recording(log_path, Path(made.name), span)
        return open(made.name, "rb")
