"""Keep the simulated daemon's descriptors, as systemd does, and pass them on to the next one."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Mapping
from unittest import mock

from appliance.http import listeners
from appliance.http.listeners import PassedSockets, passed_sockets


class Keeper:
    """In place of the channel to a keeper (KeeperChannel)."""

    problem, keeps = None, True

    def __init__(self) -> None:
        self._kept: list[tuple[str, int]] = []
        """Name and descriptor."""
        self._numbers = itertools.count()

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._kept}

    @property
    def files(self) -> set[int]:
        return {fd for _, fd in self._kept}

    def send(self, fds: tuple[int, ...], fields: Mapping[str, str | int]) -> bool:
        """Take one message of the daemon."""
        name = str(fields.get("FDNAME", ""))
        if "FDSTORE" in fields:
            self._kept += [(name, os.dup(fd)) for fd in fds]
        if "FDSTOREREMOVE" in fields:
            for _, fd in (each for each in self._kept if each[0] == name):
                os.close(fd)
            self._kept = [each for each in self._kept if each[0] != name]
        return True

    def unused_name(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers):x}"

    def count(self, name: str, num_fds: int) -> bool:
        return True

    def pass_on(self) -> PassedSockets:
        """Give the next daemon what the last one has left: numbers in a row, in another order."""
        taken = set(map(int, os.listdir("/proc/self/fd")))
        first = 3
        while inside := taken.intersection(range(first, first + len(self._kept))):
            first = max(inside) + 1
        given = self._kept[::-1]  # systemd gives the newest first
        for number, (_, fd) in enumerate(given, first):
            assert fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, number) == number
        environ = {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(given)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in given),
        }
        with mock.patch.object(listeners, "FIRST_INHERITED_FD", first):
            return passed_sockets(environ)
