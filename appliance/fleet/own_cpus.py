"""Keep this process and its readers off some CPUs, and know all CPUs that it may use.

Invariant: cores that this process keeps off are counted as the machine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Cpus = frozenset[int]


class OwnCpus:
    """The CPUs of this process; its loop's thread changes them."""

    def __init__(self) -> None:
        self._left: Cpus = frozenset()

    def usable(self) -> set[int]:
        """Return the CPUs that this process may use, of which it may keep off some."""
        return os.sched_getaffinity(0) | self._left

    def keep_off(self, cpus: Cpus, reader: int | None) -> None:
        """Leave these CPUs to others, and use all that were left before.

        Args:
            cpus: if they are all there are, none is left.
            reader: the process that reads strangers' text; None: it is not started.

        Raises:
            OSError: the kernel refuses.
        """
        usable = self.usable()
        cpus = cpus if usable - cpus else frozenset()
        self._left |= cpus  # until all threads are moved
        _move(os.getpid(), usable - cpus)
        for pid in () if reader is None else _with_children(reader):
            _move(pid, usable - cpus)
        self._left = cpus

    @contextmanager
    def all_in_use(self) -> Iterator[None]:
        """Use all CPUs in this thread: what it starts meanwhile inherits them."""
        with suppress(OSError):  # which has refused to keep off any as well
            os.sched_setaffinity(0, self.usable())
        try:
            yield
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, self.usable() - self._left)


def _move(pid: int, cpus: set[int]) -> None:
    """Have all threads of a process run on these CPUs, new ones too."""
    moved: set[str] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        while new := set(os.listdir(f"/proc/{pid}/task")) - moved:
            for thread in new:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cpus)
            moved |= new


def _with_children(pid: int) -> Iterator[int]:
    """Yield a process, then its children and theirs, which it may start until it is moved."""
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or no kernel option is on
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
        for child in children:
            yield from _with_children(int(child))


OWN_CPUS = OwnCpus()
"""This process's."""
