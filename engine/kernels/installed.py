"""What libraries for a GPU lack on this machine, found before a worker dies of it.

Owns: the tries.
Invariant: nothing is imported into this process; what was found holds for its life.
Never: installs anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_IMPORT_LIMIT_S = 60.0


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
    """The last line of what a Python says to an import; None: nothing."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", statement],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_IMPORT_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not imported: {error}"
    if not tried.returncode:
        return None
    said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return f"not imported: {said[-1][:200]}"
