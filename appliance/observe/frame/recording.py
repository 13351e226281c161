"""Pack frames for storage, and read and write recordings.

Invariant: unpacking restores the packed frame, with numbers to six digits and at least three
decimals; a damaged pack is refused, never shown.

A frame is packed against a template, the JSON of an earlier frame: objects become lists of their
values, with the template's keys, and this JSON is compressed with the template's own as dictionary.
Unchanged parts cost next to nothing.
"""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any

import msgspec

from appliance.observe.frame.protocol import FRAME_VERSION, Frame
from engine.errors import PenstockError, file_exit_code
from engine.wire.not_json import NOT_JSON

APPLICATION_ID = 0x50454E52  # "PENR", for file(1)
RECORDING_VERSION = 1
MAX_FRAME_BYTES = 4 << 20
"""Maximum bytes of an unpacked frame; a larger one is damaged."""
TABLES = ("runs", "requests", "events", "frames", "frame_templates")
_MAKE_ONE = "`penstock record -o FILE` makes one"
_MIN_DECIMALS = 3
_MIN_DIGITS = 6


class RecordingError(PenstockError):
    """A file is not a recording that this release can show."""

    exit_code = 8


class FramePacker:
    """Pack and unpack the gauges of similar frames.

    Args:
        template: from template_of().

    Raises:
        ValueError: the template is damaged.
    """

    def __init__(self, template: bytes) -> None:
        self.template = template
        try:
            self._like = msgspec.json.decode(template)
            self._dictionary = msgspec.json.encode(_packed(self._like, self._like))
        except (*NOT_JSON, TypeError) as error:
            raise ValueError(str(error)) from error

    def pack(self, frame: Frame) -> bytes:
        """Pack a frame without its requests, events and the row's own columns."""
        packed = _packed(msgspec.to_builtins(_bare(frame)), self._like)
        deflate = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zdict=self._dictionary)
        return deflate.compress(msgspec.json.encode(packed)) + deflate.flush()

    def unpack(self, data: bytes, *, at: str, seq: int, uptime_ms: int) -> Frame:
        """Unpack the frame of one row.

        Raises:
            ValueError: the data is damaged, or was packed with another template.
        """
        try:
            inflate = zlib.decompressobj(zdict=self._dictionary)
            packed = inflate.decompress(data, MAX_FRAME_BYTES)
            if not inflate.eof:
                raise ValueError("incomplete")
            fields = _unpacked(msgspec.json.decode(packed), self._like)
            frame = msgspec.convert(fields, Frame)
        except (*NOT_JSON, zlib.error, TypeError) as error:
            raise ValueError(str(error)) from error
        return msgspec.structs.replace(frame, at=at, seq=seq, uptime_s=uptime_ms / 1000)


def gauges(frame: Frame) -> Frame:
    """Return a frame without its requests and events."""
    return msgspec.structs.replace(frame, requests=[], events=[])


def template_of(frame: Frame) -> bytes:
    """Make the template of a FramePacker for similar frames."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(_bare(frame))))


def open_recording(path: Path) -> sqlite3.Connection:
    """Open a recording read-only, with rows that have names.

    Raises:
        RecordingError: it is missing, damaged, no recording, another version's, or empty.
    """
    where = str(path)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise RecordingError("is no file", where=where, hint=_MAKE_ONE)
        path.open("rb").close()
        # A recording is never written: read it without a lock, which some file systems lack.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        db = sqlite3.connect(uri, uri=True)
    except OSError as error:
        wrong = RecordingError(f"cannot be opened: {error.strerror}", where=where, hint=_MAKE_ONE)
        wrong.exit_code = file_exit_code(error)
        raise wrong from error
    except sqlite3.Error as error:
        raise RecordingError(f"cannot be opened: {error}", where=where, hint=_MAKE_ONE) from error
    try:
        _check(db, where)
    except (sqlite3.Error, UnicodeError) as error:
        db.close()
        raise RecordingError(
            f"not a recording, or damaged: {error}",
            where=where,
            hint=_MAKE_ONE,
        ) from error
    except RecordingError:
        db.close()
        raise
    db.row_factory = sqlite3.Row
    return db


def _check(db: sqlite3.Connection, where: str) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        raise RecordingError("not a recording", where=where, hint=_MAKE_ONE)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version != RECORDING_VERSION:
        raise RecordingError(
            f"is a recording of version {version}, this release reads {RECORDING_VERSION}",
            where=where,
            hint="use the penstock of the release that made it",
        )
    named = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := [name for name in TABLES if name not in named]:
        raise RecordingError(f"is incomplete: it has no {missing[0]}", where=where, hint=_MAKE_ONE)
    num_frames, num_readable = db.execute(
        "SELECT count(*), count(*) FILTER (WHERE version = ?) FROM frames", (FRAME_VERSION,)
    ).fetchone()
    if not num_frames:
        raise RecordingError("holds no frames", where=where, hint=_MAKE_ONE)
    if not num_readable:
        raise RecordingError(
            f"holds frames of another version, this release reads {FRAME_VERSION}",
            where=where,
            hint="use the penstock of the release that made it",
        )


def _bare(frame: Frame) -> Frame:
    """Return a frame without the parts that have their own columns or tables."""
    return msgspec.structs.replace(frame, at="", seq=0, uptime_s=0.0, requests=[], events=[])


def _packed(value: Any, like: Any) -> Any:
    """Turn objects with the template's keys into lists of their values; round numbers."""
    if isinstance(value, dict):
        if isinstance(like, dict) and value.keys() == like.keys():
            return [_packed(value[key], like[key]) for key in like]
        return _rounded(value)
    if isinstance(value, list):
        examples = like if isinstance(like, list) else []
        return [_packed(one, _example(examples, index)) for index, one in enumerate(value)]
    return _rounded(value)


def _unpacked(packed: Any, like: Any) -> Any:
    """Invert _packed(): where the template has an object, a list holds its values."""
    if not isinstance(packed, list):
        return packed
    if isinstance(like, dict):
        return {key: _unpacked(one, like[key]) for key, one in zip(like, packed, strict=True)}
    examples = like if isinstance(like, list) else []
    return [_unpacked(one, _example(examples, index)) for index, one in enumerate(packed)]


def _example(examples: list[Any], index: int) -> Any:
    """Return the template's item for an item of a list: at its index, or the last."""
    return examples[min(index, len(examples) - 1)] if examples else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        if abs(value) >= 10 ** (_MIN_DIGITS - _MIN_DECIMALS):
            return round(value, _MIN_DECIMALS)
        return float(f"{value:.{_MIN_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value
