"""Make a new file that appears under its name only when it is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import FileError


@contextmanager
def appearing(path: Path, what: str) -> Iterator[Path]:
    """Make a private file beside the path, renamed to it when the block succeeds.

    Args:
        what: will be in it, for errors.

    Raises:
        FileError: the path exists, or nothing can be written there.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    hint = "name a new file in a folder that you can write to"
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield unfinished
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.rename(unfinished, path)
    except OSError as error:
        raise FileError(f"cannot write {what}", error, where=str(path), hint=hint) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
