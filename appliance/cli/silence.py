"""Tell a person that the daemon has fallen silent amid a reply, and that it answers again.

A killed daemon's replies continue: its keeper holds their connections until the next daemon is
ready.
Invariant: a note comes only after SILENT_S without an event, and a look that got no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from appliance.cli import terminal
from appliance.client.calls import Client, ClientError, DaemonUnreachable

SILENT_S = 2.0
LOOK_S = 1.0
"""Maximum time that a look waits for an answer."""


class SilenceWatch:
    """Watches one reply from a thread; use it in a `with`.

    Args:
        client: that the reply is read with.
        is_amid_line: whether the reply has left the cursor within a line.
    """

    def __init__(self, client: Client, is_amid_line: Callable[[], bool]) -> None:
        self._client = Client(client.address, timeout_s=LOOK_S)
        self._is_amid_line = is_amid_line
        self._heard_s = time.monotonic()
        self._is_over = threading.Event()
        self._is_told = False
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)

    def __enter__(self) -> SilenceWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def heard(self) -> None:
        """Note that an event has come."""
        self._heard_s = time.monotonic()
        if self._is_told:
            self._is_told = False
            self._note("the daemon is back; the reply continues")

    def _watch(self) -> None:
        while not self._is_over.wait(SILENT_S / 4):
            if time.monotonic() - self._heard_s < SILENT_S or self._is_told:
                continue
            asked_s = time.monotonic()
            if not self._answers() and self._heard_s < asked_s and not self._is_over.is_set():
                self._is_told = True
                self._note("the daemon does not answer; the reply continues once it is back")

    def _answers(self) -> bool:
        try:
            self._client.get("/health")
        except DaemonUnreachable:
            return False
        except ClientError:
            return True
        return True

    def _note(self, text: str) -> None:
        terminal.note("\n" * self._is_amid_line() + f"penstock: {text}")
