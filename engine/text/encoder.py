"""Have texts tokenized by the process that tried the model's tokenizer, with limits for each text.

A tokenizer's file is a program: it may let a text grow without end, or match it for days. Used
here, it would hold the interpreter's lock, end the process, or fill the memory.
Invariant: a text that takes too much fails alone: it ends a fork of that process; one that takes
long begins again, one at a time, and in a line of its own where its client waits for more.
"""

from __future__ import annotations

import marshal
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

from engine.text.answers import How
from engine.text.reading import LONGEST_S, READER, UNKNOWN, Ended, Late, ask, asker_here

LONG_BYTES = 1 << 16
"""Longer texts have a fork each; shorter ones are done one after another in one that stays."""


class Encoder:
    """Hold the channel of one model's process; for any thread.

    Args:
        control: as channel() made it; the reader has its other end.
        start_again: gives another channel's other end to a new process, and raises Unavailable if
            that cannot be.
    """

    def __init__(
        self, control: socket.socket, start_again: Callable[[socket.socket], object]
    ) -> None:
        self._control: socket.socket | None = control
        self._closing = weakref.finalize(self, control.close)  # which ends the process
        self._start_again = start_again
        self._starting, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._one_late_at_a_time = threading.Lock()

    def read(self, job: str, *args: Any) -> bytes:
        """Do a job of engine/reader/jobs.py with the tokenizer; blocks.

        Raises:
            Unreadable: the tokenizer refuses the text.
            Overran: it takes too long or too much memory.
            Unavailable: the process cannot be started, or is ended from outside.
            Late: it takes long, and its asker is not late yet.
            Left: its asker has left.
        """
        body, asker = marshal.dumps((job, args)), asker_here()
        if len(body) > LONG_BYTES:
            return READER.retried(job, lambda: self._read(job, body, How.LONG_TEXT))
        try:
            with self._one_at_a_time:
                return READER.retried(job, lambda: self._read(job, body, How.TEXT))
        except Late:
            if asker is not None and not asker.is_late:
                raise
        with self._one_late_at_a_time:  # two would take cores from one step in turns
            return READER.retried(job, lambda: self._read(job, body, How.LONG_TEXT))

    def _read(self, job: str, body: bytes, how: bytes) -> bytes:
        control = self._started()
        try:
            answer, result = ask(control, how, body)
        except OSError as error:
            self._end(control)
            raise Ended(UNKNOWN) from error
        return READER.result(job, answer, result, how)

    def _started(self) -> socket.socket:
        with self._starting:
            if self._control is None:
                ours, theirs = channel()
                try:
                    with theirs:
                        self._start_again(theirs)
                except BaseException:
                    ours.close()
                    raise
                self._control = ours
                self._closing = weakref.finalize(self, ours.close)
            return self._control

    def _end(self, control: socket.socket) -> None:
        """End a process that has not answered, or see that it has ended."""
        with self._starting:
            if self._control is control:
                self._control = None
                control.close()


def channel() -> tuple[socket.socket, socket.socket]:
    """Make a channel for one model's texts: this process's end, and the other."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.settimeout(LONGEST_S)
    return ours, theirs
