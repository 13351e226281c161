"""Use folders and files only if no other user made them or can change them.

Root and this user are trusted. In a folder that another user can write to, each name may be a link
to a file elsewhere.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path


def check_own_folder(folder: Path) -> None:
    """Refuse a folder in which another user could put a file, or that one could exchange.

    Raises:
        OSError: it is not a folder, or names the folder on the way that is not ours or root's, or
            that others can write to. Links are followed if no other user could have set them.
    """
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    check_own_path(folder, os.geteuid())


def check_own_path(path: Path, uid: int) -> None:
    """Refuse what another user than root and this one could change or exchange.

    Raises:
        OSError: as check_own_folder(), of a folder or a file.
    """
    _check(path, path.stat(), uid)
    for holder in _holders(path):
        _check(holder, holder.lstat(), uid, is_holder=True)


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file that this user or root made; follow no link, and wait for no pipe.

    Raises:
        OSError: it is something else, or another user's.
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    truncates = flags & os.O_TRUNC
    fd = os.open(path, flags & ~os.O_TRUNC | safe, mode)
    try:
        check_own_file(path, os.fstat(fd))
        if truncates:
            os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_own_file(path: Path, status: os.stat_result) -> None:
    """Refuse, by a status without following links, what open_own() would refuse.

    Raises:
        OSError: it is no file, or another user's.
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EPERM, "it is not a file", str(path))
    _check_owner(path, status, os.geteuid())


def _check(folder: Path, status: os.stat_result, uid: int, *, is_holder: bool = False) -> None:
    if not (is_holder and status.st_uid == _outer_uid()):
        _check_owner(folder, status, uid)
    if stat.S_ISLNK(status.st_mode):
        return  # the mode of its folder tells which users can replace it
    is_sticky = is_holder and status.st_mode & stat.S_ISVTX
    # Container runtimes mount volumes with mode 0777; a program inside may not change that.
    is_volume = is_holder and status.st_uid == 0 and os.path.ismount(folder)
    if _is_open(status, uid) and not (is_sticky or is_volume):
        about = f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
        raise PermissionError(errno.EPERM, about, str(folder))


def _check_owner(path: Path, status: os.stat_result, uid: int) -> None:
    if status.st_uid not in (0, uid):
        about = f"{path} belongs to another user (uid {status.st_uid})"
        raise PermissionError(errno.EPERM, about, str(path))


@functools.cache
def _outer_uid() -> int | None:
    """Return the uid that stands for all users outside this user namespace; None: all are in it.

    In a sandbox the folders of the machine's root belong to it.
    """
    try:
        uid = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return None
    ranges = [(int(line.split()[0]), int(line.split()[2])) for line in lines]
    return None if any(first <= uid < first + count for first, count in ranges) else uid


def _is_open(status: os.stat_result, uid: int) -> bool:
    """Say whether others can write; a group with this user's name is this user's alone."""
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(uid)
    except KeyError:
        return True
    return group.gr_name != user.pw_name or not set(group.gr_mem) <= {user.pw_name}


def _holders(path: Path) -> Iterator[Path]:
    """Yield each folder and link on the way, other than the last folder itself."""
    left, at = list(reversed(path.absolute().parts[1:])), Path("/")
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        yield at
        there = at / name
        if there.is_symlink():
            yield there
            target = Path(os.readlink(there))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at
        else:
            at = there
