"""Manage the limits of the daemon's process: descriptors, heap, standing threads, their turns.

The usual soft limit of 1,024 open files is for programs that call select(), which ours do not: the
start raises it to the hard one.

Invariant: connections leave descriptors for the log, the workers and what the kernel tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

NUM_APART = 128
"""Descriptors for all that is no connection: log, workers, pools, /proc, replies on their way."""
FILES_PER_SOCKET = 16
"""The open files that are allowed for each socket of a pile."""


def raise_limit(wanted: int) -> str | None:
    """Raise the soft limit as far as it goes; return a warning if connections do not fit in it.

    Args:
        wanted: connections, as the settings allow them.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    about = too_few_files(wanted)
    return about and f"max_connections is {wanted}, but {about}"


def standing_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Start threads before they are needed: a machine that runs out of them later gives none."""
    threads = ThreadPoolExecutor(count, name)
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
        all_run.wait()
    except BaseException:  # a signal's: the threads would wait for ever, and the exit for them
        all_run.abort()
        raise
    return threads


MAX_TURN_S = 0.0005
"""How long a thread that computes keeps the interpreter from the loop; Python's own is 5 ms."""


def share_interpreter() -> None:
    """Let threads that read bodies or write vectors give way to the loop soon."""
    sys.setswitchinterval(MAX_TURN_S)


def max_connections(wanted: int, limit: int | None = None) -> int:
    """Limit the wanted connections to the available descriptors.

    Args:
        limit: maximum open files; None: this process's.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return max(min(wanted, allowed - NUM_APART), 1)


def descriptors_for(most: int, *, least: int) -> int:
    """Return how many descriptors one use may take: a sixteenth of all, if that is less."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(most, max(allowed // FILES_PER_SOCKET, least))


def too_few_files(wanted: int) -> str | None:
    """Say which limit of open files allows fewer connections than wanted; None: it allows them."""
    limit, fit = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max_connections(wanted)
    if fit == wanted:
        return None
    raised = "raise it by ulimit -Hn or LimitNOFILE="
    return f"{limit} open files are allowed, with room for {fit} ({raised})"


class SpareDescriptors:
    """Descriptors kept open so that they can be given up when no other is left."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._fds: list[int] = []
        self.refill()

    def refill(self) -> None:
        """Open as many as are missing, or as many as there are left."""
        with contextlib.suppress(OSError):
            while len(self._fds) < self._count:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Give them up for what the body opens, then refill."""
        self.close()
        try:
            yield
        finally:
            self.refill()


OWN_PAGES_BYTES = 64 << 10
"""Minimum size of a buffer with pages of its own, independent of earlier frees."""
KEPT_BYTES = 128 << 10
"""Free bytes kept at the heap's end; the system gets back what is more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def keep_small() -> bool:
    """Set the sizes for this process; False if the C library does not know them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    sizes = ((_MMAP_THRESHOLD, OWN_PAGES_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(name, size) == 1 for name, size in sizes)
