"""Say why a sequence ended, in the words of the daemon and of its workers."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. `stop`: end of text, stop id or stop string; `length`: max_tokens."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
