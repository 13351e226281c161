"""Keep prompts and keys out of core dumps, whoever takes them."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

FILTER = Path("/proc/self/coredump_filter")


def forbid_core_dumps() -> None:
    """Forbid dumps to files here and in all children, and empty those that a program takes.

    The kernel hands dumps to a program of `core_pattern` whatever their limit is.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(OSError):  # a kernel without dumps has no such file
        FILTER.write_text("0")
