"""Make small disks of our own, which can be full, read-only, stalled or damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

FILLER = "filler"


class Disk:
    """A folder for one purpose: a file system in a file, a tmpfs, or a plain folder.

    Mounts need a mount namespace of this process's own, with which they vanish.
    """

    def __init__(self, folder: Path, size_bytes: int, *, may_mount: bool) -> None:
        self.folder, self._size_bytes = folder, size_bytes
        folder.mkdir(parents=True)
        self.kind = "folder"
        if may_mount and _is_ok("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "t", folder):
            self.kind = "tmpfs"
            self._mount_image(size_bytes)

    def _mount_image(self, size_bytes: int) -> None:
        """Put an ext4 file system over the tmpfs, where this machine can: it can be frozen."""
        image = self.folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size_bytes)
        made = shutil.which("mkfs.ext4") and _is_ok("mkfs.ext4", "-q", "-m", "0", image)
        if made and _is_ok("mount", "-o", "loop", image, self.folder):
            self.kind = "ext4"
            shutil.rmtree(self.folder / "lost+found", ignore_errors=True)

    def close(self) -> None:
        """Unmount what was mounted here, so that the folder can be deleted."""
        while os.path.ismount(self.folder) and _is_ok("umount", "--lazy", self.folder):
            pass

    @property
    def is_ours(self) -> bool:
        """Say whether it may be filled."""
        return self.kind != "folder"

    def files(self) -> list[Path]:
        """List what the daemon keeps here."""
        found = (path for path in self.folder.rglob("*") if path.name not in (FILLER, "lock"))
        return sorted(path for path in found if path.is_file())

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room."""
        if self.kind == "tmpfs":  # to fill it would take memory
            used = max(4096, shutil.disk_usage(self.folder).used)
            _is_ok("mount", "-o", f"remount,size={used}", self.folder)
            try:
                yield
            finally:
                _is_ok("mount", "-o", f"remount,size={self._size_bytes}", self.folder)
            return
        filler = self.folder / FILLER
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                self._fill(file.fileno())
            yield
        finally:
            filler.unlink(missing_ok=True)

    @staticmethod
    def _fill(fd: int) -> None:
        """Take all room for a file, to which nothing is written."""
        size, part = 0, 64 << 20
        while part >= 4096:
            try:
                os.posix_fallocate(fd, size, part)
                size += part
            except OSError:
                part //= 2

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Let no file be opened for writing; those that are open can still be written."""
        folder = str(self.folder)
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Let every write wait; a process that waits so cannot end, either."""
        subprocess.run(["fsfreeze", "--freeze", self.folder], check=True)
        try:
            yield
        finally:
            _is_ok("fsfreeze", "--unfreeze", self.folder)


@contextlib.contextmanager
def briefly(fault: AbstractContextManager[None], most_s: float = 4.0) -> Iterator[None]:
    """Undo a fault after a while, also if what happens within it waits for that."""
    lock, stack = threading.Lock(), contextlib.ExitStack()
    stack.enter_context(fault)

    def undo() -> None:
        with lock:
            stack.close()

    timer = threading.Timer(most_s, undo)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        undo()


def flip(path: Path, rng: Random, count: int) -> None:
    """Flip bits of a file."""
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(count if size else 0):
            at = rng.randrange(size)
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ (1 << rng.randrange(8))]))


def _is_ok(*command: object) -> bool:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
