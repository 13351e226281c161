"""Which GPUs there are, for those who choose where to serve.

Owns: nothing. Called by: boot, gpu_placement, doctor.
Invariant: names are those of the readings.
Never: keeps a handle of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.devices.nvml import MEMORY_V2, Nvml, open_nvml


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that could serve."""

    name: str
    """As its readings have it: `gpu0`."""
    model: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    """CUDA's version of what its processors can do; None: the driver does not say."""


def list_gpus(nvml: Nvml | None = None) -> list[Gpu]:
    """All that answer, in the driver's order; none without a driver."""
    nvml = nvml or open_nvml()
    gpus: list[Gpu] = []
    if nvml is None:
        return gpus
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            continue
        model, uuid = nvml.ask("nvmlDeviceGetName", handle), nvml.ask("nvmlDeviceGetUUID", handle)
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
        if model is not None and uuid is not None and memory is not None:
            capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
            known = None if capability is None else (capability[0], capability[1])
            gpus.append(Gpu(f"gpu{index}", model, uuid, memory.total, known))
    return gpus
