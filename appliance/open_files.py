"""How many files the daemon may have open, and how many connections fit in that.

Owns: the soft limit of this process, which start raises to the hard one: the usual 1,024 is for
programs that call select(), which nobody here does.
Invariant: connections leave descriptors for the log, the workers and what the kernel tells.
Never: asks for more than the hard limit.
"""

from __future__ import annotations

import contextlib
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
