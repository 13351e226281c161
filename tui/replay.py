"""Play a recording as a source of frames, from any second.

Invariant: a frame is shown with the requests and events of its own time; a damaged one is skipped
and counted, never guessed.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from appliance.observe.frame.protocol import (
    FRAME_VERSION,
    MAX_FRAME_EVENTS,
    MAX_FRAME_REQUESTS,
    EventFrame,
    Frame,
    RequestFrame,
)
from appliance.observe.frame.recording import FramePacker, RecordingError, open_recording
from tui.history import HISTORY_FRAMES
from tui.past_requests import PastRequest, ended, request_at
from tui.playback import EXIT_USAGE, Playback, iso, parse_moment, unix_ms
from tui.view import REPLAY, DaemonLink, View

_FRAMES = "SELECT at, run_id, seq FROM frames WHERE version = ? ORDER BY at, run_id, seq"
_FRAME = "SELECT * FROM frames WHERE at = ? AND run_id = ? AND seq = ?"
_MARKS = "SELECT DISTINCT at FROM events WHERE severity != 'info' ORDER BY at"
_HAPPENED = (
    "SELECT min(received_at) FROM requests UNION ALL SELECT min(at) FROM events"
    " WHERE at >= ? AND code NOT IN ('worker.ready')"
)
"""The first request or event; a recording has only requests that were live in its span."""
_REQUESTS = (
    "SELECT * FROM requests WHERE run_id IN (?, ?, ?) AND received_at >= ? AND received_at <= ?"
    " ORDER BY received_at"
)
"""Live requests of a run; one that outlives daemons has its row in the next runs."""
_LATEST = (
    "SELECT * FROM requests WHERE run_id = ? AND received_at <= ?"
    " ORDER BY received_at DESC LIMIT 1000"
)
_REQUEST = "SELECT * FROM requests WHERE run_id IN (?, ?, ?, ?) AND rid = ?"
_EVENTS = (
    "SELECT at, severity, code, message FROM events WHERE run_id = ? AND at <= ?"
    f" ORDER BY at DESC LIMIT {MAX_FRAME_EVENTS}"
)


class Replay:
    """Read an open recording.

    Raises:
        RecordingError: as open_recording(), or its times cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._db = open_recording(path)
        self._packers: dict[int, FramePacker] = {}
        self._damaged: set[int] = set()
        try:
            self._index()
        except (sqlite3.Error, ValueError, TypeError, OverflowError, IndexError) as error:
            self._db.close()
            raise RecordingError(f"is a damaged recording: {error}", where=self._where) from error

    def _index(self) -> None:
        self._moments_ms, self._run_ids, self._seqs = array("q"), array("q"), array("q")
        for at, run_id, seq in self._db.execute(_FRAMES, (FRAME_VERSION,)):
            self._moments_ms.append(_ms(at))
            self._run_ids.append(run_id)
            self._seqs.append(seq)
        self._runs = sorted(set(self._run_ids))
        first_ms, last_ms = self._moments_ms[0], self._moments_ms[-1]
        marks_ms = (_ms(at) for (at,) in self._db.execute(_MARKS))
        self._marks_ms = [at_ms for at_ms in marks_ms if first_ms <= at_ms <= last_ms]
        (longest_us,) = self._db.execute("SELECT max(t_finished_us) FROM requests").fetchone()
        self._longest_ms = (longest_us or 0) / 1000

    def close(self) -> None:
        """Close the recording's file."""
        self._db.close()

    @property
    def start(self) -> Playback:
        """The first frame, paused."""
        playback = Playback(self._moments_ms, self._marks_ms)
        return playback.seek(self._moments_ms[0])

    @property
    def opening(self) -> Playback:
        """The first frame with a request or a new event; the first frame if none has."""
        start, first = self.start, iso(self._moments_ms[0])
        with self._damage_named():
            begun = [_ms(at) for (at,) in self._db.execute(_HAPPENED, (first,)) if at is not None]
        if not begun or min(begun) > self._moments_ms[-1]:
            return start
        found = start.seek(min(begun))
        return found if found.at_ms >= min(begun) else found.step(1)

    @property
    def num_damaged(self) -> int:
        """Frames found damaged so far."""
        return len(self._damaged)

    def view_at(self, index: int, before: tuple[int, View] | None = None) -> View:
        """Build the view of one frame, with the history that led to it.

        Args:
            index: of the frame, in the order of Playback.
            before: another index and its view, to continue its history from.
        """
        begin, view = max(0, index - HISTORY_FRAMES), View()  # one more, for rates
        if before is not None and begin <= before[0] <= index:
            begin, view = before[0] + 1, before[1]
        frame = view.frame
        for place in range(begin, index + 1):
            found = self._gauges(place)
            if found is not None:
                view, frame = view.after(found), found
        why = "this frame of the recording is damaged" if index in self._damaged else ""
        if frame is not None:
            frame = self._whole(frame, index)
        return replace(view, frame=frame, link=DaemonLink(REPLAY, why))

    def finished_at(self, index: int) -> tuple[RequestFrame, ...]:
        """List the requests that had ended by a frame's time, the newest end first.

        Raises:
            RecordingError: a row cannot be read.
        """
        now_ms = self._moments_ms[index]
        with self._damage_named():
            runs = dict.fromkeys(self._runs_near(index, -1, 0))
            rows = [row for run in runs for row in self._db.execute(_LATEST, (run, iso(now_ms)))]
            past = [(end_ms, row) for row in rows if (end_ms := _end_ms(row)) <= now_ms]
            past.sort(key=lambda item: -item[0])
            return tuple(ended(row) for _, row in past[:MAX_FRAME_REQUESTS])

    def request_at(self, request_id: str, index: int) -> RequestFrame | None:
        """Rebuild one request at a frame's time; None: unknown, or not yet received.

        Raises:
            RecordingError: its row cannot be read.
        """
        now_ms = self._moments_ms[index]
        with self._damage_named():
            runs = self._runs_near(index, -1, 2)
            row = self._db.execute(_REQUEST, (*runs, request_id)).fetchone()
            frame = self._gauges(index)
            if row is None or frame is None or (age_ms := now_ms - _ms(row["received_at"])) < 0:
                return None
            return ended(row) if _end_ms(row) <= now_ms else request_at(row, age_ms, frame)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise RecordingError(f"is a damaged recording: {error}", where=self._where) from error

    def views(self, begin: int = 0) -> Iterator[View]:
        """Yield every frame's view from an index on, in order."""
        before = None
        for index in range(begin, len(self._moments_ms)):
            view = self.view_at(index, before)
            before = index, view
            yield view

    def frames(self) -> list[Frame]:
        """List all frames without their requests and events; damaged ones are left out."""
        found = map(self._gauges, range(len(self._moments_ms)))
        return [frame for frame in found if frame is not None]

    def num_unlogged(self, view: View) -> int:
        """Count the live requests without a row: they had not ended when the recording was made.

        The count is 0 where more were live than a frame lists.
        """
        frame = view.frame
        if frame is None or len(frame.requests) >= MAX_FRAME_REQUESTS:
            return 0
        return max(0, frame.num_requests - len(frame.requests))

    def _gauges(self, index: int) -> Frame | None:
        """Read the frame of one row, without requests and events; None: damaged."""
        if index in self._damaged:
            return None
        key = iso(self._moments_ms[index]), self._run_ids[index], self._seqs[index]
        try:
            row = self._db.execute(_FRAME, key).fetchone()
            return self._packer(row["template_id"]).unpack(
                row["data"], at=row["at"], seq=row["seq"], uptime_ms=row["uptime_ms"]
            )
        except (sqlite3.Error, ValueError, TypeError):
            self._damaged.add(index)
            return None

    def _packer(self, template_id: int) -> FramePacker:
        if template_id not in self._packers:
            row = self._db.execute(
                "SELECT frame FROM frame_templates WHERE template_id = ?", (template_id,)
            ).fetchone()
            self._packers[template_id] = FramePacker(row["frame"])
        return self._packers[template_id]

    def _runs_near(self, index: int, first: int, last: int) -> list[int]:
        """Return the runs around a frame's, by their places from it; its neighbours at the ends."""
        place = self._runs.index(self._run_ids[index])
        places = (place + each for each in range(first, last + 1))
        return [self._runs[max(0, min(each, len(self._runs) - 1))] for each in places]

    def _whole(self, frame: Frame, index: int) -> Frame:
        """Add the requests and events of its time to a frame, as far as rows have them."""
        with self._damage_named():
            requests: list[RequestFrame] = list(self._requests(frame, index))
            rows = self._db.execute(_EVENTS, (self._run_ids[index], frame.at)).fetchall()
            events = [EventFrame(*map(str, row)) for row in reversed(rows)]
        whole = copy(frame)
        whole.requests, whole.events = requests, events
        return whole

    def _requests(self, frame: Frame, index: int) -> Iterator[PastRequest]:
        now_ms = _ms(frame.at)
        begin = iso(max(0, int(now_ms - self._longest_ms)))
        num_shown = 0
        runs = self._runs_near(index, 0, 2)
        for row in self._db.execute(_REQUESTS, (*runs, begin, frame.at)):
            age_ms = float(now_ms - _ms(row["received_at"]))
            if age_ms < (row["t_finished_us"] or 0) / 1000 and num_shown < MAX_FRAME_REQUESTS:
                num_shown += 1
                yield request_at(row, age_ms, frame)


def past_frames(recording: bytes) -> list[Frame]:
    """List the frames of a recording that is in memory.

    Raises:
        RecordingError: as Replay.
        OSError: there is no place for its file.
    """
    with NamedTemporaryFile() as file:
        file.write(recording)
        file.flush()
        with closing(Replay(Path(file.name))) as replay:
            return replay.frames()


def open_at(path: Path, at: str) -> tuple[Replay, Playback]:
    """Open a recording at a time for parse_moment(); empty: the first frame.

    Raises:
        RecordingError: as Replay, or the time is invalid.
    """
    replay = Replay(path)
    start = replay.start
    at_ms = parse_moment(at, start.at_ms) if at else start.at_ms
    if at_ms is None:
        replay.close()
        hint = "give 14:02:11, +5m or an ISO time, in UTC"
        error = RecordingError(f"{at!r} is no time", where="--at", hint=hint)
        error.exit_code = EXIT_USAGE
        raise error
    return replay, start.seek(at_ms)


def _end_ms(row: sqlite3.Row) -> float:
    """Return when a row's request ended, in Unix milliseconds."""
    return float(_ms(row["received_at"]) + (row["t_finished_us"] or 0) / 1000)


def _ms(at: str) -> int:
    """Parse the log's time into Unix milliseconds."""
    return unix_ms(datetime.fromisoformat(at))
