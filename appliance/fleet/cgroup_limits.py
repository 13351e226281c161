"""Read the processor and memory limits of the control groups.

Invariant: every group from ours to the top of the mount counts, in version 2 and in version 1,
also where a machine has both (hybrid): the tightest limit holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")
_UNLIMITED_V1 = 1 << 60
"""Version 1 says "no limit" with a number near 2**63."""


def cpu_quota(proc: Path = PROC) -> float | None:
    """Return the cores that the CPU quotas allow; None: no quota."""
    quotas = []
    for folder in _folders("", proc):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for folder in _folders("cpu", proc):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # -1 is no quota
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def num_throttled(proc: Path = PROC) -> int:
    """Count the periods in which a CPU quota was used up, since the groups exist."""
    counts = []
    for folder in (*_folders("", proc), *_folders("cpu", proc)):
        found = re.search(r"^nr_throttled (\d+)$", _read(folder / "cpu.stat"), re.M)
        counts.append(int(found[1]) if found else 0)
    return sum(counts)


def free_memory_bytes(proc: Path = PROC) -> int | None:
    """Return the memory left below the groups' limits; None: no limit.

    Cached file pages count as used in the groups but are freed first, so they count as free here.
    """
    free = []
    for folder in _folders("", proc):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            cached = _stat(folder, "inactive_file") + _stat(folder, "active_file")
            free.append(int(limit) - int(used) + cached)
    for folder in _folders("memory", proc):
        limit = _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED_V1:
            cached = _stat(folder, "total_inactive_file") + _stat(folder, "total_active_file")
            free.append(int(limit) - int(used) + cached)
    return max(min(free), 0) if free else None


def _folders(controller: str, proc: Path) -> Iterator[Path]:
    """List our group of a version 1 controller, or of version 2 (""), and its parents."""
    group = _group(controller, proc)
    for root, mount_point in _mounts(controller, proc):
        if group is None:
            return
        # In a container the mount may begin at our group or above it, and be named from there.
        below = group.removeprefix(root.rstrip("/")) if group.startswith(root) else group
        folder = mount_point / below.lstrip("/")
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(mount_point):
                break
            yield parent


def _group(controller: str, proc: Path) -> str | None:
    for line in _read(proc / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controller in controllers.split(","):
            return group
    return None


def _mounts(controller: str, proc: Path) -> Iterator[tuple[str, Path]]:
    """List root and mount point of each mount; a version 1 controller is a mount option."""
    for line in _read(proc / "mountinfo").splitlines():
        fields, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        wanted = "cgroup" if controller else "cgroup2"
        if kind == wanted and (not controller or controller in re.split("[ ,]", options)):
            root, mount_point = fields.split()[3:5]
            yield root, Path(mount_point)


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
