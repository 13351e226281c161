"""The verb that makes the daemon a service of this machine: install-service.

Owns: how its steps are shown.
Invariant: one line on stdout for each step; --dry-run shows the same steps and does none.
Never: knows what a unit says.
"""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.text import printable


def install_service(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done, files in full.")
    ] = False,
) -> None:
    """Install and start the systemd units of the daemon, or bring them up to date; takes root.

    The unit starts the command of this environment. Done again after an upgrade it restarts the
    daemon; clients that connect meanwhile wait.
    """
    from appliance import install_service as installing

    program = installing.own_program()
    if not dry_run:
        installing.check(program)
    for step in installing.steps(program):
        terminal.write(f"{printable(step.about)}\n")
        if not dry_run:
            installing.do(step)
        elif step.text:
            terminal.write("".join(f"    {line}\n" for line in step.text.splitlines()))
    if dry_run:
        installing.check_reach(program)
    else:
        terminal.write("serving; penstock status, journalctl -fu penstock\n")
