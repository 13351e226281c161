"""Start a thread, and give up one that has no memory to begin; tell what a thread computes.

`Thread.start` waits without end for a thread that cannot run its first lines.
"""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from engine.errors import PenstockError

BEGIN_S = 10.0
HELPERS: dict[int, int] = {}
"""The process that works for a thread while that waits, by the thread."""
_CPU_CLOCK = 2
"""The kernel's number for all of a process's CPU time."""


def start(thread: Thread) -> None:
    """Start a thread, and return when it runs.

    Raises:
        PenstockError: the machine has no thread left, or no memory for one.
    """
    begun: Future[None] = Future()

    def begin() -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            begun.set_exception(error)
        else:
            begun.set_result(None)

    try:
        start_new_thread(begin, ())
        begun.result(BEGIN_S)
    except (RuntimeError, MemoryError, TimeoutError) as error:
        about = str(error) or "no memory to begin"
        hint = "free memory, or raise the limit of processes"
        raise PenstockError(f"no thread for {thread.name}: {about}", hint=hint) from error


@contextmanager
def helped_by(pid: int) -> Iterator[None]:
    """Have a process work for this thread, which waits for it."""
    thread = threading.get_ident()
    before = HELPERS.get(thread)
    HELPERS[thread] = pid
    try:
        yield
    finally:
        if before is None:
            del HELPERS[thread]
        else:
            HELPERS[thread] = before


def process_time_s(pid: int) -> float | None:
    """Read a process's CPU time; None: it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return None


def is_runnable(task: int) -> bool:
    """Say whether a thread, or a process's first one, computes or waits for a core.

    Args:
        task: the kernel's number of a thread, or a process.
    """
    try:
        about = Path(f"/proc/{task}/stat").read_bytes()
    except OSError:  # it has ended
        return False
    return about.rpartition(b") ")[2].startswith(b"R")


def thread_time_s(thread: int, clock: int) -> float | None:
    """Read a thread's CPU time by its clock, with its helper's; None: it has ended."""
    try:
        own_s = time.clock_gettime(clock)
    except OSError:
        return None
    helper = HELPERS.get(thread)
    return own_s if helper is None else own_s + (process_time_s(helper) or 0.0)
