"""Where the restored part of a prompt came from, by the words that are logged of it.

Owns: how those words are read.
Never: imports anything slow: the CLI asks, too.
"""

from __future__ import annotations

import re

_LOADED = re.compile(r"\b[1-9]\d* of \d+ blocks from (?:the )?(\w+)")


def restored_from(reason: object) -> str:
    """`SSD`, `DRAM`, or `DRAM and SSD`.

    Args:
        reason: a request's `restore_reason`; a log of an earlier release has only the SSD.
    """
    return " and ".join(dict.fromkeys(_LOADED.findall(str(reason or "")))) or "SSD"
