"""Check the installed packages: are they there, of use here, and apart from others."""

from __future__ import annotations

import re
from importlib import metadata

from appliance.doctor.finding import Finding
from engine.units import size_text

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_OF_CUDA = re.compile(r"(nvidia|cuda)[-_](?!ml[-_])|triton$", re.I)
_MIN_BYTES = 1 << 30
_OURS = ("appliance", "engine", "migrations", "tui")
"""Folders of a wheel, beside which other packages have their own."""


def packages(*, has_gpus: bool) -> Finding:
    """Name the versions; or folders of ours that others install, or CUDA's size without a GPU."""
    try:
        versions = [f"{name} {metadata.version(name)}" for name in ("penstock", "torch")]
    except metadata.PackageNotFoundError as error:
        hint = "install it: pip install -e ."
        return Finding("packages", "bad", f"{error.name} is not installed", hint)
    about = ", ".join(versions)
    if others := sharing():
        about += f"; {', '.join(others)} installs files in folders of ours"
        hint = "give it an environment of its own: docs/install.md"
        return Finding("packages", "note", about, hint)
    if not has_gpus and (unused := cuda_bytes()) >= _MIN_BYTES:
        about += f"; no GPU is found, and CUDA's libraries take {size_text(unused)}"
        hint = f"to save that, install into a new environment with --extra-index-url {CPU_INDEX}"
        return Finding("packages", "note", about, hint)
    return Finding("packages", "ok", about)


def sharing() -> list[str]:
    """List the packages with a folder named as one of ours; pip would let them overwrite files."""
    owners = metadata.packages_distributions()
    return sorted({each for name in _OURS for each in owners.get(name, ())} - {"penstock"})


def cuda_bytes() -> int:
    """Add up the files of the packages that torch needs for CUDA alone, as they were installed."""
    found = [each for each in metadata.distributions() if _OF_CUDA.match(each.name or "")]
    return sum(file.size or 0 for each in found for file in each.files or ())
