"""Read a disk that may hang (NFS, FUSE) in a thread of its own.

Nothing can end a thread that waits in the kernel, so it is left behind and does not delay the exit.
Even a slow read uses CPU time, here or in the process that reads a model for the thread. So if
both sleep without using any, the disk hangs. Waits for a core do not count, and the total time has
no limit.

Invariant: a hanging disk blocks neither the loop nor the exit.
"""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from engine.errors import PenstockError
from engine.system.threads import HELPERS, is_runnable, thread_time_s

HANG_S = 30.0
"""Time asleep without CPU use after which a thread is left behind."""
SILENT_S = 5.0
"""Time without a result after which the user is told what is read."""
_LOOK_S = 0.5

T = TypeVar("T")


class _Begun(NamedTuple):
    """A thread that reads."""

    thread: int
    task: int
    """The kernel's number of the thread."""
    clock: int

    @classmethod
    def here(cls) -> _Begun:
        thread = threading.get_ident()
        return cls(thread, threading.get_native_id(), time.pthread_getcpuclockid(thread))

    def used_s(self) -> float | None:
        return thread_time_s(self.thread, self.clock)

    def is_runnable(self) -> bool:
        """Say whether it, or the process that reads for it, computes or waits for a core."""
        helper = HELPERS.get(self.thread)
        return is_runnable(self.task) or (helper is not None and is_runnable(helper))


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
    begun: list[_Begun] = []

    def run() -> None:
        begun.append(_Begun.here())
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
            before_s, used_s = used_s, begun[0].used_s() if begun else None
            is_asleep = not (begun and begun[0].is_runnable())
            silent_s = silent_s + _LOOK_S if used_s == before_s and is_asleep else 0.0
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
