"""Count a worker's beats within its steps, and its waits, where the daemon reads them.

A step sends one message, at its end, and may take long. A beat after each part of a layer tells a
slow step from one that hangs.
Invariant: only the worker writes; the count never falls within a life.
"""

from __future__ import annotations

import mmap
import os

_RANKS_AT = 2
"""The word of a group's first process; the others' follow."""


class Beats:
    """One worker's counter, mapped by its process and by the daemon.

    Args:
        fd: from `new_fd`; the mapping does not need it any more.
    """

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    def beat(self) -> None:
        """Count one beat."""
        self._words[0] += 1

    def waited(self, num_ns: int) -> None:
        """Add time in which a step has waited for weights from disk."""
        self._words[1] += num_ns

    def rank_waited(self, rank: int, num_ns: int) -> None:
        """Say how long a process of the group has waited for the others since its start."""
        self._words[_RANKS_AT + rank] = num_ns

    @property
    def count(self) -> int:
        return self._words[0]

    @property
    def waited_ns(self) -> int:
        return self._words[1]

    def rank_waited_ns(self, rank: int) -> int:
        return self._words[_RANKS_AT + rank]


def new_fd() -> int:
    """Make the memory of a counter that is 0; the caller closes the descriptor."""
    fd = os.memfd_create("penstock-beats", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
