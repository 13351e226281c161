"""Learn what is usual, minute by minute, without the time that an alert reports.

Invariant: the usual value is the median over a day of busy minutes, so an hour moves it little; a
minute in which an alert stood is no part of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

MAX_MINUTES = 1440
"""Busy minutes that the usual value is taken from."""


class Baseline:
    """The usual value of readings of each kind.

    Args:
        min_minutes: minutes with readings before there is a usual value.
    """

    def __init__(self, min_minutes: int) -> None:
        self._min_minutes = min_minutes
        self._minute = 0
        self._is_left_out = False
        self._this_minute: defaultdict[int, list[float]] = defaultdict(list)
        self._medians: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=MAX_MINUTES)
        )
        self._usual: dict[int, float] = {}

    def add(self, kind: int, value: float, now_s: float) -> None:
        """Add a reading; it counts once its minute is over."""
        self._begin(now_s)
        self._this_minute[kind].append(value)

    def leave_out(self, now_s: float) -> None:
        """Leave this minute out: what it has is what an alert is about."""
        self._begin(now_s)
        self._is_left_out = True

    def of(self, kind: int) -> float | None:
        """Return the usual value of a kind; None: too few minutes had one."""
        return self._usual.get(kind)

    @property
    def kinds(self) -> list[int]:
        """The kinds with a usual value."""
        return sorted(self._usual)

    def _begin(self, now_s: float) -> None:
        """Take the last minute's medians in when another minute begins."""
        if (minute := int(now_s / 60)) == self._minute:
            return
        if not self._is_left_out:
            for kind, seen in self._this_minute.items():
                medians = self._medians[kind]
                medians.append(median(seen))
                if len(medians) >= self._min_minutes:
                    self._usual[kind] = median(medians)
        self._this_minute.clear()
        self._minute, self._is_left_out = minute, False
