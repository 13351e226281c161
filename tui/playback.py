"""Track a replay's position and speed.

Invariant: the position is always one of the moments: the newest up to the wanted time, or the
first. A Playback never changes; every move makes another.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

EXIT_USAGE = 2


SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MAX_PAUSE_MS = 10_000
"""Longest gap without a frame that is played; longer ones are skipped."""
_OFFSET = re.compile(r"([+-])(\d{1,6})([smh])", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", re.ASCII)
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True)
class Playback:
    """A position in a recording."""

    moments_ms: Sequence[int]
    """Unix times of the frames, sorted, at least one."""
    marks_ms: Sequence[int] = ()
    """Unix times of warnings and errors, sorted."""
    index: int = 0
    now_ms: float = 0.0
    """The time while it plays: this frame's, or up to the next."""
    speed: float = 1.0
    is_playing: bool = False

    @property
    def at_ms(self) -> int:
        """The frame's time."""
        return self.moments_ms[self.index]

    @property
    def is_at_end(self) -> bool:
        """Whether this is the last frame."""
        return self.index == len(self.moments_ms) - 1

    def seek(self, time_ms: float) -> Playback:
        """Move to the newest frame up to a time."""
        return self._to(bisect_right(self.moments_ms, time_ms) - 1)

    def step(self, num_frames: int) -> Playback:
        """Move by a number of frames, back if negative."""
        return self._to(self.index + num_frames)

    def skip(self, offset_ms: int) -> Playback:
        """Move by a time, and at least to the next frame in that direction."""
        sought = self.seek(self.at_ms + offset_ms)
        if offset_ms > 0:
            return sought if sought.index > self.index else self.step(1)
        return sought if sought.index < self.index else self.step(-1)

    def next_mark(self) -> Playback:
        """Move to the first frame after the next warning or error; stay if there are no more."""
        later = bisect_right(self.marks_ms, self.at_ms)
        return self._first_after(self.marks_ms[later]) if later < len(self.marks_ms) else self

    def previous_mark(self) -> Playback:
        """Move to the frame of the previous warning or error."""
        for mark_ms in reversed(self.marks_ms[: bisect_right(self.marks_ms, self.at_ms)]):
            found = self._first_after(mark_ms)
            if found.index < self.index:
                return found
        return self

    def faster(self, num_steps: int) -> Playback:
        """Change the speed by steps in SPEEDS, down if negative."""
        place = SPEEDS.index(self.speed) + num_steps
        return replace(self, speed=SPEEDS[max(0, min(place, len(SPEEDS) - 1))])

    def toggled(self) -> Playback:
        """Play if paused, from the beginning if at the end; otherwise pause."""
        start = self._to(0) if self.is_at_end and not self.is_playing else self
        return replace(start, is_playing=not self.is_playing)

    def after(self, elapsed_s: float) -> Playback:
        """Advance by the viewer's elapsed time; stop at the end."""
        if not self.is_playing:
            return self
        now_ms = self.now_ms + elapsed_s * 1000 * self.speed
        index = bisect_right(self.moments_ms, now_ms) - 1
        if index == self.index and not self.is_at_end:
            next_ms = self.moments_ms[index + 1]
            if next_ms - self.at_ms > MAX_PAUSE_MS and now_ms - self.at_ms >= 1000:
                index, now_ms = index + 1, next_ms
        moved = replace(self, index=index, now_ms=now_ms)
        return replace(moved, is_playing=not moved.is_at_end)

    def _first_after(self, time_ms: int) -> Playback:
        return self._to(bisect_left(self.moments_ms, time_ms))

    def _to(self, index: int) -> Playback:
        index = max(0, min(index, len(self.moments_ms) - 1))
        return replace(self, index=index, now_ms=self.moments_ms[index])


def parse_moment(text: str, now_ms: int) -> int | None:
    """Parse a time as people type it, into Unix milliseconds; None: invalid.

    `14:02` or `14:02:11` on the day of `now_ms`, `-5m` or `+30s` from there, or ISO 8601; all UTC.
    """
    text = text.strip()
    if offset := _OFFSET.fullmatch(text):
        span_ms = int(offset[2]) * _UNITS_MS[offset[3]]
        return now_ms + span_ms if offset[1] == "+" else now_ms - span_ms
    try:
        if clock := _CLOCK.fullmatch(text.removesuffix("Z")):
            day = datetime.fromtimestamp(now_ms / 1000, UTC)
            hour, minute, second = int(clock[1]), int(clock[2]), int(clock[3] or 0)
            return unix_ms(day.replace(hour=hour, minute=minute, second=second, microsecond=0))
        at = datetime.fromisoformat(text)
        return unix_ms(at.replace(tzinfo=UTC) if at.tzinfo is None else at)
    except (ValueError, OverflowError):
        return None


def unix_ms(at: datetime) -> int:
    """Return the milliseconds since 1970, without rounding through floats."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def iso(time_ms: int) -> str:
    """Format a time as in frames and rows; the inverse of unix_ms(fromisoformat())."""
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
