"""Keep prompts and keys out of core dumps, in files and in a program's hands."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

FILTER = Path("/proc/self/coredump_filter")


def forbid_core_dumps() -> None:
    """Forbid dumps to files here and in all children, and empty the dumps that a program takes.

    The kernel gives a dump to the program of `core_pattern` whatever the limit of its size is.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(OSError):  # a kernel without dumps has no such file
        FILTER.write_text("0")
