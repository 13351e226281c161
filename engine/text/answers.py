"""Send the answer to a job of the process that reads strangers' text, and receive it."""

from __future__ import annotations

import enum
import socket
import struct

_HEAD = struct.Struct("<BI")


class How:
    """How a job runs: in which process."""

    HERE = b"-"
    """The process itself."""
    FORKED = b"f"
    """A fork of its own."""
    YIELDING = b"y"
    """A fork that takes no busy core."""
    MODEL = b"m"
    """A fork for a model's files, whose disk may hang."""
    TEXT = b"t"
    """The fork that tokenizes one text after another."""
    LONG_TEXT = b"l"
    """A fork of its own, which tokenizes one long text."""
    CHAT = b"c"
    """The fork that renders one chat after another, each for a short time."""


class Answer(enum.IntEnum):
    """How a job ended."""

    DONE = 0
    UNREADABLE = 1
    OVERRAN = 2
    """The text says of what there was too much."""
    BUSY = 3
    ENDED = 4
    """Its process ended first; the text is the exit code."""
    BEGUN = 5
    """The text is the process that does the job, which answers later."""
    REFUSED = 6
    """A model cannot be served: its error's three texts, as JSON."""


def send_answer(to: socket.socket, answer: Answer, result: str | bytes) -> None:
    """Send an answer: what it is, the number of its bytes, and these."""
    data = result.encode("utf-8", "replace") if isinstance(result, str) else result
    # in one piece: behind a first of two this process may be killed, and its parent's answer follow
    to.sendall(_HEAD.pack(answer, len(data)) + data)


def receive_answer(from_: socket.socket) -> tuple[Answer, bytes]:
    """Receive an answer.

    Raises:
        ConnectionResetError: the other side ended before it was whole.
    """
    answer, num_bytes = _HEAD.unpack(_exactly(from_, _HEAD.size))
    return Answer(answer), _exactly(from_, num_bytes)


def _exactly(from_: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = from_.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError
        parts += part
    return bytes(parts)
