"""Note which cores this daemon's workers use, and find this user's other daemons on the same cores.

Invariant: a claim ends with its process, however that dies, since the kernel drops the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from appliance.configuration import paths
from appliance.fleet.placement import cpu_names
from engine.errors import ConfigError
from engine.system.own_files import check_own_folder, open_own

FOLDER = "cores"


class CoreClaim(NamedTuple):
    """The cores that one daemon's workers use."""

    pid: int
    socket: str
    cpus: frozenset[int]


class CoreNote:
    """Note which cores this daemon's workers use, until it is closed or the process dies."""

    def __init__(self, socket: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._socket = socket
        self._environ = environ
        self._file: IO[bytes] | None = None

    def claim(self, cpus: Collection[int]) -> Iterator[str]:
        """Note the cores as used; yield a sentence on each daemon that uses some of them too."""
        yield from map(sharing_text, shared_cores(cpus, self._socket, self._environ))
        folder = paths.private_dir(self._environ) / FOLDER
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            check_own_folder(folder)
            self._file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115 until close()
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(msgspec.json.encode((os.getpid(), str(self._socket), sorted(cpus))))
            self._file.flush()
        except (OSError, ConfigError) as error:
            yield f"Other daemons cannot see which cores this one uses: {error}"

    def close(self) -> None:
        """Give the cores up."""
        if self._file is not None:
            self._file.close()


def shared_cores(
    cpus: Collection[int], socket: Path | None, environ: Mapping[str, str] = os.environ
) -> Iterator[CoreClaim]:
    """List the daemons on other sockets that use some of these cores, with those cores."""
    for claim in _claims(paths.private_dir(environ) / FOLDER):
        if claim.socket != str(socket) and (shared := claim.cpus & set(cpus)):
            yield claim._replace(cpus=shared)


def sharing_text(claim: CoreClaim) -> str:
    """Say which cores another daemon uses too, and what follows."""
    named = "Core" if len(claim.cpus) == 1 else "Cores"
    are = "is" if len(claim.cpus) == 1 else "are"
    cpus = cpu_names(tuple(claim.cpus)).removeprefix("cpu ")
    where = f"penstock at {claim.socket} (pid {claim.pid})"
    return f"{named} {cpus} {are} also used by {where}; both will be slower"


def _claims(folder: Path) -> Iterator[CoreClaim]:
    """Read the claims of living daemons, and delete stale ones."""
    with contextlib.suppress(OSError):
        check_own_folder(folder)
        for path in sorted(folder.iterdir()):
            with (
                contextlib.suppress(OSError, ValueError, TypeError),
                open(open_own(path, os.O_RDONLY), "rb") as file,
            ):
                text = file.read()
                if not _is_held(file.fileno()):
                    if text:  # else it was made just now, and is locked next
                        path.unlink()
                    continue
                pid, socket, cpus = msgspec.json.decode(text)
                yield CoreClaim(pid, socket, frozenset(cpus))


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
