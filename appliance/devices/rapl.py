"""CPU packages: their energy counters in the powercap tree.

Owns: which packages there are, and the last reading of each.
Invariant: a package's frame is there also where its counter may not be read, as it may only by root
on most machines.
Never: writes to the tree; counts anything twice: parts of a package, and `psys`, which is the whole
machine, are left out.
"""

from __future__ import annotations

from pathlib import Path

from appliance.devices.counter_gains import EnergyMeter
from appliance.frame.protocol import DeviceFrame

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
    """Every package that the kernel knows, in its order."""
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
