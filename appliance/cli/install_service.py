"""Define install-service: plan, check and make the installation of the systemd service.

Invariant: all checks come before the first write; unchanged files are left alone; drop-ins and
settings are the operator's.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from appliance.cli import terminal
from appliance.configuration.paths import GPU_UNIT_NAME, SOCKET_UNIT_NAME, UNIT_NAME
from engine.errors import ConfigError, FileError, PenstockError
from engine.printable import printable
from engine.system.own_files import check_own_path

SOURCES = Path(str(files("appliance"))) / "systemd"
PLACES = {
    UNIT_NAME: "/etc/systemd/system/penstock.service",
    SOCKET_UNIT_NAME: "/etc/systemd/system/penstock.socket",
    GPU_UNIT_NAME: "/etc/systemd/system/penstock-gpu.service",
    "penstock.sysusers.conf": "/etc/sysusers.d/penstock.conf",
    "penstock.tmpfiles.conf": "/etc/tmpfiles.d/penstock.conf",
}
_PROGRAM = "@PENSTOCK@"
"""The placeholder in the unit for the path of our command."""
_TOOLS = ("systemctl", "systemd-sysusers", "systemd-tmpfiles")


class Step(NamedTuple):
    """One step: a file to write, or a command to run."""

    about: str
    path: Path | None = None
    text: str = ""
    command: tuple[str, ...] = ()


_RESTART = ("systemctl", "kill", "--kill-who=main", "--signal=USR2", UNIT_NAME)
RESTART = Step("hand over to the next daemon", command=_RESTART)


def install_steps(program: Path | None = None) -> Iterator[Step]:
    """Yield the steps of an installation here, in order, without up-to-date files.

    Args:
        program: the `penstock` command for the unit; None: this Python's.
    """
    program = program or own_program()
    is_update = Path(PLACES[UNIT_NAME]).exists()
    for name, place in PLACES.items():
        text, path = (SOURCES / name).read_text().replace(_PROGRAM, str(program)), Path(place)
        if not path.exists() or path.read_text() != text:
            yield Step(f"write {path}", path, text)
    commands = (
        ("systemd-sysusers", PLACES["penstock.sysusers.conf"]),
        ("systemd-tmpfiles", "--create", PLACES["penstock.tmpfiles.conf"]),
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", "--now", SOCKET_UNIT_NAME, UNIT_NAME),
    )
    for command in commands:
        yield Step(f"run {' '.join(command)}", command=command)
    if is_update:  # clients wait at the socket meanwhile
        restart = (str(program), "restart")
        yield Step(f"run {' '.join(restart)}", command=restart)


def own_program() -> Path:
    """Return the `penstock` command beside this Python."""
    return Path(sys.executable).parent / "penstock"


def check_program(program: Path) -> None:
    """Refuse a program that cannot run as a service.

    Raises:
        PenstockError: systemd does not run here, or we may not change the machine.
        ConfigError: the service's user could not run the program, or others can change it.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or not Path("/run/systemd/system").exists():
        raise PenstockError(
            "systemd is not running on this machine",
            where=", ".join(missing),
            hint="start `penstock serve` from your init system",
        )
    if os.geteuid() != 0:
        raise PenstockError("this takes root", hint="sudo penstock install-service")
    check_reach(program)
    check_owner(program)


def check_reach(program: Path) -> None:
    """Refuse a program, or a Python behind it, that other users cannot run.

    Raises:
        ConfigError: naming the folder or file that denies access.
    """
    if not program.exists():
        raise ConfigError(
            "the command does not exist",
            where=str(program),
            hint="install Penstock into an environment of its own: python3 -m venv /opt/penstock",
        )
    for path in (program, Path(sys.prefix), Path(sys.executable), Path(sys.base_prefix)):
        real = path.resolve()
        for each in reversed((real, *real.parents)):
            if not each.stat().st_mode & stat.S_IXOTH:
                raise ConfigError(
                    f"the service's user cannot enter it, and {path} leads through it",
                    where=str(each),
                    hint="make the environment under /opt, with a Python that every user may run",
                )


def check_owner(program: Path) -> None:
    """Refuse a program, or code behind it, that another user than root can change.

    Root runs it, too, and the service reads all prompts.

    Raises:
        ConfigError: naming the folder or file.
    """
    for path in (program, Path(sys.prefix), Path(sys.executable), Path(sys.base_prefix), SOURCES):
        try:
            check_own_path(path, uid=0)
        except OSError as error:
            raise ConfigError(
                str(error.strerror),
                where=str(path),
                hint="install it as root: chown -R root: FOLDER; chmod -R go-w FOLDER",
            ) from error


def do_step(step: Step) -> None:
    """Do one step.

    Raises:
        PenstockError: it failed; the earlier steps stay done, and may be repeated.
    """
    try:
        if step.path is not None:
            step.path.parent.mkdir(parents=True, exist_ok=True)
            step.path.write_text(step.text)
            step.path.chmod(0o644)
        else:
            subprocess.run(step.command, check=True)
    except OSError as error:
        hint = "it needs root; --dry-run prints every step"
        raise FileError(f"cannot {step.about}", error, where="", hint=hint) from error
    except subprocess.CalledProcessError as error:
        raise PenstockError(
            f"`{' '.join(step.command)}` failed with {error.returncode}",
            hint="if the daemon did not start, journalctl -u penstock says why",
        ) from error


def install_service(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the steps and the files.")
    ] = False,
) -> None:
    """Install or update the daemon's systemd units and start them (needs root).

    The unit runs the command of this environment. After an upgrade, run it again: it restarts the
    daemon, and clients that connect meanwhile wait.
    """
    program = own_program()
    if not dry_run:
        check_program(program)
    for step in install_steps(program):
        terminal.write(f"{printable(step.about)}\n")
        if not dry_run:
            do_step(step)
        elif step.text:
            terminal.write("".join(f"    {line}\n" for line in step.text.splitlines()))
    if dry_run:
        check_reach(program)  # after the plan, so that it is printed even if this fails
        check_owner(program)
    else:
        terminal.write("serving; penstock status, journalctl -fu penstock\n")
