"""Logs that a daemon has left behind, and recordings made of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.daemon.requests.row import LogRow
from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.recording import gauges
from appliance.observe.log.query import Span, log_time
from appliance.observe.log.recording_copy import write_recording
from appliance.observe.log.writer import RequestLog
from tests.appliance.logs import row, start
from tests.tui import frames

BEGAN = datetime(2999, 11, 21, 14, 0, tzinfo=UTC)
"""So late that no log takes it for too old."""


def at(offset_s: float) -> str:
    """So many seconds after BEGAN, as the log writes it."""
    return log_time(BEGAN + timedelta(seconds=offset_s))


def frame_at(offset_s: float, make=frames.busy, **changes: Any) -> Frame:
    """What a daemon that started at BEGAN made then; its number is the second's."""
    seq = changes.pop("seq", int(offset_s) + 1)
    return make(seq, **{"at": at(offset_s), "uptime_s": offset_s, "events": [], **changes})


def request_row(rid: str, offset_s: float, **columns: Any) -> LogRow:
    """Ten seconds: a second in the queue, two of prefill, half a second of handoff, decoding."""
    stamps = {
        "t_tokenized_us": 1_000,
        "t_started_us": 1_000_000,
        "t_first_token_us": 3_000_000,
        "t_attached_us": 3_500_000,
        "t_decode_started_us": 3_600_000,
        "t_second_token_us": 3_700_000,
        "t_last_token_us": 9_900_000,
        "t_finished_us": 10_000_000,
    }
    counts = {"prompt_tokens": 400, "completion_tokens": 101, "num_timed_tokens": 101}
    moved = {"transport": "alias", "route": "move", "route_reason": "cheapest", "max_tokens": 200}
    return row(rid, received_at=at(offset_s), **{**stamps, **counts, **moved, **columns})


def write_log(
    path: Path, seen: Iterable[Frame], rows: Iterable[LogRow] = (), events: Iterable[tuple] = ()
) -> RequestLog:
    """A log with these, still open."""
    log = start(path)
    for frame in seen:
        log.frame(frame)
        assert log.flush(10)
    for one in rows:
        log.record(one)
    for event in events:
        log._queued.events.append((*event, None))  # at a time of the test's choosing
        log._num_accepted += 1
    assert log.flush(10)
    return log


def make_recording(
    folder: Path,
    seen: Iterable[Frame] | None = None,
    rows: Iterable[LogRow] = (),
    events: Iterable[tuple] = (),
) -> Path:
    """A recording of frames, by default of two busy minutes; the log's file is beside it."""
    if seen is None:
        seen = [frame_at(second) for second in range(120)]
    log = write_log(folder / "requests.db", seen, rows, events)
    assert log.close()
    path = folder / "incident.penstock"
    path.touch()
    write_recording(log.path, path, Span())
    return path


def assert_same(shown: Any, told: Any) -> None:
    """Equal, numbers to six digits or three decimals; frames but for requests and events."""
    if isinstance(told, Frame):
        told = msgspec.structs.replace(told, uptime_s=round(told.uptime_s, 3))
        assert_same(*(msgspec.to_builtins(gauges(frame)) for frame in (shown, told)))
    elif isinstance(told, float):
        assert shown == pytest.approx(told, rel=5e-6, abs=1e-12)
    elif isinstance(told, dict):
        assert shown.keys() == told.keys()
        for key in told:
            assert_same(shown[key], told[key])
    elif isinstance(told, list):
        assert len(shown) == len(told)
        for one, other in zip(shown, told, strict=True):
            assert_same(one, other)
    else:
        assert shown == told
