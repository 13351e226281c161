from types import SimpleNamespace

import pytest

from appliance import devices
from appliance.devices import Devices


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """One GPU that reports what it is told to; everything else is not supported."""

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, **readings):
        self.readings = readings

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def __getattr__(self, name):
        def read(handle, *args):
            if name not in self.readings:
                raise FakeNvmlError("not supported")
            return self.readings[name]

        return read


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_ns=10**9)
    monkeypatch.setattr(devices.time, "monotonic_ns", lambda: clock.now_ns)
    return clock


def rapl(tmp_path, energy_uj, name="package-0"):
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")
    (tmp_path / "intel-rapl:0:0").mkdir(exist_ok=True)  # a subzone, counted in its package
    return tmp_path


def test_power_is_the_energy_counters_difference(tmp_path, clock):
    meter = Devices(rapl(tmp_path, 5_000_000), nvml=None)
    meter._nvml = None
    assert meter.read()[0].power_w is None
    clock.now_ns += 2 * 10**9
    rapl(tmp_path, 65_000_000)
    (reading,) = meter.read()
    assert (reading.name, reading.kind, reading.power_w) == ("package-0", "cpu", 30.0)


def test_a_counter_that_wraps_is_followed(tmp_path, clock):
    meter = Devices(rapl(tmp_path, 999_000_000))
    meter._nvml = None
    meter.read()
    clock.now_ns += 10**9
    rapl(tmp_path, 9_000_000)
    assert meter.read()[0].power_w == 10.0


def test_an_unreadable_counter_is_not_reported_rather_than_zero(tmp_path):
    (tmp_path / "intel-rapl:0").mkdir()
    meter = Devices(tmp_path)
    meter._nvml = None
    assert meter.read()[0].power_w is None


def test_gpu_readings_have_our_units(tmp_path, clock):
    nvml = FakeNvml(
        nvmlDeviceGetTotalEnergyConsumption=1000,
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=64),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=1, total=2),
        nvmlDeviceGetTemperature=54,
        nvmlDeviceGetClockInfo=1980,
    )
    meter = Devices(tmp_path, nvml)
    meter.read()
    clock.now_ns += 10**9
    nvml.readings["nvmlDeviceGetTotalEnergyConsumption"] = 401_000
    (gpu,) = meter.read()
    assert (gpu.power_w, gpu.power_limit_w, gpu.utilization_ratio) == (400.0, 700.0, 0.64)
    assert (gpu.temperature_c, gpu.clock_mhz, gpu.memory_used_bytes) == (54, 1980, 1)


def test_what_a_gpu_does_not_support_is_none(tmp_path):
    (gpu,) = Devices(tmp_path, FakeNvml()).read()
    assert gpu.name == "gpu0"
    assert gpu.power_w is None
    assert gpu.utilization_ratio is None
    assert gpu.memory_total_bytes is None


def test_no_driver_is_no_problem(tmp_path):
    assert [d for d in Devices(tmp_path).read() if d.kind == "cpu"] == []
