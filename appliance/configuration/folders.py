"""Create the folders that the daemon writes to, or check that they could be.

Invariant: an existing folder stays unchanged; a new one is for its owner and the socket's group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.configuration import paths
from appliance.configuration.settings import ServeConfig
from engine.errors import ConfigError, refuse
from engine.system.own_files import check_own_folder, check_own_way, existing_part, why_not_writable

_OTHERS = "choose others with --socket and --state-dir"


def prepare_directories(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Create the missing folders that the daemon writes to; existing ones stay unchanged.

    Only their owner may enter them, but a folder configured for the socket may be entered by the
    group, like the socket itself.

    Raises:
        ConfigError: one cannot be created.
    """
    run_dir = config.socket.parent
    is_private = run_dir in (paths.private_dir(environ), paths.own_temporary_dir())
    modes = {run_dir: 0o700 if is_private else 0o750, config.state_dir: 0o700}
    for folder, mode in modes.items():
        try:
            _make_folder(folder, mode)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder: {error.strerror}",
                where=str(folder),
                hint=_OTHERS,
            ) from error
    if run_dir == paths.own_temporary_dir():
        paths.check_private(run_dir)


def check_directories(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check that prepare_directories() would succeed, and that only we can make files there.

    An existing socket needs no writable folder: systemd may have made it in a folder of its own. A
    folder configured for the socket must exist, since no client would find a socket elsewhere.
    Below the system's folders for sockets, which are empty after each boot, it is made.

    Raises:
        ConfigError: all faults together.
    """
    wrong = list[ConfigError]()
    folders, run_dir = [config.state_dir], config.socket.parent
    if not os.access(config.socket, os.F_OK):
        folders.insert(0, run_dir)
    if not run_dir.exists() and not paths.is_for_sockets(run_dir, environ):
        hint = f"mkdir -p {run_dir}, or name another path with --socket"
        wrong.append(ConfigError("there is no such folder", where=str(run_dir), hint=hint))
        folders.remove(run_dir)
    for folder in folders:
        there = existing_part(folder)
        if not there.is_dir():
            problem = f"{there} is not a folder" if there != folder else "it is not a folder"
        elif why := why_not_writable(there):
            problem = f"no file can be made in {'it' if there == folder else there}: {why}"
        else:
            continue
        wrong.append(ConfigError(problem, where=str(folder), hint=_OTHERS))
    wrong += _open_to_others(config)
    refuse(wrong)


def _open_to_others(config: ServeConfig) -> Iterator[ConfigError]:
    """Find what another user could exchange: a file of the state, or the socket."""
    try:
        if config.state_dir.exists():
            check_own_folder(config.state_dir)
    except OSError as error:
        yield ConfigError(str(error.strerror), where=str(config.state_dir), hint=_OTHERS)
    run_dir = config.socket.parent
    there = existing_part(run_dir)
    try:
        if there.is_dir():
            check_own_way(there / config.socket.name)
    except OSError as error:
        problem = "other users can replace the socket there"
        hint = f"{error.strerror}; {_OTHERS}"
        yield ConfigError(problem, where=str(run_dir), hint=hint)


def _make_folder(folder: Path, mode: int) -> None:
    """Make a folder and its missing parents, with any umask."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode)
        folder.chmod(mode)
    except FileExistsError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
