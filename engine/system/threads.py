"""Start a thread, and give up one that has no memory to begin.

`Thread.start` waits without end for a thread that cannot run its first lines.
"""

from __future__ import annotations

from _thread import start_new_thread
from concurrent.futures import Future
from threading import Thread

from engine.errors import PenstockError

BEGIN_S = 10.0


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
