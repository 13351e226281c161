"""Notice that a reply repeats itself without end, as small models do.

Invariant: a pure function of the text.
"""

from __future__ import annotations

LOOP_CHARS = 1200
"""Length of an end that must repeat itself; some 300 tokens."""
LEAST_TIMES = 6
"""How often it must repeat itself: a table or a refrain does so a few times."""


def repeats_itself(text: str) -> bool:
    """Say whether the text ends in one piece again and again."""
    if len(text) < LOOP_CHARS:
        return False
    end = text[-LOOP_CHARS:]
    probe = end[: LOOP_CHARS // LEAST_TIMES]
    period = end.find(probe, 1)
    return 0 < period <= len(probe) and end[period:] == end[:-period]
