"""Send one HTTP request on a connection of its own, and read the reply: slowly, or in part."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SILENCE_S = 240.0
"""Seconds without a byte after which a reply is given up."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where clients connect, and with which key."""

    address: str | tuple[str, int]
    key: str | None = None

    def connect(self, patience_s: float = 10.0) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        connection = socket.socket(family)
        connection.settimeout(patience_s)
        try:
            connection.connect(self.address)
        except OSError:
            connection.close()
            raise
        return connection

    def request(self, method: str, path: str, body: Any, rid: str | None) -> bytes:
        """Write the bytes of a request that closes its connection."""
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        head += [f"Content-Length: {len(data)}", "Content-Type: application/json"]
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        head += [f"X-Request-Id: {rid}"] if rid else []
        return "\r\n".join([*head, "", ""]).encode() + data


@dataclass(slots=True)
class Reply:
    """What a client received."""

    status: int = 0
    """0: nothing came."""
    head: bytes = b""
    body: bytes = b""
    is_whole: bool = False
    has_connected: bool = False
    problem: str = ""

    def json(self) -> Any:
        """Parse a body that came in one piece."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves."""

    send_pause_s: float = 0.0
    """Between the three parts in which it sends."""
    read_pause_s: float = 0.0
    """Before each read of a few bytes."""
    leaves_after: int | None = None
    """Bytes of the reply after which it resets the connection; None: it reads to the end."""


def ask(
    door: Door,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    rid: str | None = None,
    manner: Manner = Manner(),
    silence_s: float = SILENCE_S,
    on_head: Callable[[], None] | None = None,
) -> Reply:
    """Ask once; whatever goes wrong is in the reply."""
    reply = Reply()
    try:
        with door.connect(min(silence_s, 10.0)) as connection:
            reply.has_connected = True
            connection.settimeout(silence_s)
            _send(connection, door.request(method, path, body, rid), manner.send_pause_s)
            _read(connection, reply, manner, on_head)
    except OSError as error:
        reply.problem = f"{type(error).__name__}: {error}"
    return reply


def get(door: Door, path: str, *, method: str = "GET", body: Any = None) -> Any:
    """Ask for JSON; None: no such answer came within seconds."""
    reply = ask(door, path, body, method=method, silence_s=8.0)
    if reply.status != 200 or not reply.is_whole:
        return None
    with contextlib.suppress(ValueError):
        return reply.json()
    return None


def reset(connection: socket.socket) -> None:
    """Close without a goodbye where the family knows that."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _send(connection: socket.socket, data: bytes, pause_s: float) -> None:
    if not pause_s:
        connection.sendall(data)
        return
    third = len(data) // 3 + 1
    for start in range(0, len(data), third):
        connection.sendall(data[start : start + third])
        time.sleep(pause_s)


def _read(
    connection: socket.socket, reply: Reply, manner: Manner, on_head: Callable[[], None] | None
) -> None:
    raw, size = b"", 256 if manner.read_pause_s else 65536
    while True:
        if manner.read_pause_s:
            time.sleep(manner.read_pause_s)
        got = connection.recv(size)
        raw += got
        if not reply.head and b"\r\n\r\n" in raw:
            reply.head, _, raw = raw.partition(b"\r\n\r\n")
            reply.status = int(reply.head.split()[1])
            if on_head is not None:
                on_head()
        if reply.head:
            reply.body = raw
        if not got:
            break
        if manner.leaves_after is not None and len(raw) > manner.leaves_after:
            reset(connection)
            return
    if length := re.search(rb"(?i)\r\ncontent-length: (\d+)", reply.head):
        reply.is_whole = len(reply.body) == int(length[1])
    else:
        reply.is_whole = reply.body.endswith(b"0\r\n\r\n")
