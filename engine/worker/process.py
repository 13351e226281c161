"""Prepare a process of ours for computing: its end with the daemon's, its signals, its cores.

Invariant: it never outlives the daemon, and no signal to a terminal's group ends it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def prepare(cpus: str, stacks_fd: int | None) -> None:
    """Tie this process to its parent, and load torch.

    Args:
        cpus: all cores that it may ever use, with commas: OpenMP counts them when it is loaded, and
            hardly spins in a larger team afterwards.
        stacks_fd: where a report has the stacks of its threads written, also while it hangs.
    """
    faulthandler.enable()
    if stacks_fd is not None:
        faulthandler.register(signal.SIGUSR1, stacks_fd, all_threads=True)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to groups, too
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])


def load_torch() -> None:
    """Load torch before it is needed, so that it overlaps with what others have to do."""
    gc.disable()  # while modules load: they make thousands of objects, and no garbage
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


def set_name(name: str) -> None:
    """Show whose process it is in lists of processes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"penstock-{name}"[:15].encode())
