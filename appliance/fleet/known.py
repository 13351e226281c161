"""Read what the profile knows of this machine and of a model served here.

Owns: the scopes by which facts are found again.
Invariant: what is written goes to the scope that it was read from.
Never: measures or decides.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.fleet.cgroup_limits import cpu_quota
from appliance.fleet.placement import WorkerPlan
from appliance.profile_store import ProfileStore
from engine.checkpoint.checkpoint import Checkpoint
from engine.kernels.cpu import load_kernels
from engine.profile.facts import Profile
from engine.profile.machine import Scope, kernels_build, machine_name


@dataclass(frozen=True, slots=True)
class Known:
    """The facts of one scope, and their store."""

    store: ProfileStore
    scope: Scope
    profile: Profile

    @classmethod
    def of(cls, state_dir: Path, scope: Scope) -> Known:
        store = ProfileStore(state_dir)
        return cls(store, scope, store.load(scope))

    def save(self) -> None:
        """Write the facts that changed since the last call; blocking.

        Raises:
            ProfileUnusable: it cannot be written.
        """
        if changed := self.profile.take_changed():
            self.store.save(self.scope, changed)


def machine_scope() -> Scope:
    """Return the scope of facts that depend on this machine alone."""
    try:
        build = kernels_build(load_kernels()[1])
    except ImportError:
        build = ""
    return Scope(machine_name(sorted(os.sched_getaffinity(0)), cpu_quota()), build)


def model_scope(machine: Scope, checkpoint: Checkpoint, dtype: str, devices: str) -> Scope:
    """Return the scope of facts about a model served on some devices."""
    shapes = [(name, t.shape, t.dtype) for name, t in sorted(checkpoint.tensors.items())]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).hexdigest()
    name = f"{checkpoint.folder.name} [{digest}]"
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
