"""Open a model's files; refuse a pipe or a device, whose reading may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from engine.errors import CheckpointError


def open_model_file(path: Path, buffer_bytes: int = -1) -> BinaryIO:
    """Open a file for reading.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe opens at once so
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError("not a regular file", where=str(path))
    return os.fdopen(fd, "rb", buffering=buffer_bytes)


def read_model_text(path: Path) -> str:
    """Read a file of text in UTF-8, which may begin with a byte-order mark.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
        ValueError: it is not UTF-8.
    """
    with open_model_file(path) as file:
        return file.read().decode("utf-8-sig")
