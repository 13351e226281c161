"""Read all of the machine's devices together: GPUs, MIG instances, CPU energy.

Invariant: a device keeps its index and name from one reading to the next; None means not reported.
"""

from __future__ import annotations

from pathlib import Path

from appliance.devices.counters import EnergyMeter
from appliance.devices.gpu_reader import GpuReader
from appliance.devices.nvml import Nvml, open_nvml
from appliance.observe.frame.protocol import DeviceFrame

ROOT = Path("/sys/class/powercap")


class Package:
    """A CPU package with a RAPL energy counter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = _text(folder / "name") or folder.name
        self._size_uj = _number(folder / "max_energy_range_uj")
        self._meter = EnergyMeter()

    def read(self, now_ns: int) -> DeviceFrame:
        """Read its counter, as a device of a frame."""
        energy_uj = _number(self._folder / "energy_uj")
        energy = self._meter.count(now_ns, energy_uj, unit_j=1e-6, size=self._size_uj)
        limit_uw = _number(self._folder / "constraint_0_power_limit_uw")
        return DeviceFrame(
            name=self.name,
            kind="cpu",
            energy_j=energy.energy_j,
            power_w=energy.power_w,
            power_source=None if energy.energy_j is None else "rapl",
            power_limit_w=None if limit_uw is None else limit_uw / 1e6,
        )


def find_packages(root: Path = ROOT) -> list[Package]:
    """List every package that the kernel knows, in its order."""
    zones = (path for path in sorted(root.glob("intel-rapl:[0-9]*")) if path.name.count(":") == 1)
    return [package for package in map(Package, zones) if package.name != "psys"]


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.isdecimal() else None


MIN_INTERVAL_NS = 200_000_000
"""Minimum interval of readings; energy counters move every 20 to 100 ms."""


class Devices:
    """Read CPU packages, then GPUs, each followed by its MIG instances."""

    def __init__(self, packages: list[Package], gpus: list[GpuReader]) -> None:
        self._packages = packages
        self._gpus = gpus
        self._frames: list[DeviceFrame] = []
        self.read_ns = -MIN_INTERVAL_NS
        """The time of the newest reading; at first early enough for an immediate one."""

    @classmethod
    def of_machine(cls) -> Devices:
        """Find the devices of this machine: CPUs with RAPL, GPUs with NVML."""
        return cls(find_packages(), find_gpus(open_nvml()))

    @property
    def num_gpus(self) -> int:
        return len(self._gpus)

    def read(self, now_ns: int) -> list[DeviceFrame]:
        """Return one frame per device, even where it reports nothing."""
        if now_ns - self.read_ns >= MIN_INTERVAL_NS:
            self.read_ns = now_ns
            self._frames = [package.read(now_ns) for package in self._packages]
            by_gpu = [(gpu, gpu.read(now_ns)) for gpu in self._gpus]
            for gpu, frames in by_gpu:
                self._frames += gpu.add_activity(frames, now_ns)
        return self._frames


def find_gpus(nvml: Nvml | None) -> list[GpuReader]:
    """List every GPU that the driver counts, even a lost one; none without a driver."""
    if nvml is None:
        return []
    return [GpuReader(nvml, index) for index in range(nvml.ask("nvmlDeviceGetCount") or 0)]
