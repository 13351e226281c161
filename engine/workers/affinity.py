"""The cores that this process computes on: where its threads may run, and how many torch uses.

Owns: the affinity of all threads of the process.
Invariant: one thread for each core; after it returns no thread may run elsewhere.
Never: runs while a step does.

Threads that torch has started for a larger number stay, asleep in their pool after a bounded spin;
they are moved with the rest, so that they wake on no core that is another's again.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch


def use_cores(cpus: list[int]) -> None:
    """Compute on these cores from now on."""
    for thread_id in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread_id), cpus)
    if torch.get_num_threads() != len(cpus):
        torch.set_num_threads(len(cpus))
