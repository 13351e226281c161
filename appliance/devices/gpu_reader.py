"""Read a GPU and its MIG instances as frames.

Invariant: the frame keeps its name from the first reading to the last, whatever the GPU supports,
also after it has fallen off the bus; an instance has memory and activity of its own, while power,
clocks and energy are the GPU's.
Invariant: the first sample shows nothing, and a too long window starts again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.devices import nvml as api
from appliance.devices.counters import Counter, EnergyMeter, EnergyReading
from appliance.devices.nvml import Field, Nvml
from appliance.observe.frame.protocol import DeviceFrame

MAX_WINDOW_NS = 10_000_000_000
_MIB = 1 << 20
_METRICS = {
    "sm_ratio": (2, 0.01),
    "tensor_ratio": (5, 0.01),
    "memory_bandwidth_ratio": (10, 0.01),
    "pcie_tx_bytes_per_s": (20, _MIB),
    "pcie_rx_bytes_per_s": (21, _MIB),
    "nvlink_rx_bytes_per_s": (60, _MIB),
    "nvlink_tx_bytes_per_s": (61, _MIB),
}
"""The metric's id and its unit in ours, by field of DeviceFrame."""

Activity = dict[str, float | None]


class Gpm:
    """Measure the activity of one device, or of one MIG instance.

    Args:
        device: the GPU, also for an instance.
        instance_id: of the GPU instance; None for the whole GPU.
    """

    def __init__(self, nvml: Nvml, device: Any, instance_id: int | None = None) -> None:
        self._nvml = nvml
        self._device = device
        self._instance_id = instance_id
        self._samples = [nvml.ask("nvmlGpmSampleAlloc") for _ in range(2)]
        self._taken_ns: int | None = None
        """The time of the newest sample."""

    def read(self, now_ns: int) -> Activity:
        """Return the metrics since the last call, as fields of DeviceFrame; empty: none."""
        before, spare = self._samples
        if spare is None or not self._nvml.gpm_sample(self._device, self._instance_id, spare):
            self._taken_ns = None
            return {}
        taken_ns, self._taken_ns = self._taken_ns, now_ns
        self._samples = [spare, before]
        if taken_ns is None or now_ns - taken_ns > MAX_WINDOW_NS:
            return {}
        ids = [metric_id for metric_id, _ in _METRICS.values()]
        values = self._nvml.gpm_metrics(before, spare, ids)
        return {
            name: None if value is None else value * unit
            for (name, (_, unit)), value in zip(_METRICS.items(), values, strict=True)
        }

    def close(self) -> None:
        """Free the samples."""
        for sample in self._samples:
            if sample is not None:
                self._nvml.ask("nvmlGpmSampleFree", sample)
        self._samples = [None, None]


LOOK_INTERVAL_NS = 10_000_000_000
"""Interval of reading slow values: limits, MIG instances, a lost GPU."""
_KIB = 1024
_TRAFFIC = (
    ("pcie_tx_bytes_per_s", api.FIELD_PCIE_TX_BYTES, 1),
    ("pcie_rx_bytes_per_s", api.FIELD_PCIE_RX_BYTES, 1),
    ("nvlink_tx_bytes_per_s", (api.FIELD_NVLINK_TX_KIB, api.ALL_LINKS), _KIB),
    ("nvlink_rx_bytes_per_s", (api.FIELD_NVLINK_RX_KIB, api.ALL_LINKS), _KIB),
)
"""The field of DeviceFrame, NVML's counter, its unit in bytes."""
_THROTTLE_REASONS = (
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x20, "thermal limit of the driver"),
    (0x40, "thermal limit of the hardware"),
    (0x80, "power brake"),
)
"""Bits that mean a slowdown; idling and locked clocks are not among them."""


class _Instance:
    """A MIG instance: memory of its own, and activity where the GPU measures it."""

    def __init__(
        self, nvml: Nvml, gpu: GpuReader, handle: Any, name: str, instance_id: int
    ) -> None:
        self.name = name
        self.handle = handle
        self.gpm = Gpm(nvml, gpu.handle, instance_id) if gpu.has_gpm else None
        self._nvml = nvml
        self._gpu = gpu
        self._model = nvml.ask("nvmlDeviceGetName", handle)
        self._uuid = nvml.ask("nvmlDeviceGetUUID", handle)

    def frame(self) -> DeviceFrame:
        return DeviceFrame(
            name=self.name,
            kind="gpu",
            parent=self._gpu.name,
            model=self._model,
            uuid=self._uuid,
            **_memory(self._nvml, self.handle),
        )


class GpuReader:
    """One GPU, by its index in the driver's order."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self.name = f"gpu{index}"
        self.handle: Any = None
        self.has_gpm = False
        self._nvml = nvml
        self._index = index
        self._looked_ns: int | None = None
        self._model: str | None = None
        self._uuid: str | None = None
        self._limit_w: float | None = None
        self._events: Any = None
        self._last_xid: int | None = None
        self._gpm: Gpm | None = None
        self._instances: dict[tuple[str, str | None, int], _Instance] = {}
        self._meter = EnergyMeter()
        self._has_counter = False
        self._traffic = {name: Counter() for name, _, _ in _TRAFFIC}

    def read(self, now_ns: int) -> list[DeviceFrame]:
        """Read its frame and its instances' frames, without activity."""
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_INTERVAL_NS:
            self._looked_ns = now_ns
            self._look()
        return [self._frame(now_ns), *(each.frame() for each in self._instances.values())]

    def add_activity(self, frames: list[DeviceFrame], now_ns: int) -> list[DeviceFrame]:
        """Add GPM's metrics to the frames of read().

        It is a separate step because GPM calls have been seen to spoil the memory that the next
        calls report: all GPUs are read before the first of these.
        """
        gpms = [self._gpm, *(each.gpm for each in self._instances.values())]
        return [
            frame if gpm is None else msgspec.structs.replace(frame, **gpm.read(now_ns))
            for frame, gpm in zip(frames, gpms, strict=True)
        ]

    def _look(self) -> None:
        """Read the values that seldom change."""
        nvml = self._nvml
        if self.handle is None:
            self.handle = nvml.ask("nvmlDeviceGetHandleByIndex", self._index)
            if self.handle is None:
                return
            self._model = nvml.ask("nvmlDeviceGetName", self.handle)
            self._uuid = nvml.ask("nvmlDeviceGetUUID", self.handle)
            self._events = nvml.xid_events(self.handle)
            self.has_gpm = nvml.has_gpm(self.handle)
        limit_mw = nvml.ask("nvmlDeviceGetEnforcedPowerLimit", self.handle)
        self._limit_w = None if limit_mw is None else limit_mw / 1000
        mig_mode = nvml.ask("nvmlDeviceGetMigMode", self.handle)
        if mig_mode is not None:  # else it knows no MIG, or cannot be asked now
            self._find_instances(is_divided=bool(mig_mode[0]))
        if self.has_gpm and not self._instances and self._gpm is None:
            self._gpm = Gpm(nvml, self.handle)
        elif self._instances and self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _find_instances(self, *, is_divided: bool) -> None:
        """Find the instances; known ones keep their windows."""
        nvml, known, self._instances = self._nvml, self._instances, {}
        count = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", self.handle) if is_divided else 0
        for index in range(count or 0):
            handle = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, index)
            if handle is None:  # numbers have holes
                continue
            name = f"{self.name}/mig{index}"
            instance_id = nvml.ask("nvmlDeviceGetGpuInstanceId", handle) or 0
            key = (name, nvml.ask("nvmlDeviceGetUUID", handle), instance_id)
            instance = known.pop(key, None) or _Instance(nvml, self, handle, name, instance_id)
            instance.handle = handle
            self._instances[key] = instance
        for gone in known.values():
            if gone.gpm is not None:
                gone.gpm.close()

    def _frame(self, now_ns: int) -> DeviceFrame:
        if self.handle is None:
            return DeviceFrame(name=self.name, kind="gpu")
        nvml, handle = self._nvml, self.handle
        wanted = [] if self.has_gpm else [field for _, field, _ in _TRAFFIC]
        instant, *traffic = nvml.fields(handle, [api.FIELD_POWER_INSTANT, *wanted])
        instant_w = None if instant is None else instant.value / 1000
        energy = self._energy(now_ns, instant_w)
        if self._events is not None:
            self._last_xid = nvml.newest_xid(self._events) or self._last_xid
        utilization = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
        return DeviceFrame(
            name=self.name,
            kind="gpu",
            model=self._model,
            uuid=self._uuid,
            energy_j=energy.energy_j,
            power_w=energy.power_w,
            power_source=self._power_source(energy),
            power_instant_w=instant_w,
            power_limit_w=self._limit_w,
            temperature_c=nvml.ask("nvmlDeviceGetTemperature", handle, api.TEMPERATURE_GPU),
            clock_mhz=nvml.ask("nvmlDeviceGetClockInfo", handle, api.CLOCK_SM),
            memory_clock_mhz=nvml.ask("nvmlDeviceGetClockInfo", handle, api.CLOCK_MEMORY),
            throttle_reasons=_throttle_reasons(nvml, handle),
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            last_xid=self._last_xid,
            **_memory(nvml, handle),
            **self._traffic_rates(now_ns, traffic),
        )

    def _energy(self, now_ns: int, instant_w: float | None) -> EnergyReading:
        """Read the energy counter if it ever worked: a second method would count twice."""
        energy_mj = self._nvml.ask("nvmlDeviceGetTotalEnergyConsumption", self.handle)
        self._has_counter |= energy_mj is not None
        if self._has_counter:
            return self._meter.count(now_ns, energy_mj, unit_j=1e-3)
        return self._meter.integrate(now_ns, instant_w)

    def _power_source(self, energy: EnergyReading) -> str | None:
        if energy.energy_j is None:
            return None
        return "energy counter" if self._has_counter else "instant field"

    def _traffic_rates(self, now_ns: int, found: list[Field | None]) -> dict[str, Any]:
        """Return bytes per second; a 32-bit counter is right up to 4 GiB between readings."""
        rates = {}
        for (name, _, unit), field in zip(_TRAFFIC, found, strict=False):
            if field is not None:
                size = 1 << field.bits if field.bits <= 32 else None
                growth = self._traffic[name].growth(now_ns, field.value, size)
                rates[name] = None if growth is None else growth.per_s * unit
        return rates


def _memory(nvml: Nvml, handle: Any) -> dict[str, Any]:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, api.MEMORY_V2)
    if memory is None:
        return {}
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _throttle_reasons(nvml: Nvml, handle: Any) -> list[str] | None:
    bits = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    return None if bits is None else [word for bit, word in _THROTTLE_REASONS if bits & bit]
