"""Start Python so that no module of the current folder is imported.

People type commands where they stand: in a clone, or in a model's folder, which strangers filled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
"""The folder that Penstock itself is imported from."""


def python_command(*arguments: str) -> tuple[str, ...]:
    """Return the command line of this interpreter that leaves the current folder out."""
    return (sys.executable, "-P", *arguments)


def become_python(*arguments: str) -> NoReturn:
    """Run such a command line in place of this process."""
    os.execv(sys.executable, python_command(*arguments))


def start_over() -> NoReturn:
    """Run this process's own command line again; leave_folder_out() protects it by then."""
    os.execv(sys.executable, sys.orig_argv)


def leave_folder_out(
    environ: MutableMapping[str, str] = os.environ, path: list[str] = sys.path
) -> None:
    """Leave the current folder out of later imports here and of all imports of children.

    An entry of PYTHONPATH names it if it is relative, or empty, as one colon too many makes it. An
    entry stays if Penstock itself comes from there.
    """
    environ["PYTHONSAFEPATH"] = "1"
    if not environ.get("PYTHONPATH"):
        return
    entries = environ["PYTHONPATH"].split(os.pathsep)
    dropped = {os.path.abspath(each) for each in entries if not os.path.isabs(each)} - {ROOT}
    kept = [each for each in map(os.path.abspath, entries) if each not in dropped]
    environ["PYTHONPATH"] = os.pathsep.join(kept)
    path[:] = [each for each in path if each not in dropped]
