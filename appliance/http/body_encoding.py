"""Decompress a request's body as its Content-Encoding says, within the limit of bodies."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from starlette.types import Scope

from appliance.http.cross_origin import header_values
from engine.errors import RequestError

ENCODINGS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's window bits for each encoding that is read."""
_RAW_DEFLATE = -15
_MAX_INLINE_BYTES = 256
"""Larger parts are decompressed in a thread: each byte may become a thousand."""


class BodyDecoder:
    """Decompress one body, part by part.

    Args:
        encoding: a key of ENCODINGS.
        max_bytes: the most that the body may be.
        turn: held for each larger part, so that the bodies of one owner follow one another: of
            hundreds that a few KiB of each make, all would be in memory at once.
    """

    def __init__(self, encoding: bytes, max_bytes: int, turn: asyncio.Lock) -> None:
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._turn = turn
        self._num_bytes = 0
        self._zlib: Any = None

    async def decode(self, part: bytes, *, is_last: bool) -> bytes:
        """Return what a part decompresses to; one byte more than the limit is never exceeded.

        Raises:
            RequestError: 400 `invalid_encoding`, the bytes are of another form or cut off.
        """
        if self._zlib is None and part:
            self._zlib = zlib.decompressobj(self._window_bits(part))
        room = self._max_bytes + 1 - self._num_bytes
        data = b""
        try:
            if part and room and len(part) > _MAX_INLINE_BYTES:
                async with self._turn:
                    data = await asyncio.to_thread(self._zlib.decompress, part, room)
            elif part and room:
                data = self._zlib.decompress(part, room)
        except zlib.error as error:
            raise _invalid(self._encoding, "is damaged") from error
        self._num_bytes += len(data)
        if self._zlib is not None and self._zlib.unused_data:
            raise _invalid(self._encoding, "is followed by other bytes")
        if is_last and self._num_bytes <= self._max_bytes and not (self._zlib and self._zlib.eof):
            raise _invalid(self._encoding, "is cut off")
        return data

    def _window_bits(self, part: bytes) -> int:
        """Choose how to read `deflate`: its first byte ends in 8 where it has zlib's header."""
        is_raw = self._encoding == b"deflate" and part[0] & 15 != 8
        return _RAW_DEFLATE if is_raw else ENCODINGS[self._encoding]


def body_decoder(scope: Scope, max_bytes: int, turn: asyncio.Lock) -> BodyDecoder | None:
    """Make the decoder of a request's body; None for one that is not compressed.

    Args:
        turn: see BodyDecoder.

    Raises:
        RequestError: 415 `unsupported_encoding`.
    """
    named = b",".join(header_values(scope, b"content-encoding")).lower().split(b",")
    names = [name.strip() for name in named if name.strip() not in (b"", b"identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in ENCODINGS:
        shown = b", ".join(names)[:40].decode("latin-1")
        raise RequestError(
            f"bodies with content-encoding {shown!r} are not read",
            code="unsupported_encoding",
            param="content-encoding",
            status=415,
            hint="send gzip, deflate, or the JSON itself",
        )
    return BodyDecoder(names[0], max_bytes, turn)


def _invalid(encoding: bytes, why: str) -> RequestError:
    what = f"the body's {encoding.decode()} data {why}"
    return RequestError(what, code="invalid_encoding", param="content-encoding")
