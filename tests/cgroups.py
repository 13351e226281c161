"""Memory control groups that count the page cache, of either version, where a test may make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup(NamedTuple):
    """A group of one's own."""

    folder: Path
    is_v2: bool

    def limit(self, num_bytes: int) -> None:
        """Allow so many bytes, of the page cache too."""
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(num_bytes))

    def enter(self) -> None:
        """Move this process there; what it has already stays counted where it was."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group for the time of a test; skip the test where the machine allows none."""
    found = None
    for root, is_v2, file in (
        (ROOT / "memory", False, "memory.limit_in_bytes"),
        (ROOT, True, "memory.max"),
        (ROOT / "unified", True, "memory.max"),
    ):
        folder = root / f"penstock-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / file).exists():
            found = MemoryGroup(folder, is_v2)
            break
        folder.rmdir()
    if found is None:
        pytest.skip("no memory control group can be made here: no root, or a container without one")
    try:
        yield found
    finally:
        found.folder.rmdir()
