"""Put a process, or this thread, behind others."""

from __future__ import annotations

import os
from contextlib import suppress


def lower_priority(nice: int, pid: int = 0) -> None:
    """Lower a priority to this nice value; a lower one stays.

    Args:
        nice: 0 takes back what the service's unit has raised.
        pid: a process that was just started, so that all its threads will inherit it; 0: this
            thread.
    """
    with suppress(ProcessLookupError):  # it has ended, which its owner notices
        if os.getpriority(os.PRIO_PROCESS, pid) < nice:
            os.setpriority(os.PRIO_PROCESS, pid, nice)
