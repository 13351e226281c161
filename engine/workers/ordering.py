"""The order of two workers' steps on the blocks that they have in common on one GPU.

A worker records an event after each of its steps and names it in that step's message. The sequence
that was released by the message is admitted to the other worker with the event's number, and that
worker's device waits for it before the sequence's first step. There are several events in turn:
one that is recorded again before somebody waits for it makes the wait longer, never shorter.
Owns: this worker's events, and the other's as it has opened them. Called by: loop.
Invariant: a step that reads a moved block comes after the step that wrote it, on the device.
Never: makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.workers.device import Device, SharedEvent
from engine.workers.running import Running

NUM_EVENTS = 16


class Ordering:
    """Events of both sides.

    Args:
        device: of this worker.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own = [device.new_event() for _ in range(NUM_EVENTS)]
        self._others: list[SharedEvent] = []
        self._next = 0

    @property
    def handles(self) -> list[bytes]:
        """With which the other worker opens these."""
        return [event.handle for event in self._own]

    def use(self, handles: list[bytes]) -> None:
        """Take over the other worker's events; those of its earlier life are forgotten."""
        self._others = [self._device.open_event(handle) for handle in handles]

    def before(self, sequences: Iterable[Running]) -> None:
        """The next step is of these: it comes after what they wait for."""
        awaited = set()
        for running in sequences:
            if running.after_event is not None:
                awaited.add(running.after_event)
                running.after_event = None
        for number in sorted(awaited):
            self._others[number].wait()

    def after(self) -> int:
        """Record an event after what has been launched; its number."""
        number = self._next
        self._next = (number + 1) % NUM_EVENTS
        self._own[number].record()
        return number
