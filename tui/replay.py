"""A recording as the source of frames: any of its seconds, whole; and how its time passes.

Owns: the open recording, the place in it and the pace; what a row of the log tells of the time
before its request ended.
Invariant: a frame is shown with the requests and events of its own time; one that is damaged is
passed over and counted, never guessed.
Never: writes; needs a daemon; imports Textual.
"""

from __future__ import annotations

import math
import re
import sqlite3
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from appliance.frame.protocol import (
    FRAME_VERSION,
    MAX_FRAME_EVENTS,
    MAX_FRAME_REQUESTS,
    EventFrame,
    Frame,
    RequestFrame,
    computed_at_end,
)
from appliance.frame.recording import FramePacker, RecordingError, open_recording
from tui.view import HISTORY_FRAMES, REPLAY, DaemonLink, View

# The requests of a past second, made again from their rows in the log.
# Invariant: stages and phases are those of the stamps; what the stamps do not say (tokens between
# the first and the last, blocks) is an estimate, and `is_estimated` says so.
# Never: shows a stage before its end; reads a clock or a file.


_STAGES = (
    ("tokenize_ms", "t_tokenized_us"),
    ("queue_ms", "t_started_us"),
    ("prefill_ms", "t_first_token_us"),
    ("handoff_ms", "t_attached_us"),
    ("decode_wait_ms", "t_decode_started_us"),
)
_FOLLOWS = (
    ("t_tokenized_us", "queue_ms"),
    ("t_started_us", "prefill_ms"),
    ("t_first_token_us", "decode_wait_ms"),
    ("t_attached_us", "decode_wait_ms"),
    ("t_decode_started_us", "decode_ms"),
)
"""Stamps in order, each with the stage that begins there where nothing else is known."""
_KEPT = (
    "endpoint", "model", "user", "num_sequences", "prompt_tokens", "cached_tokens", "received_at",
    "restored_tokens",
)  # fmt: skip
_KEPT_OF_ENDED = (
    "finish_reason", "error", "transport", "handoff_bytes", "route", "route_reason",
    "restore_reason", "workers", "links", "changes",
    "prefill_j", "decode_j", "cancelled_by",
)  # fmt: skip

_ADDED = {
    "preemptions": 0, "paused_us": None, "cached_tokens": None,
    "restored_us": None, "restored_tokens": 0, "restore_reason": None,
    "workers": None, "links": None, "changes": None,
}  # fmt: skip
"""Columns that a recording of an earlier release has not got, and what they say then."""


class PastRequest(RequestFrame):
    """A request as it was."""

    is_estimated: bool = True
    """Its tokens and blocks between two stamps are."""


def request_at(row: Mapping[str, Any], age_ms: float, frame: Frame) -> PastRequest:
    """The request of a row when it was so old, which must be less than it became.

    Args:
        row: of the requests table.
        age_ms: the time since its arrival.
        frame: of that moment, for its workers and pools.
    """
    row = {**_ADDED, **row}
    now_us = age_ms * 1000
    phase = _phase(row, now_us)
    transport = row["transport"] if _is_past(row, "t_attached_us", now_us) else None
    output_tokens = _output_tokens(row, now_us)
    route = row["route"] if phase != "queued" else None
    return PastRequest(
        id=row["rid"],
        phase=phase,
        stream=bool(row["stream"]),
        computed_tokens=_computed_tokens(row, now_us, output_tokens),
        output_tokens=output_tokens,
        max_tokens=(row["max_tokens"] or 0) * row["num_sequences"],
        num_blocks=0 if phase == "queued" else _num_blocks(row, output_tokens, frame),
        worker=None if phase == "queued" else _worker(row, phase, frame),
        transport=transport,
        age_ms=age_ms,
        handoff_bytes=row["handoff_bytes"] if transport else None,
        route=route,
        route_reason=row["route_reason"] if route else None,
        is_estimated=phase != "queued",
        **{name: row[name] for name in _KEPT},
        **_with_restore(_stages(row, now_us), row),
    )


def ended(row: Mapping[str, Any]) -> RequestFrame:
    """The request of a row when it was over, as the log's own view of the row has it."""
    row = {**_ADDED, **row}
    cut = _stages(row, math.inf)
    finished_us = row["t_finished_us"]
    if finished_us is not None:
        stage, begun_us = "tokenize_ms", 0
        for stamp, follows in _FOLLOWS:
            if row[stamp] is not None:
                stage, begun_us = follows, row[stamp]
        cut[stage] = (finished_us - begun_us) / 1000  # the stage that it was in took until then
        cut["e2e_ms"] = finished_us / 1000
        if (paused_us := row["paused_us"]) is not None and "decode_ms" in cut:
            cut["paused_ms"] = min(paused_us / 1000, cut["decode_ms"])
            cut["decode_ms"] -= cut["paused_ms"]
    num_output, num_timed = row["completion_tokens"], row["num_timed_tokens"] or 0
    if num_timed >= 2 and row["t_last_token_us"] is not None:
        spread_us = row["t_last_token_us"] - row["t_first_token_us"]
        cut["tpot_ms"] = spread_us / 1000 / (num_timed - 1)
    return RequestFrame(
        id=row["rid"],
        phase="finished",
        stream=bool(row["stream"]),
        computed_tokens=computed_at_end(row["prompt_tokens"], num_output),
        output_tokens=num_output,
        max_tokens=(row["max_tokens"] or 0) * row["num_sequences"],
        num_blocks=0,
        worker=None if row["route"] == "move" else row["route"],  # by two, whom no row names
        age_ms=(finished_us or 0) / 1000,
        preemptions=row["preemptions"],
        **{name: row[name] for name in (*_KEPT, *_KEPT_OF_ENDED)},
        **_with_restore(cut, row),
    )


def _is_past(row: Mapping[str, Any], stamp: str, now_us: float) -> bool:
    at_us = row[stamp]
    return at_us is not None and at_us <= now_us


def _phase(row: Mapping[str, Any], now_us: float) -> str:
    """The phase, as far as stamps tell: what waits in a worker still counts as queued."""
    if not _is_past(row, "t_started_us", now_us):
        return "queued"
    if not _is_past(row, "t_first_token_us", now_us):
        return "prefilling"
    is_attaching = row["t_attached_us"] is not None
    if is_attaching and not _is_past(row, "t_attached_us", now_us):
        return "handing_off"
    return "decoding"


def _stages(row: Mapping[str, Any], now_us: float) -> dict[str, Any]:
    """The stages that are over, and the gaps that have been seen."""
    cut: dict[str, Any] = {}
    cursor_us = 0
    for stage, stamp in _STAGES:
        if _is_past(row, stamp, now_us):
            cut[stage] = (row[stamp] - cursor_us) / 1000
            cursor_us = row[stamp]
    if _is_past(row, "t_first_token_us", now_us):
        cut["ttft_ms"] = row["t_first_token_us"] / 1000
        if _is_past(row, "t_second_token_us", now_us):
            cut["first_itl_ms"] = (row["t_second_token_us"] - row["t_first_token_us"]) / 1000
    return cut


def _with_restore(cut: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The stages with the wait for the disk taken out of the queue's, which is over."""
    if (restored_us := row["restored_us"]) is not None and "queue_ms" in cut:
        cut["restore_ms"] = min(restored_us / 1000, cut["queue_ms"])
        cut["queue_ms"] -= cut["restore_ms"]
    return cut


def _output_tokens(row: Mapping[str, Any], now_us: float) -> int:
    """Each sequence's first and second with their stamps, all with the last's, evenly between."""
    num_all, num_sequences = int(row["completion_tokens"] or 0), int(row["num_sequences"])
    if not _is_past(row, "t_first_token_us", now_us):
        return 0
    if _is_past(row, "t_last_token_us", now_us) or row["t_last_token_us"] is None:
        return num_all
    if not _is_past(row, "t_second_token_us", now_us):
        return min(num_sequences, num_all)
    second_us, last_us = row["t_second_token_us"], row["t_last_token_us"]
    num_first = min(2 * num_sequences, num_all)
    return num_first + int((now_us - second_us) / (last_us - second_us) * (num_all - num_first))


def _computed_tokens(row: Mapping[str, Any], now_us: float, output_tokens: int) -> int:
    """The prompt evenly from its first step to token 1; then all but the newest token."""
    started_us, first_us = row["t_started_us"], row["t_first_token_us"]
    prompt_tokens = int(row["prompt_tokens"])
    if not _is_past(row, "t_started_us", now_us):
        return 0
    if output_tokens:
        return prompt_tokens + max(0, output_tokens - int(row["num_sequences"]))
    end_us = first_us if first_us is not None else row["t_finished_us"]
    if end_us is None or end_us <= started_us:
        return 0
    return int(prompt_tokens * min(1.0, (now_us - started_us) / (end_us - started_us)))


def _num_blocks(row: Mapping[str, Any], output_tokens: int, frame: Frame) -> int:
    """For its tokens at that moment, in a pool of the frame's."""
    if not frame.pools or frame.pools[0].block_size <= 0:
        return 0
    each: float = (row["prompt_tokens"] + output_tokens) / row["num_sequences"]
    return math.ceil(each / frame.pools[0].block_size) * int(row["num_sequences"])


def _worker(row: Mapping[str, Any], phase: str, frame: Frame) -> str | None:
    """Its route is who ran all of it; if it moved, by its phase; else the only one there is."""
    if len(frame.workers) == 1:
        return frame.workers[0].name
    if row["route"] == "move":
        return "decode" if phase == "decoding" else "prefill"
    names = (worker.name for worker in frame.workers)
    return next((name for name in names if name == row["route"]), None)


# --------------------------------------------------------------------------------------------------


EXIT_USAGE = 2

# Where a replay stands: moments in order, a place among them, and how time passes.
# Invariant: the place is always one of the moments: the newest that is not after the time asked
# for, or the first. A Playback never changes; every move makes another.
# Never: reads a clock or a file.


SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MAX_PAUSE_MS = 10_000
"""Longer stretches without a frame are skipped while it plays."""
_OFFSET = re.compile(r"([+-])(\d{1,6})([smh])", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", re.ASCII)
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True)
class Playback:
    """A place in a recording."""

    moments_ms: Sequence[int]
    """Unix times of the frames, sorted, at least one."""
    marks_ms: Sequence[int] = ()
    """Unix times of warnings and errors, sorted."""
    index: int = 0
    now_ms: float = 0.0
    """Where time stands while it plays: at this frame, or between it and the next."""
    speed: float = 1.0
    is_playing: bool = False

    @property
    def at_ms(self) -> int:
        """When the frame was made."""
        return self.moments_ms[self.index]

    @property
    def is_at_end(self) -> bool:
        """Whether no frame comes after it."""
        return self.index == len(self.moments_ms) - 1

    def seek(self, time_ms: float) -> Playback:
        """To the newest frame that is not after a time."""
        return self._to(bisect_right(self.moments_ms, time_ms) - 1)

    def step(self, num_frames: int) -> Playback:
        """Over so many frames, back if it is negative."""
        return self._to(self.index + num_frames)

    def skip(self, offset_ms: int) -> Playback:
        """Over a stretch of time, and at least to the next frame that way."""
        sought = self.seek(self.at_ms + offset_ms)
        if offset_ms > 0:
            return sought if sought.index > self.index else self.step(1)
        return sought if sought.index < self.index else self.step(-1)

    def next_mark(self) -> Playback:
        """To the first frame that can know of the next warning or error; stays if there is none."""
        later = bisect_right(self.marks_ms, self.at_ms)
        return self._first_after(self.marks_ms[later]) if later < len(self.marks_ms) else self

    def previous_mark(self) -> Playback:
        """To the last warning or error that an earlier frame was the first to know."""
        for mark_ms in reversed(self.marks_ms[: bisect_right(self.marks_ms, self.at_ms)]):
            found = self._first_after(mark_ms)
            if found.index < self.index:
                return found
        return self

    def faster(self, num_steps: int) -> Playback:
        """Another of SPEEDS, as many steps up, or down if it is negative."""
        place = SPEEDS.index(self.speed) + num_steps
        return replace(self, speed=SPEEDS[max(0, min(place, len(SPEEDS) - 1))])

    def toggled(self) -> Playback:
        """Played if it was paused, from the beginning if it was at the end; else paused."""
        start = self._to(0) if self.is_at_end and not self.is_playing else self
        return replace(start, is_playing=not self.is_playing)

    def after(self, elapsed_s: float) -> Playback:
        """What it shows when so much of the viewer's time has passed; the end stops it."""
        if not self.is_playing:
            return self
        now_ms = self.now_ms + elapsed_s * 1000 * self.speed
        index = bisect_right(self.moments_ms, now_ms) - 1
        if index == self.index and not self.is_at_end:
            next_ms = self.moments_ms[index + 1]
            if next_ms - self.at_ms > MAX_PAUSE_MS and now_ms - self.at_ms >= 1000:
                index, now_ms = index + 1, next_ms
        moved = replace(self, index=index, now_ms=now_ms)
        return replace(moved, is_playing=not moved.is_at_end)

    def _first_after(self, time_ms: int) -> Playback:
        return self._to(bisect_left(self.moments_ms, time_ms))

    def _to(self, index: int) -> Playback:
        index = max(0, min(index, len(self.moments_ms) - 1))
        return replace(self, index=index, now_ms=self.moments_ms[index])


def parse_moment(text: str, now_ms: int) -> int | None:
    """A time as people give it, in Unix milliseconds; None if it is none.

    `14:02` or `14:02:11` of the day of `now_ms`, `-5m` or `+30s` from there, or ISO 8601; all UTC.
    """
    text = text.strip()
    if offset := _OFFSET.fullmatch(text):
        span_ms = int(offset[2]) * _UNITS_MS[offset[3]]
        return now_ms + span_ms if offset[1] == "+" else now_ms - span_ms
    try:
        if clock := _CLOCK.fullmatch(text.removesuffix("Z")):
            day = datetime.fromtimestamp(now_ms / 1000, UTC)
            hour, minute, second = int(clock[1]), int(clock[2]), int(clock[3] or 0)
            return unix_ms(day.replace(hour=hour, minute=minute, second=second, microsecond=0))
        at = datetime.fromisoformat(text)
        return unix_ms(at.replace(tzinfo=UTC) if at.tzinfo is None else at)
    except (ValueError, OverflowError):
        return None


def unix_ms(at: datetime) -> int:
    """Milliseconds since 1970, without rounding through floats."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def iso(time_ms: int) -> str:
    """The time in the form of frames and rows; the inverse of unix_ms(fromisoformat())."""
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --------------------------------------------------------------------------------------------------


_FRAMES = "SELECT at, run_id, seq FROM frames WHERE version = ? ORDER BY at, run_id, seq"
_FRAME = "SELECT * FROM frames WHERE at = ? AND run_id = ? AND seq = ?"
_MARKS = "SELECT DISTINCT at FROM events WHERE severity != 'info' ORDER BY at"
_HAPPENED = (
    "SELECT min(received_at) FROM requests UNION ALL SELECT min(at) FROM events"
    " WHERE at >= ? AND code NOT IN ('worker.ready')"
)
"""What there is to see in a recording; it has only requests that were live in its span."""
_REQUESTS = (
    "SELECT * FROM requests WHERE run_id = ? AND received_at >= ? AND received_at <= ?"
    " ORDER BY received_at"
)
_LATEST = (
    "SELECT * FROM requests WHERE run_id = ? AND received_at <= ?"
    " ORDER BY received_at DESC LIMIT 1000"
)
_REQUEST = "SELECT * FROM requests WHERE run_id = ? AND rid = ?"
_EVENTS = (
    "SELECT at, severity, code, message FROM events WHERE run_id = ? AND at <= ?"
    f" ORDER BY at DESC LIMIT {MAX_FRAME_EVENTS}"
)


class Replay:
    """An open recording.

    Raises:
        RecordingError: as open_recording(), or its contents are no times.
    """

    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._db = open_recording(path)
        self._packers: dict[int, FramePacker] = {}
        self._damaged: set[int] = set()
        try:
            self._index()
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            self._db.close()
            raise RecordingError(f"is a damaged recording: {error}", where=self._where) from error

    def _index(self) -> None:
        self._moments_ms, self._run_ids, self._seqs = array("q"), array("q"), array("q")
        for at, run_id, seq in self._db.execute(_FRAMES, (FRAME_VERSION,)):
            self._moments_ms.append(_ms(at))
            self._run_ids.append(run_id)
            self._seqs.append(seq)
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
        """The first frame that has a request or a new event in it; the first if none has."""
        start, first = self.start, iso(self._moments_ms[0])
        with self._damage_named():
            begun = [_ms(at) for (at,) in self._db.execute(_HAPPENED, (first,)) if at is not None]
        if not begun or min(begun) > self._moments_ms[-1]:
            return start
        found = start.seek(min(begun))
        return found if found.at_ms >= min(begun) else found.step(1)

    @property
    def num_damaged(self) -> int:
        """Frames met so far that could not be read."""
        return len(self._damaged)

    def view_at(self, index: int, before: tuple[int, View] | None = None) -> View:
        """The view of one frame, with the history that led to it.

        Args:
            index: of the frame, in the order of Playback.
            before: another index and its view; from one shortly before, the history goes on.
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
            frame = self._whole(frame, self._run_ids[index])
        return replace(view, frame=frame, link=DaemonLink(REPLAY, why))

    def finished_at(self, index: int) -> tuple[RequestFrame, ...]:
        """The requests that had ended by a frame's time, the newest end first.

        Raises:
            RecordingError: a row makes no sense.
        """
        now_ms = self._moments_ms[index]
        with self._damage_named():
            rows = self._db.execute(_LATEST, (self._run_ids[index], iso(now_ms)))
            past = [(end_ms, row) for row in rows if (end_ms := _end_ms(row)) <= now_ms]
            past.sort(key=lambda item: -item[0])
            return tuple(ended(row) for _, row in past[:MAX_FRAME_REQUESTS])

    def request_at(self, request_id: str, index: int) -> RequestFrame | None:
        """One request as it stood at a frame's time; None if it had not come or is not known.

        Raises:
            RecordingError: its row makes no sense.
        """
        now_ms = self._moments_ms[index]
        with self._damage_named():
            row = self._db.execute(_REQUEST, (self._run_ids[index], request_id)).fetchone()
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
        """Every frame's view from one on, in order."""
        before = None
        for index in range(begin, len(self._moments_ms)):
            view = self.view_at(index, before)
            before = index, view
            yield view

    def num_unlogged(self, view: View) -> int:
        """Requests that were live then and have no row: they had not ended when it was made.

        None are counted where more were live than a frame lists.
        """
        frame = view.frame
        if frame is None or len(frame.requests) >= MAX_FRAME_REQUESTS:
            return 0
        return max(0, frame.num_requests - len(frame.requests))

    def _gauges(self, index: int) -> Frame | None:
        """The frame of one row, without requests and events; None if it is damaged."""
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

    def _whole(self, frame: Frame, run_id: int) -> Frame:
        """The frame with the requests and events of its time, as far as rows tell."""
        with self._damage_named():
            requests: list[RequestFrame] = list(self._requests(frame, run_id))
            rows = self._db.execute(_EVENTS, (run_id, frame.at)).fetchall()
            events = [EventFrame(*map(str, row)) for row in reversed(rows)]
        whole = copy(frame)
        whole.requests, whole.events = requests, events
        return whole

    def _requests(self, frame: Frame, run_id: int) -> Iterator[PastRequest]:
        now_ms = _ms(frame.at)
        begin = iso(max(0, int(now_ms - self._longest_ms)))
        num_shown = 0
        for row in self._db.execute(_REQUESTS, (run_id, begin, frame.at)):
            age_ms = float(now_ms - _ms(row["received_at"]))
            if age_ms < (row["t_finished_us"] or 0) / 1000 and num_shown < MAX_FRAME_REQUESTS:
                num_shown += 1
                yield request_at(row, age_ms, frame)


def open_at(path: Path, at: str) -> tuple[Replay, Playback]:
    """Open a recording at a time as parse_moment() takes it; empty is the first frame.

    Raises:
        RecordingError: as Replay, or the time is none.
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
    """When a row's request ended, in Unix milliseconds."""
    return float(_ms(row["received_at"]) + (row["t_finished_us"] or 0) / 1000)


def _ms(at: str) -> int:
    """Unix milliseconds of a time in the log's form."""
    return unix_ms(datetime.fromisoformat(at))
