"""Look for garbage while nothing is asked of the daemon: a search through all stops its loop.

What requests leave is freed as they end; there is little to find.
"""

import gc
import time

THRESHOLDS = (700, 10, 1_000_000)
"""Python's own for what is new; what is old is searched by look() alone."""
IDLE_S, BUSY_S = 10.0, 600.0
"""Pause between two searches, while nothing is asked and while there is always something."""


class GarbageSearch:
    """Decide when to search."""

    def __init__(self) -> None:
        """Take the searches over from Python, and leave out what exists already."""
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._searched_s = time.monotonic()

    def look(self, *, is_idle: bool) -> None:
        """Search if it is time."""
        if time.monotonic() - self._searched_s >= (IDLE_S if is_idle else BUSY_S):
            gc.collect()
            self._searched_s = time.monotonic()
