"""Define the default paths of sockets, state, cache and configuration.

Invariant: daemon and clients search the same folders; while the unit is stopped, clients name its
socket.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError
from engine.system.own_files import check_own_socket, check_private_folder, open_file

SYSTEM_CONFIG = Path("/etc/penstock/penstock.toml")
SYSTEM_SOCKET = Path("/run/penstock/penstock.sock")
SYSTEM_STATE_DIR = Path("/var/lib/penstock")
UNIT_NAME = "penstock.service"
SOCKET_UNIT_NAME = "penstock.socket"
GPU_UNIT_NAME = "penstock-gpu.service"
UNIT_DIRS = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"))
SOCKET_NAME = "penstock.sock"
TEMPORARY_DIR = Path("/tmp")
LOCK_BYTES = 4096
"""Maximum bytes of a lock file, with the daemon's pid and socket."""


def config_file(environ: Mapping[str, str]) -> Path | None:
    """Return the default configuration file; None: there is no such file.

    The service and root read the service's first, other users their own.
    """
    both = [_own_config(environ), SYSTEM_CONFIG]
    if _is_of_service(environ):
        both.reverse()
    return next((path for path in both if os.path.exists(path)), None)


def config_file_to_edit(environ: Mapping[str, str]) -> Path:
    """Name the file where a setting belongs, there or not yet."""
    named = environ.get("PENSTOCK_CONFIG")
    return Path(named) if named else config_file(environ) or _own_config(environ)


def _own_config(environ: Mapping[str, str]) -> Path:
    return _xdg(environ, "XDG_CONFIG_HOME", ".config") / "penstock" / "penstock.toml"


def _is_of_service(environ: Mapping[str, str]) -> bool:
    """Say whether the service is meant unless another is named: in its unit, and by root."""
    return "STATE_DIRECTORY" in environ or os.geteuid() == 0


def default_socket(environ: Mapping[str, str]) -> Path:
    """Return the socket in RUNTIME_DIRECTORY, the system's, XDG_RUNTIME_DIR or /tmp, in this order.

    The system's is for the service and root alone.

    Raises:
        ConfigError: the folder in /tmp is another user's.
    """
    if runtime := _systemd_dir(environ, "RUNTIME_DIRECTORY"):
        return runtime / SOCKET_NAME
    if _is_of_service(environ) and os.path.exists(SYSTEM_SOCKET):
        return SYSTEM_SOCKET
    folder = private_dir(environ)
    if folder == own_temporary_dir() and os.path.lexists(folder):
        check_private(folder)
    return folder / SOCKET_NAME


def client_socket(environ: Mapping[str, str]) -> Path:
    """Return the socket that clients use: default_socket(), or another's if that is absent.

    It is the service's, or the one in the lock of this user's daemon, which may have been started
    with another XDG_RUNTIME_DIR, as by cron or su. The service and root take the service's first.
    A socket that a dead daemon left is the last choice: no client reaches a daemon there.

    Raises:
        ConfigError: as default_socket(), or the socket in this user's folder is another user's.
    """
    path = default_socket(environ)
    found = [path] if os.path.lexists(path) else []
    if found and path.parent == private_dir(environ):
        _check_owner(path)
    told, is_user = _told_socket(environ), not _is_of_service(environ)
    if told and is_user and told not in found:
        found.append(told)
    if has_unit() or (is_user and os.path.exists(SYSTEM_SOCKET)):
        found.append(SYSTEM_SOCKET)
    if told and told not in found:
        found.append(told)
    if len(found) < 2:  # connecting would start a stopped service
        return (found or [path])[0]
    return next((each for each in found if _is_listened_on(each)), found[0])


def _is_listened_on(path: Path) -> bool:
    """Say whether a daemon has the socket, also if it is busy or does not let this user in."""
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)
        try:
            line.connect(str(path))
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            return False
    return True


def socket_of(state_dir: Path) -> str:
    """Return the socket named in the state folder's lock; empty: unknown."""
    try:
        with open(open_file(state_dir / "lock", os.O_RDONLY), "rb") as file:
            text = file.read(LOCK_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return text.strip().partition(" ")[2]


def is_of_socket(state_dir: Path, path: Path) -> bool:
    """Say whether the state folder's lock names this socket."""
    told = socket_of(state_dir)
    return bool(told) and os.path.realpath(told) == os.path.realpath(path)


def is_daemon_alive(state_dir: Path) -> bool:
    """Check whether a daemon holds this state directory; it may not listen yet."""
    try:
        with open(open_file(state_dir / "lock", os.O_RDONLY), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _told_socket(environ: Mapping[str, str]) -> Path | None:
    """Return the socket named in the state folder's lock, if it is ours or root's.

    An ended daemon leaves its lock behind, and another user might then listen on its path.
    """
    path = socket_of(default_state_dir(environ))
    try:
        check_own_socket(Path(path))
    except (OSError, ValueError):
        return None
    return Path(path) if path.startswith("/") else None


def _check_owner(path: Path) -> None:
    """Refuse another user's socket: what is sent there, that user reads."""
    try:
        check_own_socket(path)
    except OSError as error:
        hint = f"unset XDG_RUNTIME_DIR, or name it: --host {path}"
        raise ConfigError(str(error.strerror), where=str(path), hint=hint) from error


def has_unit() -> bool:
    """Say whether the daemon is installed as a service here, running or not."""
    return any((folder / UNIT_NAME).exists() for folder in UNIT_DIRS)


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return systemd's STATE_DIRECTORY, or this user's state folder."""
    given = _systemd_dir(environ, "STATE_DIRECTORY")
    return given or _xdg(environ, "XDG_STATE_HOME", ".local/state") / "penstock"


def private_dir(environ: Mapping[str, str]) -> Path:
    """Return this user's folder for sockets; it may not exist."""
    runtime_home = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_home, "penstock") if runtime_home else own_temporary_dir()


def is_for_sockets(folder: Path, environ: Mapping[str, str]) -> bool:
    """Say whether a folder is, or is below, a system folder for sockets that a boot empties."""
    roots = [own_temporary_dir(), SYSTEM_SOCKET.parent]
    if runtime := _systemd_dir(environ, "RUNTIME_DIRECTORY"):
        roots.append(runtime)
    if runtime_home := environ.get("XDG_RUNTIME_DIR"):
        roots.append(Path(runtime_home))
    return any(folder.is_relative_to(root) for root in roots)


def own_temporary_dir() -> Path:
    """Return this user's folder in /tmp; it may not exist."""
    return TEMPORARY_DIR / f"penstock-{os.getuid()}"


def check_private(folder: Path) -> None:
    """Refuse a folder in a place where everyone may write, unless it is ours alone.

    Another user could put a socket there and read every prompt.
    """
    try:
        check_private_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"it is not a folder of this user alone: {error.strerror}",
            where=str(folder),
            hint=f"chmod 700 {folder}, or choose another socket with --socket",
        ) from error


def _systemd_dir(environ: Mapping[str, str], variable: str) -> Path | None:
    """Return the unit's folder from systemd, the first entry of a list with colons."""
    first = environ.get(variable, "").split(":")[0]
    return Path(first) if first else None


def _xdg(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return an XDG folder; the standard says to ignore a relative path."""
    given = environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / default


def log_path(folder: Path) -> Path:
    """Return the request log's file in a state folder."""
    return folder / "requests.db"
