"""Define what happens in the console as Textual messages.

Invariant: a newer frame replaces one that has not been shown; nothing else is ever dropped.
"""

from __future__ import annotations

from textual.message import Message

from appliance.observe.frame.protocol import Frame, RequestFrame
from tui.feed import FeedLost
from tui.view import Caller


class FrameArrived(Message, bubble=False):
    """The daemon sent a frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame

    def can_replace(self, message: Message) -> bool:
        """Replace a waiting frame by a newer one."""
        return isinstance(message, FrameArrived)


class LinkLost(Message, bubble=False):
    """The daemon is out of reach; the next attempt comes in `retry_in_s`."""

    def __init__(self, loss: FeedLost, retry_in_s: float) -> None:
        super().__init__()
        self.loss = loss
        self.retry_in_s = retry_in_s


class CallerKnown(Message, bubble=False):
    """The daemon has sent the caller's user and role."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self.caller = caller


class FinishedArrived(Message, bubble=False):
    """The daemon has sent the newest finished requests."""

    def __init__(self, requests: tuple[RequestFrame, ...]) -> None:
        super().__init__()
        self.requests = requests


class PastArrived(Message, bubble=False):
    """The daemon has sent frames from before the first one that it streamed."""

    def __init__(self, frames: list[Frame], begin: str) -> None:
        super().__init__()
        self.frames = frames
        self.begin = begin


class WindowMoved(Message):
    """The request table shows other rows than before."""


class KeyUnderDialog(Message):
    """A key that the top dialog does not use."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
