"""List the GPUs that a server could use.

Invariant: names equal the names in readings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from appliance.devices.nvml import MEMORY_V2, Nvml, open_nvml

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Holder(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    num_bytes: int | None
    """Its part of the GPU's memory; None: not reported."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that could serve."""

    name: str
    """The name in readings: `gpu0`."""
    model: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None: not reported."""
    obstacle: str | None = None
    """Why no process can compute on it; None: one can."""
    free_bytes: int | None = None
    cuda_index: int | None = None
    """CUDA's number for it among the visible ones; None: CUDA does not see it."""
    node: int | None = None
    """The nearest NUMA node; None: not reported."""
    holders: tuple[Holder, ...] = ()
    """The processes that hold its memory, the largest first; empty where none is reported."""

    @property
    def is_instance(self) -> bool:
        """True for an instance of a GPU divided by MIG."""
        return self.uuid.startswith("MIG-")

    @property
    def board(self) -> str:
        """The name of the whole GPU."""
        return self.name.partition("/")[0]


def list_gpus(
    nvml: Nvml | None = None, visible: str | None = os.environ.get("CUDA_VISIBLE_DEVICES")
) -> list[Gpu]:
    """List all GPUs that the driver counts, in its order; for a divided one its instances.

    Args:
        nvml: the driver's library; None: it is opened.
        visible: the value of CUDA_VISIBLE_DEVICES; None: everything.
    """
    nvml = nvml or open_nvml()
    gpus: list[Gpu] = []
    if nvml is None:
        return gpus
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle, name = nvml.ask("nvmlDeviceGetHandleByIndex", index), f"gpu{index}"
        gpu = None if handle is None else _listed(nvml, name, handle)
        if gpu is None:
            silent = f"it does not answer: sudo nvidia-modprobe -c {index}, or see dmesg for XIDs"
            gpus.append(Gpu(name, "unknown", "", 0, obstacle=silent))
            continue
        mode = nvml.ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            gpus.append(gpu)
            continue
        instances = list(_instances(nvml, gpu, handle))
        about = "MIG is on but has no instance: nvidia-smi mig -cgi 0 -C"
        gpus += instances or [replace(gpu, obstacle=about)]
    seen = _seen(gpus, visible)
    about = f"{_VISIBLE} hides it"
    return [
        replace(gpu, cuda_index=seen.index(gpu.uuid))
        if gpu.uuid in seen and gpu.obstacle is None
        else replace(gpu, obstacle=gpu.obstacle or about)
        for gpu in gpus
    ]


def _listed(nvml: Nvml, name: str, handle: Any) -> Gpu | None:
    model, uuid = nvml.ask("nvmlDeviceGetName", handle), nvml.ask("nvmlDeviceGetUUID", handle)
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
    if model is None or uuid is None or memory is None:
        return None
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    known = None if capability is None else (capability[0], capability[1])
    free_bytes = getattr(memory, "free", None)
    node, holders = nvml.node(handle), _holders(nvml, handle)
    return Gpu(
        name,
        model,
        uuid,
        memory.total,
        known,
        free_bytes=free_bytes,
        node=node,
        holders=holders,
    )


def _holders(nvml: Nvml, handle: Any) -> tuple[Holder, ...]:
    running = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
    found = [Holder(each.pid, getattr(each, "usedGpuMemory", None)) for each in running]
    return tuple(sorted(found, key=lambda holder: -(holder.num_bytes or 0)))


def _instances(nvml: Nvml, gpu: Gpu, handle: Any) -> Iterator[Gpu]:
    """Yield the instances of a divided GPU."""
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        found = None if part is None else _listed(nvml, f"{gpu.name}/mig{index}", part)
        if found is not None:
            yield replace(found, capability=gpu.capability, node=gpu.node)


def _seen(gpus: list[Gpu], visible: str | None) -> list[str]:
    """List the UUIDs that CUDA sees, in its order: up to the first unknown name."""
    if visible is None:
        return [gpu.uuid for gpu in gpus if gpu.obstacle is None]
    seen: list[str] = []
    for name in visible.split(","):
        name = name.strip()
        matching = [
            gpu.uuid
            for gpu in gpus
            if (gpu.name == f"gpu{name}" if name.isdigit() else name and gpu.uuid.startswith(name))
        ]
        if len(matching) != 1:
            break
        seen += matching
    return seen
