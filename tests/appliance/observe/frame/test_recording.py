"""Frames packed and unpacked, and files that are no recordings."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.protocol import (
    AlertFrame,
    DeviceFrame,
    EnergyFrame,
    Frame,
    HandoffFrame,
    OwnerFrame,
)
from appliance.observe.frame.recording import (
    FramePacker,
    RecordingError,
    gauges,
    open_recording,
    template_of,
)
from tests.recordings import assert_same, make_recording
from tests.tui import frames

NUMBERS = st.floats(-1e12, 1e12)
WORDS = st.text(max_size=20)


def unpacked(packer: FramePacker, data: bytes, frame: Frame) -> Frame:
    uptime_ms = round(frame.uptime_s * 1000)
    return packer.unpack(data, at=frame.at, seq=frame.seq, uptime_ms=uptime_ms)


def round_trip(frame: Frame, template: Frame) -> Frame:
    packer = FramePacker(template_of(template))
    return unpacked(packer, packer.pack(frame), frame)


@st.composite
def readings(draw) -> Frame:
    """Busy frames whose lists, options and numbers vary."""
    some = st.lists(WORDS, max_size=3)
    frame = draw(st.sampled_from([frames.busy, frames.idle]))(draw(st.integers(1, 500)))
    pool = frames.pool(active=draw(st.integers(0, 1000)))
    pool.owners = [OwnerFrame(name, 3, 1) for name in draw(some)]
    device = DeviceFrame("gpu0", "gpu", power_w=draw(st.none() | NUMBERS))
    device.throttle_reasons = draw(st.none() | some)
    energy = EnergyFrame(draw(NUMBERS), None, 1.5, 0.25, 60.0, draw(NUMBERS), None, 1e-9, "rapl")
    routes = draw(st.permutations(["move cheapest", "decode busy", "prefill idle"]))
    frame.totals.routes = dict.fromkeys(routes[: draw(st.integers(0, 3))], 7)
    return msgspec.structs.replace(
        frame,
        requests=[],
        events=[],
        pools=[pool] * draw(st.integers(0, 3)),
        devices=[device] * draw(st.integers(0, 2)),
        workers=frame.workers[: draw(st.integers(0, 2))],
        alerts=[AlertFrame("kv", "error", text, frame.at) for text in draw(some)],
        energy=draw(st.sampled_from([None, energy])),
        handoff=draw(st.sampled_from([None, HandoffFrame("shm", 1, draw(NUMBERS), 2.0)])),
        limit=draw(WORDS),
    )


@given(readings(), readings())
def test_any_frame_comes_back_from_any_template(frame: Frame, template: Frame) -> None:
    assert_same(round_trip(frame, template), gauges(frame))


def test_a_second_of_a_busy_daemon_takes_little() -> None:
    packer = FramePacker(template_of(frames.busy(1)))
    assert len(packer.pack(frames.busy(2))) < 150
    assert len(packer.pack(frames.idle(2))) < 250, "also where nearly all has changed"


@given(st.data())
def test_damage_is_refused_and_never_shown(data: st.DataObject) -> None:
    packer, frame = FramePacker(template_of(frames.busy(1))), frames.busy(2)
    packed = bytearray(packer.pack(frame))
    whole = unpacked(packer, bytes(packed), frame)
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = unpacked(packer, bytes(packed), frame)
    except ValueError:
        return
    assert found == whole, "the same text copied from another place of the dictionary"


@pytest.mark.parametrize("data", [b"", b"x" * 40, None, 7])
def test_what_was_never_packed_is_refused(data: object) -> None:
    packer = FramePacker(template_of(frames.busy(1)))
    with pytest.raises(ValueError):  # noqa: PT011
        unpacked(packer, data, frames.busy(2))
    whole = packer.pack(frames.busy(2))
    for short in (whole[:10], whole[:-1]):
        with pytest.raises(ValueError):  # noqa: PT011
            unpacked(packer, short, frames.busy(2))


def test_another_template_is_noticed() -> None:
    frame = frames.busy(2)
    packed = FramePacker(template_of(frames.busy(1))).pack(frame)
    with pytest.raises(ValueError):  # noqa: PT011
        unpacked(FramePacker(template_of(frames.idle(1))), packed, frame)


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA application_id = 7", "not a recording"),
        ("PRAGMA user_version = 2", "version 2"),
        ("DROP TABLE frame_templates", "it has no frame_templates"),
        ("DELETE FROM frames", "holds no frames"),
        ("UPDATE frames SET version = 99", "another version"),
    ],
)
def test_what_cannot_be_shown_says_why(tmp_path: Path, statement: str, message: str) -> None:
    path = make_recording(tmp_path, [frames.busy(1)])
    open_recording(path).close()
    change(path, statement)
    with pytest.raises(RecordingError, match=message) as caught:
        open_recording(path)
    assert caught.value.where == str(path)


def test_a_view_does_not_pass_for_a_table(tmp_path: Path) -> None:
    path = make_recording(tmp_path, [frames.busy(1)])
    change(path, "DROP TABLE events", "CREATE VIEW events AS SELECT 1")
    with pytest.raises(RecordingError, match="it has no events"):
        open_recording(path)


def test_garbage_nothing_and_half_of_it_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(RecordingError, match="No such file") as missing:
        open_recording(path)
    assert missing.value.exit_code == 5
    with pytest.raises(RecordingError, match="is no file"):
        open_recording(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(RecordingError, match="not a recording"):
        open_recording(path)
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(RecordingError, match="not a recording") as caught:
        open_recording(path)
    assert "penstock record" in caught.value.hint
    whole = make_recording(tmp_path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match="damaged"):
        open_recording(path)


def test_the_requests_log_itself_is_no_recording(tmp_path: Path) -> None:
    make_recording(tmp_path)
    with pytest.raises(RecordingError, match="not a recording"):
        open_recording(tmp_path / "requests.db")
