"""Write lines of one kind a few times a minute, and say how many more there were.

A kind is a line without its numbers and ids. Whatever fails again and again, on a full disk for
instance, must neither fill the journal's disk nor hide other lines.

Invariant: a line that is not written is counted, and the count is written within PERIOD_S and a
second, or at the end.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

MOST_ALIKE = 5
"""Lines of a kind that are written in PERIOD_S."""
PERIOD_S = 60.0
MAX_KINDS = 200
_VARIES = re.compile(r"[0-9a-z-]*\d[0-9a-z-]*")


@dataclass(slots=True)
class _Kind:
    since_s: float
    last: logging.LogRecord
    number: int = 0


class RepeatedLines(logging.StreamHandler[TextIO]):
    """Writes records of logging, and counts what repeats.

    Args:
        stream: where lines go.
        clock: seconds that do not jump.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[tuple[int, str], _Kind] = {}
        """Counts by level and kind, the oldest first."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        self._end(self._clock() - PERIOD_S)
        key = record.levelno, _VARIES.sub("#", record.getMessage())
        if key not in self._kinds and len(self._kinds) == MAX_KINDS:
            self._end_kind(next(iter(self._kinds)))
        kind = self._kinds.setdefault(key, _Kind(self._clock(), record))
        kind.number, kind.last = kind.number + 1, record
        if kind.number <= MOST_ALIKE:
            super().emit(record)

    def say_counts(self) -> None:
        """Write the counts of kinds whose period is over."""
        self.acquire()
        try:
            self._end(self._clock() - PERIOD_S)
        finally:
            self.release()

    def close(self) -> None:
        """Write all counts: this is the end."""
        self.acquire()
        try:
            self._end(self._clock())
        finally:
            self.release()
        super().close()

    def _end(self, before_s: float) -> None:
        for key in [key for key, kind in self._kinds.items() if kind.since_s <= before_s]:
            self._end_kind(key)

    def _end_kind(self, key: tuple[int, str]) -> None:
        kind = self._kinds.pop(key)
        if (number := kind.number - MOST_ALIKE) > 0:
            took_s = max(self._clock() - kind.since_s, 1)
            more = f"the last of {number} more such lines in {took_s:.0f} s"
            about = f"{kind.last.getMessage()} ({more})"
            name, level = kind.last.name, kind.last.levelno
            super().emit(logging.LogRecord(name, level, kind.last.pathname, 0, about, None, None))
