"""Power, clocks and temperature: RAPL for CPU packages, NVML for GPUs. The only door to pynvml.

Owns: the open NVML handle and the last energy readings.
Called by: frames, once a second.
Invariant: None means not reported; power is the energy counter's difference over the interval.
Never: changes a clock, a limit or a mode; needs a driver.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.protocol import DeviceFrame

RAPL_ROOT = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that could serve."""

    name: str
    """As its readings have it: `gpu0`."""
    model: str
    uuid: str
    memory_bytes: int


def list_gpus(nvml: Any | None = None) -> list[Gpu]:
    """All that answer, in NVML's order; none without a driver."""
    nvml = nvml if nvml is not None else _open_nvml()
    gpus: list[Gpu] = []
    if nvml is None:
        return gpus
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            model, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            continue
        gpus.append(Gpu(f"gpu{index}", model, uuid, memory.total))
    return gpus


class Devices:
    """Reads every power domain of the machine."""

    def __init__(self, rapl_root: Path = RAPL_ROOT, nvml: Any | None = None) -> None:
        self._rapl = sorted(rapl_root.glob("intel-rapl:[0-9]*"))
        self._rapl = [path for path in self._rapl if path.name.count(":") == 1]
        self._last: dict[str, tuple[int, int]] = {}
        self._nvml = nvml if nvml is not None else _open_nvml()

    @property
    def reads_cpu_energy(self) -> bool:
        """True if a CPU package has a counter that this process may read."""
        return any(os.access(path / "energy_uj", os.R_OK) for path in self._rapl)

    def read(self) -> list[DeviceFrame]:
        """One frame per domain that exists, also where it reports no power."""
        return [self._read_rapl(path) for path in self._rapl] + self._read_gpus()

    def _read_rapl(self, path: Path) -> DeviceFrame:
        """Source: energy_uj of the powercap tree; readable by root on most machines."""
        try:
            name = (path / "name").read_text().strip()
            energy_uj = int((path / "energy_uj").read_text())
            limit_uj = int((path / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return DeviceFrame(name=path.name, kind="cpu")
        return DeviceFrame(name=name, kind="cpu", power_w=self._power_w(name, energy_uj, limit_uj))

    def _power_w(self, name: str, energy_uj: int, wrap_uj: int | None) -> float | None:
        now_ns = time.monotonic_ns()
        last = self._last.get(name)
        self._last[name] = (now_ns, energy_uj)
        if last is None or now_ns == last[0]:
            return None
        used_uj = energy_uj - last[1]
        if used_uj < 0:
            if wrap_uj is None:
                return None
            used_uj += wrap_uj
        return used_uj * 1e3 / (now_ns - last[0])

    def _read_gpus(self) -> list[DeviceFrame]:
        nvml = self._nvml
        if nvml is None:
            return []
        frames = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)

            def ask(function: str, *args: Any, handle: Any = handle) -> Any:
                try:
                    return getattr(nvml, function)(handle, *args)
                except nvml.NVMLError:
                    return None

            energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption")
            limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit")
            utilization = ask("nvmlDeviceGetUtilizationRates")
            memory = ask("nvmlDeviceGetMemoryInfo")
            name = f"gpu{index}"
            frames.append(
                DeviceFrame(
                    name=name,
                    kind="gpu",
                    power_w=(
                        None if energy_mj is None else self._power_w(name, energy_mj * 1000, None)
                    ),
                    power_limit_w=None if limit_mw is None else limit_mw / 1000,
                    temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                    clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                    utilization_ratio=None if utilization is None else utilization.gpu / 100,
                    memory_used_bytes=None if memory is None else memory.used,
                    memory_total_bytes=None if memory is None else memory.total,
                )
            )
        return frames


def _open_nvml() -> Any | None:
    """The initialised pynvml module; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
