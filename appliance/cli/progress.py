"""How far something is, on stderr: one line that changes, or a line now and then.

Owns: the line.
Invariant: nothing of it is left on a terminal when it has ended.
Never: writes to stdout.
"""

from __future__ import annotations

import sys
import time

from appliance.cli.text import ms, size

PAUSE_S = 0.2
PAUSE_WITHOUT_TERMINAL_S = 10.0


class ProgressLine:
    """Bytes done of a total, and their rate."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._is_terminal = sys.stderr.isatty()
        self._said_s = time.monotonic()

    def show(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        """Say it, if it is long enough since it was said."""
        now_s = time.monotonic()
        if now_s - self._said_s < (PAUSE_S if self._is_terminal else PAUSE_WITHOUT_TERMINAL_S):
            return
        self._said_s = now_s
        line = f"{self._verb} {size(done_bytes)} of {size(total_bytes)} at {size(bytes_per_s)}/s"
        if bytes_per_s > 0 and done_bytes < total_bytes:
            line += f", {ms((total_bytes - done_bytes) / bytes_per_s * 1000)} left"
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
