"""What this process may use: open files, and the C library's heap.

Owns: the soft limit of open files, which start raises to the hard one (the usual 1,024 is for
programs that call select(), which nobody here does), and the size from which the heap gives large
buffers pages of their own.
Invariant: connections leave descriptors for the log, the workers and what the kernel tells.
Never: asks for more than the hard limit; raises because a C library is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource

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


def max_connections(wanted: int, limit: int | None = None) -> int:
    """Of the connections that the settings allow, those that there are descriptors for.

    Args:
        wanted: as the setting has it.
        limit: of open files; None: this process's.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return max(min(wanted, allowed - NUM_APART), 1)


OWN_PAGES_BYTES = 64 << 10
"""From here on a buffer has pages of its own, whatever was freed before."""
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
