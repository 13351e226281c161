"""Name what facts depend on: processor, usable cores, the kernels' build, model and devices.

Invariant: the same machine has the same name at every start, whatever its clock, memory and host.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from appliance.fleet.cgroup_limits import cpu_quota
from appliance.fleet.own_cpus import OWN_CPUS
from appliance.fleet.placement import WorkerPlan
from engine.checkpoint.checkpoint import Checkpoint
from engine.kernels import cpu
from engine.profile.facts import Scope

_CPU = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
_FLAGS = ("flags", "Features")


def machine_scope() -> Scope:
    """Return the scope of facts that depend on this machine alone."""
    try:
        build = _kernels_build(cpu.load_kernels()[1])
    except ImportError:
        build = ""
    return Scope(machine_name(sorted(OWN_CPUS.usable()), cpu_quota()), build)


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
    numbers = "/".join(fields.get(name, "") for name in _CPU)
    flags = " ".join(sorted(" ".join(fields.get(name, "") for name in _FLAGS).split()))
    about = "" if quota is None else f", quota {quota:g}"
    return f"{title} [{_digest(f'{numbers} {flags}')}], cpus {','.join(map(str, cpus))}{about}"


@cache
def _kernels_build(level: str) -> str:
    """Name the build of a level's kernels; empty: it is not built."""
    files = sorted(Path(cpu.__file__).parent.glob(f"_{level}.*.so"))
    return f"{level} {_digest(files[0].read_bytes())}" if files else ""


def model_scope(machine: Scope, checkpoint: Checkpoint, dtype: str, devices: str) -> Scope:
    """Return the scope of facts about a model served on some devices."""
    shapes = [(name, t.shape, t.dtype) for name, t in sorted(checkpoint.tensors.items())]
    name = f"{checkpoint.folder.name} [{_digest(repr(shapes))}]"
    return machine._replace(model=name, dtype=dtype, placement=devices)


def devices_name(workers: Iterable[WorkerPlan], driver: str | None = None) -> str:
    """Name the devices of a placement; GPUs by their UUIDs."""
    workers = list(workers)
    gpus = [worker.gpu for worker in workers if worker.gpu is not None]
    if gpus:
        return gpus_name([gpu.uuid for gpu in gpus], driver)
    return "; ".join(f"{worker.name} {worker.device}" for worker in workers)


def gpus_name(uuids: Iterable[str], driver: str | None) -> str:
    return ", ".join([*sorted(set(uuids)), *([f"driver {driver}"] if driver else [])])


def _digest(what: str | bytes) -> str:
    data = what.encode() if isinstance(what, str) else what
    return hashlib.blake2b(data, digest_size=4).hexdigest()
