"""Write weights back to their file while they are packed, so that no memory is full of them.

Pages that are written through a mapping stay in memory until they are on disk; a control group with
less memory than the weights would end the process instead of waiting for the disk.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

_PIECE_BYTES = 64 << 20


class WriteBack:
    """Progress of packing into a mapped file.

    Args:
        memory: the mapping, shared with the file.
        fd: of the file.
        progress: told of each call.
    """

    def __init__(self, memory: mmap.mmap, fd: int, progress: Callable[[int, int], None]) -> None:
        self._memory, self._fd, self._progress = memory, fd, progress
        self._written_bytes = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Take in what is packed; write it once it is much."""
        if done_bytes - self._written_bytes >= _PIECE_BYTES:
            self._written_bytes = done_bytes
            self.settle()
        self._progress(done_bytes, total_bytes)

    def settle(self) -> None:
        """Put all that was packed on the disk, and give up its memory.

        Raises:
            OSError: the disk does not take it.
        """
        self._memory.flush()
        self._memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
