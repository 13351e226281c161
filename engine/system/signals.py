"""Name the signals that end processes."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Name a signal; real-time ones, which Python has no names for, count from SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"
