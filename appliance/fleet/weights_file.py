"""Keep packed weights in a file that workers map, from one start to the next.

Invariant: a file has its name only once it is whole, with the sums of its bytes; one that is
damaged, or of other weights, is never served. A file that a daemon uses is not deleted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from appliance.configuration.settings import ServeConfig
from appliance.fleet.file_identity import about_file
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import PanelsLayout, WeightsLayout
from engine.errors import ConfigError, PenstockError
from engine.scheduler.offload.files import WEIGHTS_FOLDER, BusyError
from engine.system.own_files import check_private_folder, existing_part, open_own, sync_folder
from engine.units import size_text

log = logging.getLogger("penstock")

VERSION = 1
"""The version of the file's form; a file of another version is written again."""
RESERVE_BYTES = 1 << 30
"""Bytes of the disk that stay free."""
_MAGIC = b"PENSTKWT"
_HEAD = struct.Struct("<8sII32sQ")
"""Magic, version, bytes of a sum's piece, identity, bytes of the weights."""
_SUM = struct.Struct("<I")
_PIECE_BYTES = 16 << 20
_PAGE = 4096
_IN_MEMORY = ("tmpfs", "ramfs")
_DAY_S = 86_400
HINT = "choose another disk with --ssd-dir, or a smaller model"


def folder_of(config: ServeConfig) -> Path:
    """Return the folder of weights, within the SSD cache's."""
    return config.ssd_folder / WEIGHTS_FOLDER


def identity_of(
    checkpoint: Checkpoint, dtype: str, layout: WeightsLayout | PanelsLayout, weights: str
) -> bytes:
    """Digest all that the packed bytes depend on: the files by what tells them from changed ones.

    Another release packs again, so that none has to know how others did.

    Raises:
        OSError: a file cannot be read.
    """
    files = [[os.path.realpath(file), *about_file(file)] for file in sorted(checkpoint.files)]
    form: object = layout
    if isinstance(layout, PanelsLayout):
        form = sorted(layout.panels.items()), layout.rest
    about = VERSION, version("penstock"), dtype, weights, layout.num_bytes, repr(form)
    parts = json.dumps([*about, files])
    return blake2b(parts.encode(), digest_size=32).digest()


def check_room(folder: Path, identity: bytes, num_bytes: int) -> None:
    """Refuse weights for which the disk has no room; nothing is made.

    Raises:
        ConfigError: naming what the disk lacks.
    """
    path = _path(folder, identity)
    if path.exists() and path.stat().st_size == _file_bytes(num_bytes):
        return
    there = existing_part(folder)
    if _kind_of_disk(there) in _IN_MEMORY:
        what = f"weights go to a disk, and {there} is in memory"
        raise ConfigError(what, where="offload_weights", hint=HINT)
    others = disk_bytes(files_of(folder))
    room = shutil.disk_usage(there).free + others - RESERVE_BYTES
    if _file_bytes(num_bytes) > room:
        what = f"weights take {size_text(num_bytes)} of the disk of {folder}; "
        what += f"{size_text(max(room, 0))} are free"
        raise ConfigError(what, where="offload_weights", hint=HINT)


class WeightsFile:
    """One model's packed weights on disk.

    Args:
        folder: of all such files; made if missing.
        identity: of identity_of().
        num_bytes: of the packed weights.
        keep_days: files that no start has used for so long are deleted.

    Raises:
        ConfigError: the disk has no room, or another daemon is writing this file.
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: bytes, num_bytes: int, keep_days: int) -> None:
        self.path, self.num_bytes = _path(folder, identity), num_bytes
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private_folder(folder)
        _drop_unused(folder, time.time() - keep_days * _DAY_S)
        found = self._found()
        self.is_whole = found is not None
        """Whether its bytes are weights; else workers pack them, and finish() follows."""
        self.fd = self._made() if found is None else found

    def _found(self) -> int | None:
        """Open the file that an earlier start has written; None: it is missing or damaged."""
        try:
            fd = open_own(self.path, os.O_RDONLY, denied=0o077)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_size == _file_bytes(self.num_bytes):
            end = os.pread(fd, _end_bytes(self.num_bytes), _end_at(self.num_bytes))
            log.info("checking %s of weights in %s", size_text(self.num_bytes), self.path)
            if end == self._end(fd):
                os.utime(fd)  # it is used
                return fd
        log.warning("%s is damaged; it is written again", self.path)
        os.close(fd)
        self.path.unlink()
        return None

    def _made(self) -> int:
        folder = self.path.parent
        check_room(folder, self._identity, self.num_bytes)
        fd = open_own(self._new, os.O_RDWR | os.O_CREAT, denied=0o077)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            _make_room(folder, _file_bytes(self.num_bytes))
            os.posix_fallocate(fd, 0, _file_bytes(self.num_bytes))
        except BlockingIOError as error:
            os.close(fd)
            what = f"another daemon is writing {self._new}"
            raise ConfigError(what, where="offload_weights", hint="start again later") from error
        except OSError as error:
            self._new.unlink()
            os.close(fd)
            what = f"no file of {size_text(self.num_bytes)}: {error.strerror}"
            raise ConfigError(what, where=str(folder), hint=HINT) from error
        log.info("writing %s of packed weights to %s", size_text(self.num_bytes), self.path)
        return fd

    def finish(self) -> None:
        """Sum up what the workers have packed, and give the file its name.

        Raises:
            OSError: the disk fails; the next start writes it again.
        """
        os.pwrite(self.fd, self._end(self.fd), _end_at(self.num_bytes))
        os.fsync(self.fd)
        self._new.rename(self.path)
        sync_folder(self.path.parent)
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        self.is_whole = True

    def give_up(self) -> None:
        """Delete the file unless it is whole: the workers never packed all of it."""
        if not self.is_whole:
            self._new.unlink(missing_ok=True)

    @property
    def _new(self) -> Path:
        return self.path.with_suffix(".new")

    def _end(self, fd: int) -> bytes:
        """Read all bytes; return what stands behind them in a whole file."""
        head = _HEAD.pack(_MAGIC, VERSION, _PIECE_BYTES, self._identity, self.num_bytes)
        end = head + b"".join(map(_SUM.pack, _sums(fd, self.num_bytes)))
        return end + _SUM.pack(zlib.crc32(end))


def _sums(fd: int, num_bytes: int) -> Iterator[int]:
    """Sum up pieces of a file; none of it stays in memory."""
    for start in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - start)
        total = 0
        while size and (data := os.pread(fd, min(size, 1 << 20), start)):
            total = zlib.crc32(data, total)
            os.posix_fadvise(fd, start, len(data), os.POSIX_FADV_DONTNEED)
            start, size = start + len(data), size - len(data)
        if size:
            raise PenstockError("the weights' file ends early")
        yield total


def _path(folder: Path, identity: bytes) -> Path:
    return folder / f"{identity.hex()[:24]}.weights"


def _end_at(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _end_bytes(num_bytes: int) -> int:
    return _HEAD.size + (-(-num_bytes // _PIECE_BYTES) + 1) * _SUM.size


def _file_bytes(num_bytes: int) -> int:
    return _end_at(num_bytes) + _end_bytes(num_bytes)


def disk_bytes(files: list[Path]) -> int:
    """Return the bytes that files take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in files)


@contextmanager
def unused_weights(folder: Path) -> Iterator[list[Path]]:
    """Lock all files of weights in a folder, and yield them.

    Raises:
        BusyError: a daemon uses one.
        OSError: one cannot be opened.
    """
    with ExitStack() as opened:
        for path in (files := files_of(folder)):
            fd = open_own(path, os.O_RDONLY)
            opened.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusyError(errno.EBUSY, "a daemon uses its weights") from error
        yield files


def files_of(folder: Path) -> list[Path]:
    """List the files of weights, the one unused longest first."""
    found = [*folder.glob("*.weights"), *folder.glob("*.new")] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _drop_unused(folder: Path, since_s: float) -> None:
    for path in files_of(folder):
        is_left = path.suffix == ".new"  # of a daemon that died while it wrote
        if is_left or path.stat().st_mtime < since_s:
            _drop(path)


def _make_room(folder: Path, num_bytes: int) -> None:
    """Delete files of other weights, the one unused longest first, until the disk has room."""
    for path in files_of(folder):
        if shutil.disk_usage(folder).free >= num_bytes + RESERVE_BYTES:
            return
        _drop(path)


def _drop(path: Path) -> None:
    """Delete a file of weights, unless a daemon uses it."""
    with suppress(OSError):
        fd = open_own(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            log.info("deleted %s: no start has used it lately", path)
        finally:
            os.close(fd)


def _kind_of_disk(folder: Path) -> str:
    """Return the file system's name; empty: unknown."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, after = line.partition(" - ")
        if fields.split()[2] == wanted:
            return after.split()[0]
    return ""
