"""Tell whether a connection's client has left, or has only shut down its sending side."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from pathlib import Path

_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}


def has_left(client: socket.socket) -> bool:
    """Say whether a client has disconnected, also where no read would tell."""
    # Unix sockets say when both directions are shut; on TCP all there is to see is its FIN.
    is_unix = client.family == socket.AF_UNIX
    poll = select.poll()
    poll.register(client.fileno(), 0 if is_unix else select.POLLRDHUP)
    events = sum(event for _, event in poll.poll(0))
    if is_unix or events & ~select.POLLRDHUP:
        return bool(events)
    return bool(events) and not _holds_its_end(client)


def _holds_its_end(client: socket.socket) -> bool:
    """Say whether a program of this machine still has the other end open.

    Linux lists the end that a program closed, too, with no inode. An end on another machine, or in
    another network namespace, is not in the list, and counts as closed.
    """
    with contextlib.suppress(OSError):
        theirs, ours = client.getpeername(), client.getsockname()
        ends = f" {_hex(client.family, theirs)} {_hex(client.family, ours)} "
        for line in _TABLES[client.family].read_text().splitlines():
            if ends in line:
                return line.split()[9] != "0"
    return False


def _hex(family: int, address: tuple[str, int]) -> str:
    """Write an address as those tables do: words in this processor's byte order."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
