"""Find the users that listen on a TCP port of this machine, whichever address they took."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
"""The state TCP_LISTEN, as the kernel writes it."""


def listening_uids(port: int, tables: tuple[Path, ...] = TABLES) -> list[int]:
    """List the users with a listening socket on the port; clients may reach any of them."""
    uids = set[int]()
    for table in tables:
        with suppress(OSError):  # a kernel without IPv6 has only one
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                is_of_port = int(fields[1].rpartition(":")[2], 16) == port
                if is_of_port and fields[3] == _LISTENING:
                    uids.add(int(fields[7]))
    return sorted(uids)
