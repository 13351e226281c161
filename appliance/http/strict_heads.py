"""Refuse heads of requests that another program on the way could divide into other lines.

h11 accepts what RFC 9112 lets a server accept: lines that end in a line feed alone (2.2), folded
lines (5.2) and a repeated Content-Length (6.3). If a proxy reads one of these otherwise, a request
can be hidden in another one.
"""

from __future__ import annotations

from typing import cast

import h11
from h11._receivebuffer import ReceiveBuffer
from h11._util import LocalProtocolError

_LENGTH = b"content-length:"


class _StrictBuffer(ReceiveBuffer):
    """The bytes that have come; its heads and trailers have one reading alone."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head that is whole.

        Raises:
            LocalProtocolError: it has more than one reading.
        """
        num_before = len(self)
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        if num_before - len(self) != sum(len(line) + 2 for line in lines) + 2:
            raise LocalProtocolError("a line ends in a line feed alone")
        if any(line.startswith((b" ", b"\t")) for line in lines):
            raise LocalProtocolError("a line is folded")
        lengths = [line for line in lines if line[: len(_LENGTH)].lower() == _LENGTH]
        if len(lengths) > 1 or any(b"," in line for line in lengths):
            raise LocalProtocolError("the length is given more than once")
        return lines


def read_strictly(connection: h11.Connection) -> None:
    """Let a new connection refuse such heads; h11 offers only a private field."""
    connection._receive_buffer = cast(ReceiveBuffer, _StrictBuffer())
