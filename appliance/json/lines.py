"""Encode JSON as one line that no client's reader cuts in two."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

_BREAKS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
"""U+0085, U+2028 and U+2029 in UTF-8: Python's `splitlines` and others end a line there."""
_ESCAPES: dict[bytes, bytes] = {
    b"\xc2\x85": rb"\u0085",
    b"\xe2\x80\xa8": rb"\u2028",
    b"\xe2\x80\xa9": rb"\u2029",
}
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode


def encode_line(content: object) -> bytes:
    """Encode a value as JSON; whatever text it holds, the result is one line to any reader."""
    line = _encode(content)
    # JSON has such characters only within strings, and there an escape is read as the character
    return line if line.isascii() else _BREAKS.sub(lambda found: _ESCAPES[found[0]], line)
