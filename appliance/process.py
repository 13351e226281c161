"""Manage the daemon's process: its descriptors, heap, disk reads, log lines.

Owns: the soft limit of open files, which start raises to the hard one (the usual 1,024 is for
programs that call select(), which ours do not), and the size from which the heap gives large
buffers pages of their own; the soft limit of core dumps; standing threads, and threads that read a
disk which may hang; what a line on stderr begins with.
Invariant: connections leave descriptors for the log, the workers and what the kernel tells.
Never: asks for more than the hard limit; raises because a C library is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import shlex
import shutil
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.errors import PenstockError

NUM_APART = 128
"""Descriptors for all that is no connection: log, workers, pools, /proc, replies on their way."""


def raise_limit(wanted: int) -> str | None:
    """Raise the soft limit as far as it goes; what is to be said if connections do not fit in it.

    Args:
        wanted: connections, as the settings allow them.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, fit = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max_connections(wanted)
    if fit == wanted:
        return None
    about = f"max_connections is {wanted}, but {limit} open files are allowed, with room for {fit}"
    return f"{about} (ulimit -Hn, LimitNOFILE=)"


def forbid_core_dumps() -> None:
    """Set the soft limit of core dumps to 0 here and in all workers: they would hold prompts."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def standing_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Start threads before they are needed: a machine that runs out of them later gives none."""
    threads = ThreadPoolExecutor(count, name)
    all_run = threading.Barrier(count + 1)
    for _ in range(count):
        threads.submit(all_run.wait)
    all_run.wait()
    return threads


def max_connections(wanted: int, limit: int | None = None) -> int:
    """Limit the wanted connections to the available descriptors.

    Args:
        wanted: the setting.
        limit: maximum open files; None: this process's.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return max(min(wanted, allowed - NUM_APART), 1)


class SpareDescriptors:
    """Descriptors kept open so that they can be given up when no other is left.

    Args:
        count: how many to keep.
    """

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
"""Free at the heap's end; what is more goes back."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def keep_small() -> bool:
    """Set the sizes for this process; False if the C library does not know them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    sizes = ((_MMAP_THRESHOLD, OWN_PAGES_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(name, size) == 1 for name, size in sizes)


# A disk that may hang (NFS, FUSE) is read in a thread of its own. Nothing can end a thread that
# waits in the kernel, so it is left behind and does not delay the exit. Even a slow read uses CPU
# time, so a thread without CPU time hangs; the total time has no limit.


HANG_S = 30.0
"""Time without CPU use after which a thread is left behind."""
SILENT_S = 5.0
"""Time without a result after which the user is told what is read."""
_LOOK_S = 0.5

T = TypeVar("T")


async def read_in_thread(
    what: str,
    read: Callable[[], T],
    tell: Callable[[str], None],
    late: Callable[[T], None] = lambda _: None,
) -> T:
    """Read a disk in a thread while the loop runs.

    Args:
        what: names the data in a sentence: `the folder /x`.
        read: called in a thread of its own.
        tell: gets that sentence, once, after a while without a result.
        late: called in the thread with a result that comes too late.

    Raises:
        PenstockError: the disk hangs, or whatever read() raises.
    """
    import asyncio  # each command that has an error to tell passes here, and few have a loop

    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    clocks: list[int] = []

    def run() -> None:
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            result = read()
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    def is_late(ended: Future[T]) -> None:
        if ended.exception() is None:
            late(ended.result())

    # a Thread's start() would wait, and this loop with it, for one that has no memory to begin
    start_new_thread(run, ())
    waiting = asyncio.wrap_future(outcome)
    silent_s, used_s, has_told = 0.0, None, False
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
            before_s, used_s = used_s, _used_s(clocks)
            silent_s = silent_s + _LOOK_S if used_s == before_s else 0.0
            if silent_s >= HANG_S:
                hint = "see the kernel log, and what serves that file system"
                raise PenstockError(f"{what} does not answer for {HANG_S:g} s", hint=hint)
            if silent_s >= SILENT_S and not has_told:
                has_told = True
                tell(f"{what} does not answer for {SILENT_S:g} s; at {HANG_S:g} s it is given up")
    finally:
        if not waiting.done():
            waiting.cancel()
            outcome.add_done_callback(is_late)
    return waiting.result()


def _used_s(clocks: list[int]) -> float | None:
    """Read a thread's CPU time by its clock; None: not started, or ended."""
    try:
        return time.clock_gettime(clocks[0]) if clocks else None
    except OSError:
        return None


# What the journal reads of the daemon: lines on stderr with priorities.
# Invariant: a line has systemd's `<N>` in front only where the journal itself reads stderr, and
# then each line of a message of several has it.
# Never: opens a journal, or chooses what is said.


_ERROR, _WARNING, _INFO, _DEBUG = 3, 4, 6, 7
"""Priorities of syslog(3)."""
PREFIX = "penstock: "
"""Where there is no journal, which names the unit by itself."""


def own_command() -> str:
    """Return what starts this program in a shell: its path, where it is not on PATH."""
    program = Path(sys.argv[0])
    is_hidden = program.name == "penstock" and not shutil.which("penstock")
    return shlex.quote(str(program)) if is_hidden else "penstock"


def is_journal(fd: int = 2, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the journal reads this descriptor.

    systemd names its stream by device and inode; a redirected stderr is another file.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def lines(text: str, level: int, *, to_journal: bool) -> str:
    """Format a message for stderr.

    Args:
        text: one line or several.
        level: logging's.
        to_journal: the result of is_journal().
    """
    if not to_journal:
        return PREFIX + text
    mark = f"<{_priority(level)}>"
    return "\n".join(mark + line for line in text.split("\n"))


class Formatter(logging.Formatter):
    """Records of logging as lines on stderr."""

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self._to_journal = is_journal()

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record), record.levelno, to_journal=self._to_journal)


def _priority(level: int) -> int:
    if level >= logging.ERROR:
        return _ERROR
    if level >= logging.WARNING:
        return _WARNING
    return _INFO if level >= logging.INFO else _DEBUG


def has_terminal() -> bool:
    """Say whether the process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
