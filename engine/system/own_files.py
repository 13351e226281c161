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
from collections.abc import Collection
from pathlib import Path

MAX_LINKS = 40
"""The kernel follows as many."""
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def check_own_folder(folder: Path, *, is_roots_fine: bool = True) -> None:
    """Refuse a folder in which another user could put a file, or that one could exchange.

    Args:
        is_roots_fine: False: refuse root's folder too, unless this user is root.

    Raises:
        OSError: it is not a folder, or names the folder on the way that is not ours or root's, or
            that others can write to. Links are followed if no other user could have set them.
    """
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    uid = os.geteuid()
    check_own_path(folder, uid)
    if not is_roots_fine:
        _check_owner(folder, folder.stat(), {uid})


def existing_part(folder: Path) -> Path:
    """Return the folder, or the nearest one above it if it does not exist yet."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def why_not_writable(folder: Path) -> str | None:
    """Say why this user can make no file in a folder; None: one can be made."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    return None if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def check_private_folder(folder: Path) -> None:
    """Refuse a folder that is a link, not this user's, or that other users can enter.

    Raises:
        OSError: as check_own_folder(), or for these reasons.
    """
    check_own_folder(folder, is_roots_fine=False)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a link", str(folder))
    _check_mode(folder, folder.stat(), 0o077)


def check_own_way(path: Path) -> None:
    """Refuse a path that another user could exchange; it need not be there, its folder must.

    Raises:
        OSError: it names the folder on the way that belongs to another user, or that others can
            write to and that is not sticky.
    """
    _end_of_own_way(path, os.geteuid())


def check_own_path(path: Path, uid: int) -> None:
    """Refuse what another user than root and this one could change or exchange.

    Raises:
        OSError: as check_own_folder(), of a folder or a file.
    """
    end = _end_of_own_way(path, uid)
    status = end.lstat()
    if stat.S_ISLNK(status.st_mode):  # it was none a moment ago
        raise PermissionError(errno.EPERM, f"{end} was exchanged", str(end))
    _check(end, status, uid)


def open_own(path: Path, flags: int, mode: int = 0o600, *, denied: int = 0) -> int:
    """Open a file that this user or root made; follow no link, and wait for no pipe.

    Args:
        mode: of a new file.
        denied: bits that its mode may not have.

    Raises:
        OSError: it is something else, another user's, or others can write to it.
    """
    fd = open_file(path, flags & ~os.O_TRUNC, mode)
    try:
        check_own_file(path, os.fstat(fd))
        _check_mode(path, os.fstat(fd), denied)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_own_target(path: Path, flags: int, *, denied: int = 0) -> int:
    """Open as open_own() does, but through links and folders that no other user could change.

    Raises:
        OSError: as open_own(), or another user could exchange the file.
    """
    return open_own(_end_of_own_way(path, os.geteuid()), flags, denied=denied)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file of any user; follow no link, and wait for no pipe.

    Raises:
        OSError: it is something else.
    """
    fd = os.open(path, flags | _ALWAYS, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EPERM, "it is not a file", str(path))
    return fd


def check_own_file(path: Path, status: os.stat_result) -> None:
    """Refuse, by a status without following links, what open_own() would refuse.

    Raises:
        OSError: it is no file, another user's, or others can write to it.
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EPERM, "it is not a file", str(path))
    _check(path, status, os.geteuid())


def check_own_socket(path: Path) -> None:
    """Refuse what is no socket of this user or root; clients may write to it.

    Raises:
        OSError: it is not there, is no socket, or is another user's.
    """
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EPERM, "it is not a socket", str(path))
    _check_owner(path, status, {0, os.geteuid()})


def _check(folder: Path, status: os.stat_result, uid: int, *, is_holder: bool = False) -> None:
    if not (is_holder and status.st_uid == _outer_uid()):
        _check_owner(folder, status, {0, uid})
    if stat.S_ISLNK(status.st_mode):
        return  # the mode of its folder tells which users can replace it
    is_sticky = is_holder and status.st_mode & stat.S_ISVTX
    # Container runtimes mount volumes with mode 0777; a program inside may not change that.
    is_volume = is_holder and status.st_uid == 0 and os.path.ismount(folder)
    if _is_open(status, uid) and not (is_sticky or is_volume):
        about = f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
        raise PermissionError(errno.EPERM, about, str(folder))


def _check_mode(path: Path, status: os.stat_result, denied: int) -> None:
    if status.st_mode & denied:
        about = f"too many users can use {path} (mode {stat.S_IMODE(status.st_mode):04o})"
        raise PermissionError(errno.EPERM, about, str(path))


def _check_owner(path: Path, status: os.stat_result, uids: Collection[int]) -> None:
    if status.st_uid not in uids:
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


def _end_of_own_way(path: Path, uid: int) -> Path:
    """Follow a path from the root; return where it ends, which need not be there.

    Each folder and link on the way is checked by the status that tells which of the two it is: it
    is ours or root's, and lies where no other user can exchange it, so it stays what it was.

    Raises:
        OSError: another user could change the way, or its links lead nowhere.
    """
    left, at, num_links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    _check(at, at.lstat(), uid, is_holder=True)
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        at /= name
        try:
            status = at.lstat()
        except FileNotFoundError:
            if left:
                raise
            break
        if stat.S_ISLNK(status.st_mode):
            _check(at, status, uid, is_holder=True)
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(at))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
        elif left:
            _check(at, status, uid, is_holder=True)
    return at
