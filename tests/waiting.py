"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], most_s: float = 60.0) -> None:
    """Wait until it holds; fail if it does not in time."""
    end_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
