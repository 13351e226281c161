"""Memory control groups that count the page cache, of either version, where a test may make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path("/sys/fs/cgroup")
VERSIONS = {
    1: ((ROOT / "memory", "memory.limit_in_bytes"),),
    2: ((ROOT, "memory.max"), (ROOT / "unified", "memory.max")),
}
"""Where groups of each version are mounted, and the file of their limit."""


class MemoryGroup(NamedTuple):
    """A group of one's own."""

    folder: Path
    file: str

    def limit(self, num_bytes: int) -> None:
        """Allow so many bytes, of the page cache too."""
        (self.folder / self.file).write_text(str(num_bytes))

    def enter(self) -> None:
        """Move this process there; what it has already stays counted where it was."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_group(version: int) -> Iterator[MemoryGroup]:
    """Make a group for the time of a test; skip the test where the machine allows none."""
    found = None
    for root, file in VERSIONS[version]:
        folder = root / f"penstock-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / file).exists():
            found = MemoryGroup(folder, file)
            break
        folder.rmdir()
    if found is None:
        pytest.skip(f"no memory control group of version {version} can be made here")
    try:
        yield found
    finally:
        found.folder.rmdir()
