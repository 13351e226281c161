"""The folders that the daemon writes to: made where they are missing.

Owns: their modes.
Invariant: what is there stays as it is; what is made is for its owner, and the socket's group.
Never: chooses a place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from appliance.configuration import paths
from appliance.configuration.config import ServeConfig
from engine.errors import ConfigError


def prepare_directories(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Create the folders that the daemon writes to; those that exist stay as they are.

    They are for their owner alone, but one that is named for the socket may be entered by the
    group, as the socket itself may be.

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
                hint="choose others with --socket and --state-dir",
            ) from error
    if run_dir == paths.own_temporary_dir():
        paths.check_private(run_dir)


def _make_folder(folder: Path, mode: int) -> None:
    """Make a folder and those above it that are missing, whatever the umask."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode)
        folder.chmod(mode)
    except FileExistsError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
