"""Name what facts depend on: processor, usable cores, and the kernels' build.

Owns: what is part of a machine's name, and what is not: its clock, its memory, its host name.
Invariant: the same machine has the same name at every start.
Never: measures.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_NAMED = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "CPU implementer",
    "CPU part",
)
_FLAGS = ("flags", "Features")


class Scope(NamedTuple):
    """What a set of facts holds for; empty parts do not matter to it."""

    machine: str
    build: str
    """Of the kernels."""
    model: str = ""
    dtype: str = ""
    placement: str = ""
    """The devices that it is served on."""


def machine_name(
    cpus: list[int], quota: float | None, cpuinfo: Path = Path("/proc/cpuinfo")
) -> str:
    """Name the processor, its features, and the usable part of it.

    Args:
        cpus: that this process may run on.
        quota: of the control group, in cores; None: no limit.
        cpuinfo: as the kernel tells.
    """
    try:
        first = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        first = ""
    fields = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", first, re.M))
    title = fields.get("model name") or fields.get("CPU part") or os.uname().machine
    numbers = "/".join(fields.get(name, "") for name in _NAMED)
    flags = " ".join(sorted(" ".join(fields.get(name, "") for name in _FLAGS).split()))
    cores = ",".join(map(str, cpus))
    about = "" if quota is None else f", quota {quota:g}"
    return f"{title} [{_digest(f'{numbers} {flags}')}], cpus {cores}{about}"


@cache
def kernels_build(level: str) -> str:
    """Name the build of a level's kernels; empty: it is not built."""
    files = sorted(Path(__file__).parent.parent.glob(f"kernels/_{level}.*.so"))
    return f"{level} {_digest(files[0].read_bytes())}" if files else ""


def _digest(what: str | bytes) -> str:
    data = what.encode() if isinstance(what, str) else what
    return hashlib.blake2b(data, digest_size=4).hexdigest()
