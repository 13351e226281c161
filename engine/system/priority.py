"""Leave the raised priority that the service was started with to the processes that decode."""

from __future__ import annotations

import os


def leave_raised_priority(pid: int) -> None:
    """Give a process that was just started the usual priority; a lower one stays.

    It has one thread yet; further ones inherit its priority.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, pid) < 0:
            os.setpriority(os.PRIO_PROCESS, pid, 0)
    except ProcessLookupError:  # it has ended, which its owner notices
        return
