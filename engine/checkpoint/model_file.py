"""Open a model's files, which are regular ones: a pipe or a device could be read for ever.

Invariant: what is read whole is the model's own, or a file of the same name: a folder from an
archive may hold a link to any file of its reader's, whose text clients would see.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import CheckpointError, unreadable
from engine.units import size_text

MAX_WHOLE_BYTES = 64 << 20
"""Twice the longest published tokenizer.json; indices and configurations are shorter."""
_BYTES_OF_MERGES = 128
"""A token has two or three pairs, and each pair is in memory four times."""

_on_read: Callable[[int], object] = lambda _num_bytes: None  # noqa: E731


def tell_of_reads(on_read: Callable[[int], object]) -> None:
    """Call this with each number of bytes that is read of a model's files."""
    global _on_read  # of a process that reads one model and ends
    _on_read = on_read


def tell_of_merges(num_tokens: int) -> None:
    """Count pairs of tokens that are to be found, which no file holds, as bytes that are read."""
    _on_read(_BYTES_OF_MERGES * num_tokens)


class _ToldFile(io.FileIO):
    def readinto(self, buffer: Any, /) -> int:
        num_bytes = super().readinto(buffer) or 0
        _on_read(num_bytes)
        return num_bytes


def open_model_fd(path: Path) -> int:
    """Open a file; return its descriptor.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe opens at once so
        os.close(fd)
        raise CheckpointError("not a regular file", where=str(path))
    return fd


def open_model_file(path: Path, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
    """Open a file, to be read in pieces of known length.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    return io.BufferedReader(_ToldFile(open_model_fd(path)), buffer_bytes)


def _check_link(path: Path, fd: int) -> None:
    """Compare the path of an opened file with where the model's folder is.

    The hub's cache has links to its blobs, which are named after their sums.

    Raises:
        CheckpointError: a link led out of the folder, to a file of another name.
    """
    opened = Path(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))
    folder = Path(os.path.realpath(path.parent))
    blobs = [each.parent / "blobs" for each in folder.parents if each.name == "snapshots"]
    if opened.name != path.name and not any(map(opened.is_relative_to, (folder, *blobs))):
        what = f"it is a link out of the model's folder, to {opened}"
        raise CheckpointError(what, where=str(path), hint="copy that file here if it is meant")


def read_model_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Read a whole file.

    Raises:
        CheckpointError: it cannot be read, is too long, or is a link to a foreign file.
        FileNotFoundError: it is missing.
    """
    try:
        with open_model_file(path) as file:
            _check_link(path, file.fileno())
            num_bytes = os.fstat(file.fileno()).st_size
            most = MAX_WHOLE_BYTES if max_bytes is None else max_bytes
            if num_bytes > most:
                what = f"{size_text(num_bytes)}, of at most {size_text(most)}"
                raise CheckpointError(what, where=str(path))
            return file.read(num_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_model_text(path: Path, max_bytes: int | None = None) -> str:
    """Read a whole file of text in UTF-8, which may begin with a byte-order mark.

    Raises:
        CheckpointError: as read_model_bytes(), or it is not UTF-8.
        FileNotFoundError: it is missing.
    """
    try:
        return read_model_bytes(path, max_bytes).decode("utf-8-sig")
    except ValueError as error:
        raise CheckpointError(f"not UTF-8: {error}", where=str(path)) from error
