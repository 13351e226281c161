"""Count a worker's beats within its steps, in memory that the daemon reads.

A step sends one message, at its end, and may take long. A beat after each part of a layer tells a
slow step from one that hangs.
Invariant: only the worker writes; the count never falls within a life.
"""

from __future__ import annotations

import mmap
import os


class Beats:
    """One worker's counter, mapped by its process and by the daemon.

    Args:
        fd: from `new_fd`; the mapping does not need it any more.
    """

    def __init__(self, fd: int) -> None:
        self._word = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    def beat(self) -> None:
        """Count one beat."""
        self._word[0] += 1

    @property
    def count(self) -> int:
        return self._word[0]


def new_fd() -> int:
    """Make the memory of a counter that is 0; the caller closes the descriptor."""
    fd = os.memfd_create("penstock-beats", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
