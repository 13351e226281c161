# ruff: noqa: N802 - the names are pynvml's
"""The NVIDIA driver's library as its clients see it, with GPUs that are made up.

Functions, errors and structures are pynvml's own; a handle is the fake itself. Whatever a GPU is
not given it does not support, and a lost one answers nothing.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from appliance.devices import nvml as api

GIB = 1 << 30
TX, RX = api.FIELD_PCIE_TX_BYTES, api.FIELD_PCIE_RX_BYTES
UINT, ULL = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG


@dataclass(eq=False)
class FakeDevice:
    """What a handle stands for: a GPU or a MIG instance of one."""

    name: str
    uuid: str
    readings: dict[str, Any] = field(default_factory=dict)
    """By function, without `nvmlDeviceGet`; a callable is called with the further arguments."""
    is_lost: bool = False


@dataclass(eq=False)
class FakeInstance(FakeDevice):
    instance_id: int = 0
    gpm: dict[int, float] | None = None


@dataclass(eq=False)
class FakeGpu(FakeDevice):
    fields: dict[Any, tuple[int, int]] = field(default_factory=dict)
    """By id, or id and scope: type and value."""
    gpm: dict[int, float] | None = None
    """Metrics between any two samples; None: it has no GPM."""
    instances: dict[int, FakeInstance] = field(default_factory=dict)
    """MIG instances by index, with holes."""
    mig_mode: int | None = None
    tells_xids: bool = False
    xids: deque[int] = field(default_factory=deque)


def memory(used: int, total: int) -> SimpleNamespace:
    return SimpleNamespace(used=used, total=total, free=total - used)


def h100() -> FakeGpu:
    """Supports all that there is, and is not divided."""
    return FakeGpu(
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-h100",
        readings={
            "CudaComputeCapability": [9, 0],
            "TotalEnergyConsumption": 1_000_000,
            "EnforcedPowerLimit": 700_000,
            "Temperature": 54,
            "ClockInfo": lambda clock: {api.CLOCK_SM: 1980, api.CLOCK_MEMORY: 2619}[clock],
            "CurrentClocksEventReasons": 0,
            "UtilizationRates": SimpleNamespace(gpu=64, memory=30),
            "MemoryInfo": lambda version: memory(20 * GIB, 80 * GIB),
        },
        fields={
            api.FIELD_POWER_INSTANT: (UINT, 512_300),
            TX: (UINT, 0),
            RX: (UINT, 0),
        },
        gpm={2: 75.0, 5: 25.0, 10: 50.0, 20: 3.0, 21: 2.0, 60: 1.0, 61: 0.0},
        mig_mode=0,
        tells_xids=True,
    )


def a100_divided() -> FakeGpu:
    """In two instances, with a hole between them; it has no GPM, and tells no utilisation."""
    whole = h100()
    del whole.readings["UtilizationRates"]
    return FakeGpu(
        name="NVIDIA A100-SXM4-40GB",
        uuid="GPU-a100",
        readings=whole.readings,
        fields=whole.fields,
        mig_mode=1,
        instances={0: instance(0, 3), 2: instance(2, 5)},
    )


def instance(index: int, instance_id: int, gpm: dict[int, float] | None = None) -> FakeInstance:
    return FakeInstance(
        name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        uuid=f"MIG-{index}-{instance_id}",
        readings={"MemoryInfo": lambda version: memory((index + 1) * GIB, 20 * GIB)},
        instance_id=instance_id,
        gpm=gpm,
    )


def laptop() -> FakeGpu:
    """Temperature, memory and the power of the moment; nothing else."""
    return FakeGpu(
        name="NVIDIA GeForce MX",
        uuid="GPU-mx",
        readings={"Temperature": 61, "MemoryInfo": lambda version: memory(GIB, 2 * GIB)},
        fields={api.FIELD_POWER_INSTANT: (UINT, 20_000)},
    )


class FakeNvml:
    """The initialised module."""

    NVMLError = pynvml.NVMLError
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION
    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t  # noqa: N815

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus
        self.calls: list[str] = []
        self.samples: dict[int, FakeDevice | None] = {}
        """By address: what was sampled; those given back are gone."""
        self._addresses = itertools.count(1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every nvmlDeviceGet... that has no behaviour of its own."""
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda device, *args: self._read(device, name.removeprefix("nvmlDeviceGet"), *args)

    def _read(self, device: FakeDevice, name: str, *args: Any) -> Any:
        self._reach(device, name)
        if name not in device.readings:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        reading = device.readings[name]
        return reading(*args) if callable(reading) else reading

    def _reach(self, device: FakeDevice, name: str) -> None:
        self.calls.append(name)
        if device.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._reach(self.gpus[index], "HandleByIndex")
        return self.gpus[index]

    def nvmlDeviceGetName(self, device: FakeDevice) -> str:
        self._reach(device, "Name")
        return device.name

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        self._reach(device, "UUID")
        return device.uuid

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, ids: list[Any]) -> Any:
        self._reach(gpu, "FieldValues")
        values = (pynvml.c_nvmlFieldValue_t * len(ids))()
        for value, field_id in zip(values, ids, strict=True):
            if field_id not in gpu.fields:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                continue
            value.valueType, number = gpu.fields[field_id]
            setattr(value.value, {UINT: "uiVal", ULL: "ullVal"}[value.valueType], number)
        return values

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        self._reach(gpu, "MigMode")
        if gpu.mig_mode is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [gpu.mig_mode, gpu.mig_mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        self._reach(gpu, "MaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeInstance:
        self._reach(gpu, "MigDeviceHandleByIndex")
        if index not in gpu.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, device: FakeInstance) -> int:
        self._reach(device, "GpuInstanceId")
        return device.instance_id

    # Events

    def nvmlEventSetCreate(self) -> list[FakeGpu]:
        return []

    def nvmlEventSetFree(self, events: list[FakeGpu]) -> None:
        events.append(None)  # a set that is used later fails

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: list[FakeGpu]) -> None:
        self._reach(gpu, "RegisterEvents")
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        if not gpu.tells_xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[FakeGpu], timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the daemon's loop does not wait"
        (gpu,) = events
        if not gpu.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        event = pynvml.c_nvmlEventData_t()
        event.eventType, event.eventData = 0x8, gpu.xids.popleft()
        return event

    # GPM

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> SimpleNamespace:
        self._reach(gpu, "GpmQueryDeviceSupport")
        has_gpm = gpu.gpm is not None or any(one.gpm for one in gpu.instances.values())
        return SimpleNamespace(isSupportedDevice=int(has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        address = next(self._addresses)
        self.samples[address] = None
        return ctypes.cast(address, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        del self.samples[_address(sample)]

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:
        return self._sample(gpu, gpu, sample)

    def nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance_id: int, sample: Any) -> Any:
        for one in gpu.instances.values():
            if one.instance_id == instance_id:
                return self._sample(gpu, one, sample)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _sample(self, gpu: FakeGpu, device: FakeGpu | FakeInstance, sample: Any) -> Any:
        self._reach(gpu, "GpmSampleGet")
        if device.gpm is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.samples[_address(sample)] = device
        return sample

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:
        assert wanted.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        first, second = (self.samples[_address(s)] for s in (wanted.sample1, wanted.sample2))
        assert first is second is not None, "two samples of one device"
        assert _address(wanted.sample1) != _address(wanted.sample2)
        for place in range(wanted.numMetrics):
            metric = wanted.metrics[place]
            if metric.metricId in second.gpm:
                metric.value = second.gpm[metric.metricId]
            else:
                metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return wanted


def _address(sample: Any) -> int | None:
    return ctypes.cast(sample, ctypes.c_void_p).value
