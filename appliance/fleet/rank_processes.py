"""Make what a group's processes have in common, and find out when one of them ends.

Invariant: each life of a group begins with memory that is zero, and unused links.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable


class GroupFds:
    """Descriptors that the processes of one life of a worker inherit.

    Args:
        num_others: processes besides the first; 0: the worker is one process, and nothing is made.
    """

    def __init__(self, num_others: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(num_others)]
        self._memory = [os.memfd_create("penstock-group", os.MFD_CLOEXEC)] if num_others else []

    @property
    def of_first(self) -> tuple[list[str], list[int]]:
        """Return the first process's arguments, and the descriptors that they name."""
        if not self._pairs:
            return [], []
        links = [first.fileno() for first, _ in self._pairs]
        named = ["--link-fds", ",".join(map(str, links)), "--memory-fd", str(self._memory[0])]
        return named, [*links, *self._memory]

    def of(self, rank: int) -> tuple[list[str], list[int]]:
        """Return the same of another process."""
        link = self._pairs[rank - 1][1].fileno()
        named = ["--link-fd", str(link), "--memory-fd", str(self._memory[0])]
        return named, [link, *self._memory]

    def close(self) -> None:
        """Close what the processes have inherited."""
        for pair in self._pairs:
            for end in pair:
                end.close()
        for fd in self._memory:
            os.close(fd)


def when_ended(process: subprocess.Popen[bytes], call: Callable[[], None]) -> Callable[[], None]:
    """Call back once on the running loop when a process ends; return what stops the waiting."""
    loop, fd = asyncio.get_running_loop(), os.pidfd_open(process.pid)

    def ended() -> None:
        loop.remove_reader(fd)
        call()

    def give_up() -> None:
        loop.remove_reader(fd)
        os.close(fd)

    loop.add_reader(fd, ended)
    return give_up
