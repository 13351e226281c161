"""Where an SSD cache may be, and how large it may grow there.

Owns: the sizes when nobody says, and what of a disk stays free.
Invariant: what is asked for is granted only as far as the disk has it to spare.
Never: leaves anything in the folder, or makes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine.tiers.files import slab_bytes
from engine.tiers.slabs import RESERVE_BYTES
from engine.units import size_text

FREE_SHARE = 10
"""Without a size, this part of the free disk..."""
MAX_DEFAULT_BYTES = 20 << 30
"""...and at most this."""
ASKED_RESERVE_SHARE = 6
"""Where somebody has said a size, this part of the free disk stays free..."""
MIN_RESERVE_BYTES = 1 << 30
"""...and at least this, and no more than RESERVE_BYTES."""
HINT = "name another folder with --ssd-dir, or do without: --ssd-cache off"


@dataclass(frozen=True, slots=True)
class SsdAllowance:
    """How large the cache may grow."""

    cap_bytes: int
    reserve_bytes: int
    """Of the disk, that stays free."""
    asked_bytes: int | None = None
    """What was asked for, where the disk allows less."""

    @property
    def words(self) -> str:
        """Why it is less than was asked for; empty where it is not."""
        if self.asked_bytes is None:
            return ""
        return (
            f"asked for {size_text(self.asked_bytes)}, the disk allows {size_text(self.cap_bytes)}"
        )


def allowance(folder: Path, asked: int | str) -> SsdAllowance | str:
    """How large it may grow, or why there is none.

    Args:
        folder: of the cache, there or not.
        asked: a size in bytes, `auto` or `off`.

    Raises:
        OSError: the disk cannot be looked at.
    """
    if asked == "off":
        return "switched off by ssd_cache"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if (problem := _problem(folder, there)) is not None:
        return problem
    free_bytes = shutil.disk_usage(there).free + slab_bytes(folder)
    reserve_bytes, most_bytes = RESERVE_BYTES, min(free_bytes // FREE_SHARE, MAX_DEFAULT_BYTES)
    if isinstance(asked, int):
        share = max(free_bytes // ASKED_RESERVE_SHARE, MIN_RESERVE_BYTES)
        reserve_bytes, most_bytes = min(share, RESERVE_BYTES), asked
    cap_bytes = min(most_bytes, free_bytes - reserve_bytes)
    if cap_bytes <= 0:
        free, reserve = size_text(free_bytes), size_text(reserve_bytes)
        return f"{folder}: of its disk {free} are free, and {reserve} stay so"
    is_cut = isinstance(asked, int) and cap_bytes < asked
    return SsdAllowance(cap_bytes, reserve_bytes, most_bytes if is_cut else None)


def ssd_problem(folder: Path, asked: int | str) -> str | None:
    """What is to be said of settings before they are served; None: nothing."""
    if asked == "off":
        return None
    try:
        allowed = allowance(folder, asked)
    except OSError as error:
        allowed = f"{error.filename or folder}: {error.strerror}"
    if isinstance(allowed, str):
        return f"there would be no SSD cache: {allowed}; {HINT}"
    return f"SSD cache in {folder}: {allowed.words}" if allowed.words else None


def _problem(folder: Path, there: Path) -> str | None:
    """Why no file can be made where the folder is, or would be; None: one can."""
    about = str(folder) if there == folder else f"{folder}: {there}"
    if not there.is_dir():
        return f"{about} is not a folder"
    if there == folder and folder.stat().st_uid != os.geteuid():
        return f"{about} belongs to another user"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{about} takes no files: {error.strerror}"
    return None
