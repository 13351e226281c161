"""All devices of the machine, read together.

Owns: the newest reading.
Invariant: a device keeps its place and name from one reading to the next; None means not reported.
Never: needs a driver; is read so often that a counter's difference says nothing.
"""

from __future__ import annotations

from appliance.devices.gpu import GpuReader
from appliance.devices.nvml import Nvml, open_nvml
from appliance.devices.rapl import Package, find_packages
from appliance.frame.protocol import DeviceFrame

MIN_INTERVAL_NS = 200_000_000
"""Energy counters move every 20 to 100 ms; sooner than this the last reading is given again."""


class Devices:
    """CPU packages, then GPUs, each followed by its MIG instances."""

    def __init__(self, packages: list[Package], gpus: list[GpuReader]) -> None:
        self._packages = packages
        self._gpus = gpus
        self._frames: list[DeviceFrame] = []
        self.read_ns = -MIN_INTERVAL_NS
        """When the newest reading was; at first so long ago that the next may be at once."""

    @classmethod
    def of_machine(cls) -> Devices:
        """The devices of this machine: CPUs with RAPL, GPUs with NVML."""
        return cls(find_packages(), find_gpus(open_nvml()))

    def read(self, now_ns: int) -> list[DeviceFrame]:
        """One frame per device, also where it reports nothing."""
        if now_ns - self.read_ns >= MIN_INTERVAL_NS:
            self.read_ns = now_ns
            self._frames = [package.read(now_ns) for package in self._packages]
            by_gpu = [(gpu, gpu.read(now_ns)) for gpu in self._gpus]
            for gpu, frames in by_gpu:
                self._frames += gpu.add_activity(frames, now_ns)
        return self._frames


def find_gpus(nvml: Nvml | None) -> list[GpuReader]:
    """Every GPU that the driver counts, also one that it has lost; none without a driver."""
    if nvml is None:
        return []
    return [GpuReader(nvml, index) for index in range(nvml.ask("nvmlDeviceGetCount") or 0)]
