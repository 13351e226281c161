"""Describe what a model's attention needs of a backend.

Invariant: nothing is imported into this process; what was found holds for its life.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from engine.system.python_child import python_command

_IMPORT_LIMIT_S, _IMPORT_TOLD_S, _IMPORT_LOOK_S = 60.0, 5.0, 1.0

log = logging.getLogger("penstock")


def triton_fault(
    environment: Mapping[str, str] = os.environ, headers: Path | None = None
) -> str | None:
    """Why Triton cannot launch a kernel, None: it can; it compiles a launcher in C for each.

    Args:
        environment: names a compiler, or says where programs are.
        headers: folder of Python.h; None: that of this Python.
    """
    if find_spec("triton") is None:
        return "no triton"
    path = environment.get("PATH")
    if not environment.get("CC") and not any(
        shutil.which(cc, path=path) for cc in ("gcc", "clang")
    ):
        return "no C compiler for triton"
    headers = headers or Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").exists() else "no Python.h for triton"


def flash_attn_fault() -> str | None:
    """Why flash-attn 2 cannot be used; None: its function has been imported, in a child.

    The name alone says little: flash-attn 4 is found under it, too, and builds against another
    torch do not import.
    """
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return "no flash_attn"
    return import_fault("from flash_attn import flash_attn_varlen_func")


@cache
def import_fault(statement: str) -> str | None:
    """Return the last line of a Python's error on an import; None: it worked."""
    try:
        with subprocess.Popen(
            python_command("-c", statement),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as tried:
            said = _said(tried, statement).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not imported: {error}"
    if not tried.returncode:
        return None
    said = said or [f"exit code {tried.returncode}"]
    return f"not imported: {said[-1][:200]}"


def _said(tried: subprocess.Popen[str], statement: str) -> str:
    """Read a process's stderr until its end; raise TimeoutExpired."""
    waited_s = 0.0
    while True:
        try:
            return tried.communicate(timeout=_IMPORT_LOOK_S)[1]
        except subprocess.TimeoutExpired:  # a look shows the supervisor that this process runs
            waited_s += _IMPORT_LOOK_S
            if waited_s >= _IMPORT_LIMIT_S:
                tried.kill()
                raise subprocess.TimeoutExpired(statement, waited_s) from None
            if waited_s == _IMPORT_TOLD_S:
                log.info("waiting for `%s`, at most %g s", statement, _IMPORT_LIMIT_S)
