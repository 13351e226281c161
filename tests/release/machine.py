"""Say what a machine lacks to build the packages and to run every test that a release needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tests import booted_machine
from tests.release.packages import MACHINES, compiler
from tests.worlds.browser import NAMES

NOT_SEEN = (Path("/tmp"), Path("/var/tmp"))
"""Folders that are a booted machine's own, so that it would not see the clone in them."""


def faults_of_machine(folder: Path) -> Iterator[str]:
    """Yield what is missing here for a release in a folder; the tests would say it, later."""
    for program in ("git", "gcc", "systemd-analyze", *map(compiler, MACHINES)):
        if shutil.which(program) is None:
            yield f"{program} is not installed"
    if not any(map(shutil.which, NAMES)):
        yield f"none of {', '.join(NAMES)} is installed"
    if any(folder.is_relative_to(each) for each in NOT_SEEN):
        yield f"{folder} is in a folder that a booted machine does not see"
    elif (why := booted_machine.why_not()) is not None:
        yield why
