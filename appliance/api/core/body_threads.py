"""Choose where a body is decoded and prepared: on the loop if it is quick, else in a thread."""

from __future__ import annotations

from typing import NamedTuple, cast

from starlette.requests import Request as HttpRequest

from appliance.api.core.fair_threads import Turns

MAX_INLINE_BYTES = 2 << 10
"""Larger bodies are decoded in a thread: of these no field takes a millisecond."""
MAX_SMALL_BYTES = 16 << 10
"""Larger bodies have threads of their own: small ones do not wait."""
NUM_THREADS = 3
"""Threads for small bodies, and as many for large ones."""
NUM_EACH = 2
"""Threads of one caller."""
MAX_SMALL_WAITING = 1024
"""Small bodies cost little while they wait; how many may, the queue decides better."""


class SizeThreads(NamedTuple):
    """The threads for bodies of one size; each kind of work waits for its own kind alone."""

    bodies: Turns
    grammars: Turns
    """Compiling takes half a second at most: then grammars are late."""
    late: Turns
    """Takes seconds: grammars where no core is idle, and chats that render slowly."""


class BodyThreads:
    """The threads in which bodies are decoded and prepared; the application has one."""

    def __init__(self) -> None:
        waiting = {"max_waiting": MAX_SMALL_WAITING, "max_waiting_each": MAX_SMALL_WAITING // 2}
        self._small = SizeThreads(
            Turns("admission", NUM_THREADS, num_each=NUM_EACH, **waiting),
            Turns("grammar", NUM_THREADS, num_each=NUM_EACH, **waiting),
            Turns("late", 1, **waiting),
        )
        self._large = SizeThreads(
            Turns("large-body", NUM_THREADS, num_each=NUM_EACH),
            Turns("large-grammar", NUM_THREADS, num_each=NUM_EACH),
            Turns("late-large", 1),
        )

    def of(self, num_bytes: int) -> SizeThreads:
        """Choose the threads for a body of that size."""
        return self._large if num_bytes > MAX_SMALL_BYTES else self._small


def threads_for(http: HttpRequest, body: bytes) -> SizeThreads:
    """Find the threads of the application for a body."""
    return cast(BodyThreads, http.app.state.body_threads).of(len(body))
