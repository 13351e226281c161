"""CPU packages, from a powercap tree of our own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from appliance.devices import gpu_reader
from appliance.devices import nvml as api
from appliance.devices.gpu_reader import MAX_WINDOW_NS
from appliance.devices.machine import Devices, find_gpus, find_packages
from appliance.devices.nvml import Nvml, open_nvml
from appliance.observe.frame.protocol import DeviceFrame
from tests.appliance.fake_nvml import (
    GIB,
    RX,
    TX,
    UINT,
    ULL,
    FakeGpu,
    FakeNvml,
    a100_divided,
    h100,
    instance,
    laptop,
    memory,
)

S = 1_000_000_000


def zone(root: Path, number: str, name: str, energy_uj: int, **more: int) -> None:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    files = {"energy_uj": energy_uj, "max_energy_range_uj": 1_000_000_000, **more}
    for file, value in files.items():
        (folder / file).write_text(f"{value}\n")


def test_power_and_energy_are_the_counters_difference(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 5_000_000, constraint_0_power_limit_uw=125_000_000)
    (package,) = find_packages(tmp_path)
    first = package.read(0)
    assert (first.energy_j, first.power_w, first.power_source) == (0.0, None, "rapl")
    zone(tmp_path, "0", "package-0", 65_000_000)
    second = package.read(2 * S)
    assert (second.name, second.kind) == ("package-0", "cpu")
    assert (second.energy_j, second.power_w, second.power_limit_w) == (60.0, 30.0, 125.0)


def test_a_counter_that_wraps_is_followed(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 999_000_000)
    (package,) = find_packages(tmp_path)
    package.read(0)
    zone(tmp_path, "0", "package-0", 9_000_000)
    assert package.read(S).power_w == 10.0


def test_packages_are_counted_once(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    zone(tmp_path, "0:0", "core", 0)
    zone(tmp_path, "1", "package-1", 0)
    zone(tmp_path, "2", "psys", 0)
    assert [package.name for package in find_packages(tmp_path)] == ["package-0", "package-1"]


def test_an_unreadable_counter_is_not_reported_rather_than_zero(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("garbage")
    (package,) = find_packages(tmp_path)
    frame = package.read(0)
    assert frame.name == "intel-rapl:0"
    assert (frame.energy_j, frame.power_w, frame.power_source) == (None, None, None)


def test_no_tree_is_no_problem(tmp_path: Path) -> None:
    assert find_packages(tmp_path / "none") == []


# GPUs of every kind, through the whole of the library's surface.


NVLINK_TX = (api.FIELD_NVLINK_TX_KIB, api.ALL_LINKS)
NVLINK_RX = (api.FIELD_NVLINK_RX_KIB, api.ALL_LINKS)


class Machine:
    """Its devices, read once a second."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.library = FakeNvml(*gpus)
        self.devices = Devices([], find_gpus(Nvml(self.library)))
        self.now_ns = 0

    def read(self, seconds: float = 1.0) -> list[DeviceFrame]:
        self.now_ns += int(seconds * S)
        return self.devices.read(self.now_ns)

    def names(self, seconds: float = 1.0) -> list[str]:
        return [frame.name for frame in self.read(seconds)]


def test_a_datacenter_gpu_reports_everything_in_our_units() -> None:
    gpu = h100()
    machine = Machine(gpu)
    machine.read()
    gpu.readings["TotalEnergyConsumption"] += 400_000
    gpu.readings["CurrentClocksEventReasons"] = 0x1 | 0x4 | 0x40
    (frame,) = machine.read()
    assert (frame.name, frame.kind, frame.parent) == ("gpu0", "gpu", None)
    assert (frame.model, frame.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-h100")
    assert (frame.power_w, frame.energy_j, frame.power_source) == (400.0, 400.0, "energy counter")
    assert (frame.power_instant_w, frame.power_limit_w) == (512.3, 700.0)
    assert (frame.clock_mhz, frame.memory_clock_mhz, frame.temperature_c) == (1980, 2619, 54)
    assert [why.split()[0] for why in frame.throttle_reasons] == ["power", "thermal"]
    assert (frame.utilization_ratio, frame.memory_used_bytes) == (0.64, 20 * GIB)
    assert (frame.sm_ratio, frame.tensor_ratio) == (0.75, 0.25)
    assert frame.memory_bandwidth_ratio == 0.5
    assert (frame.pcie_tx_bytes_per_s, frame.pcie_rx_bytes_per_s) == (3 << 20, 2 << 20)
    assert (frame.nvlink_rx_bytes_per_s, frame.nvlink_tx_bytes_per_s) == (1 << 20, 0)
    assert frame.last_xid is None


def test_nothing_throttles_is_an_empty_list_and_not_reported_is_none() -> None:
    frames = Machine(h100(), laptop()).read()
    assert [frame.throttle_reasons for frame in frames] == [[], None]


def test_a_gpu_that_supports_little_reports_that_and_nothing_else() -> None:
    machine = Machine(laptop())
    machine.read()
    (frame,) = machine.read(2.0)
    assert (frame.temperature_c, frame.memory_total_bytes) == (61, 2 * GIB)
    assert (frame.power_w, frame.power_instant_w) == (20.0, 20.0)
    assert (frame.energy_j, frame.power_source) == (40.0, "instant field")
    reported = {"name", "kind", "model", "uuid", "temperature_c", "memory_used_bytes"}
    reported |= {"memory_total_bytes", "power_w", "power_instant_w", "energy_j", "power_source"}
    for name in set(DeviceFrame.__struct_fields__) - reported:
        assert getattr(frame, name) is None, name


def test_a_gpu_that_supports_nothing_still_has_its_frame() -> None:
    (frame,) = Machine(FakeGpu(name="?", uuid="GPU-0")).read()
    assert (frame.name, frame.kind) == ("gpu0", "gpu")
    assert (frame.energy_j, frame.power_w, frame.power_source) == (None, None, None)


def test_a_counter_that_fails_once_does_not_fall_back_to_counting_twice() -> None:
    gpu = h100()
    machine = Machine(gpu)
    machine.read()
    energy_mj = gpu.readings.pop("TotalEnergyConsumption")
    (frame,) = machine.read()
    assert (frame.energy_j, frame.power_w, frame.power_source) == (None, None, None)
    assert frame.power_instant_w == 512.3
    gpu.readings["TotalEnergyConsumption"] = energy_mj + 800_000
    (frame,) = machine.read()
    assert (frame.energy_j, frame.power_w) == (800.0, 400.0)


def test_a_lost_gpu_keeps_its_name_and_reports_nothing_until_it_is_back() -> None:
    gpu, other = h100(), laptop()
    machine = Machine(gpu, other)
    machine.read()
    gpu.xids.append(79)
    machine.read()
    gpu.is_lost = True
    lost, fine = machine.read()
    assert (lost.name, lost.uuid, lost.last_xid) == ("gpu0", "GPU-h100", 79)
    for name in ("energy_j", "power_w", "temperature_c", "memory_used_bytes", "throttle_reasons"):
        assert getattr(lost, name) is None, name
    assert lost.sm_ratio is None
    assert fine.temperature_c == 61
    gpu.is_lost = False
    gpu.readings["TotalEnergyConsumption"] += 100_000
    back, _ = machine.read()
    assert (back.energy_j, back.temperature_c) == (100.0, 54)


def test_a_gpu_that_is_lost_from_the_start_is_looked_for_again() -> None:
    gpu = h100()
    gpu.is_lost = True
    machine = Machine(gpu)
    assert machine.names() == ["gpu0"]
    gpu.is_lost = False
    machine.read()
    (frame,) = machine.read(gpu_reader.LOOK_INTERVAL_NS / S)
    assert (frame.uuid, frame.temperature_c) == ("GPU-h100", 54)


def test_the_newest_critical_error_stays() -> None:
    gpu = h100()
    machine = Machine(gpu)
    machine.read()
    gpu.xids.extend([31, 48])
    assert machine.read()[0].last_xid == 48
    assert machine.read()[0].last_xid == 48


def test_mig_instances_have_memory_of_their_own_and_the_gpu_has_the_power() -> None:
    gpu = a100_divided()
    machine = Machine(gpu)
    machine.read()
    gpu.readings["TotalEnergyConsumption"] += 200_000
    whole, first, second = machine.read()
    assert [f.name for f in (whole, first, second)] == ["gpu0", "gpu0/mig0", "gpu0/mig2"]
    assert (whole.power_w, whole.utilization_ratio, whole.parent) == (200.0, None, None)
    assert (first.parent, second.parent) == ("gpu0", "gpu0")
    assert (first.uuid, second.uuid) == ("MIG-0-3", "MIG-2-5")
    assert (first.memory_used_bytes, second.memory_used_bytes) == (GIB, 3 * GIB)
    assert second.model == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    for name in ("power_w", "energy_j", "clock_mhz", "utilization_ratio", "sm_ratio"):
        assert getattr(first, name) is None, name


def test_instances_of_several_boards_have_each_their_own_boards_power() -> None:
    boards = a100_divided(), a100_divided()
    machine = Machine(*boards)
    machine.read()
    boards[1].readings["TotalEnergyConsumption"] += 200_000
    found = machine.read()
    power = {frame.name: frame.power_w for frame in found}
    assert {frame.name: frame.parent for frame in found if frame.parent} == {
        "gpu0/mig0": "gpu0", "gpu0/mig2": "gpu0", "gpu1/mig0": "gpu1", "gpu1/mig2": "gpu1",
    }  # fmt: skip
    assert power["gpu1"] == 200.0
    assert power["gpu0"] == 0.0
    assert {power[frame.name] for frame in found if frame.parent} == {None}


def test_instances_come_and_go_at_the_next_look() -> None:
    gpu = a100_divided()
    machine = Machine(gpu)
    assert machine.names() == ["gpu0", "gpu0/mig0", "gpu0/mig2"]
    del gpu.instances[0]
    gpu.instances[1] = instance(1, 4)
    assert machine.names(gpu_reader.LOOK_INTERVAL_NS / S) == ["gpu0", "gpu0/mig1", "gpu0/mig2"]
    gpu.mig_mode = 0
    assert machine.names(gpu_reader.LOOK_INTERVAL_NS / S) == ["gpu0"]


def test_instances_of_a_lost_gpu_keep_their_frames() -> None:
    gpu = a100_divided()
    machine = Machine(gpu)
    machine.read()
    gpu.is_lost = gpu.instances[0].is_lost = gpu.instances[2].is_lost = True
    frames = machine.read(gpu_reader.LOOK_INTERVAL_NS / S)
    assert [frame.name for frame in frames] == ["gpu0", "gpu0/mig0", "gpu0/mig2"]
    assert [frame.memory_used_bytes for frame in frames] == [None, None, None]


def divided_hopper() -> FakeGpu:
    gpu = a100_divided()
    for number, one in enumerate(gpu.instances.values(), 1):
        one.gpm = {2: 10.0 * number, 10: 20.0}
    return gpu


def test_activity_of_instances_is_measured_one_by_one_where_the_gpu_can() -> None:
    machine = Machine(divided_hopper())
    assert [frame.sm_ratio for frame in machine.read()] == [None, None, None]
    _, first, second = machine.read()
    assert (first.sm_ratio, second.sm_ratio) == (0.1, 0.2)
    assert (first.tensor_ratio, first.memory_bandwidth_ratio) == (None, 0.2)


def test_an_instance_made_anew_begins_its_window_anew_and_no_sample_is_left_behind() -> None:
    gpu = divided_hopper()
    machine = Machine(gpu)
    machine.read()
    machine.read()
    gpu.instances[0] = instance(0, 9, {2: 90.0})
    _, first, second = machine.read(gpu_reader.LOOK_INTERVAL_NS / S)
    assert (first.uuid, first.sm_ratio) == ("MIG-0-9", None)
    assert second.sm_ratio == 0.2
    assert len(machine.library.samples) == 4
    gpu.mig_mode = 0
    machine.read(gpu_reader.LOOK_INTERVAL_NS / S)
    assert len(machine.library.samples) == 2


def test_a_window_that_says_nothing_of_now_shows_nothing() -> None:
    machine = Machine(h100())
    machine.read()
    assert machine.read()[0].sm_ratio == 0.75
    assert machine.read(1 + MAX_WINDOW_NS / S)[0].sm_ratio is None
    assert machine.read()[0].sm_ratio == 0.75


def test_a_metric_that_is_no_number_is_not_reported() -> None:
    gpu = h100()
    machine = Machine(gpu)
    machine.read()
    gpu.gpm[2] = float("nan")
    assert machine.read()[0].sm_ratio is None


def test_memory_of_all_gpus_is_read_before_the_first_sample() -> None:
    machine = Machine(h100(), h100())
    machine.read()
    machine.library.calls.clear()
    machine.read()
    calls = machine.library.calls
    last_memory = len(calls) - 1 - calls[::-1].index("MemoryInfo")
    assert last_memory < calls.index("GpmSampleGet")


def test_traffic_without_gpm_is_the_counters_growth_also_when_they_wrap() -> None:
    gpu = a100_divided()
    gpu.fields |= {TX: (UINT, 2**32 - 1000), RX: (UINT, 5)}
    gpu.fields |= {NVLINK_TX: (ULL, 2**40), NVLINK_RX: (ULL, 7)}
    machine = Machine(gpu)
    first = machine.read()[0]
    assert (first.pcie_tx_bytes_per_s, first.nvlink_tx_bytes_per_s) == (None, None)
    gpu.fields |= {TX: (UINT, 1000), RX: (UINT, 505)}
    gpu.fields |= {NVLINK_TX: (ULL, 2**40 + 4), NVLINK_RX: (ULL, 0)}
    frame = machine.read(2.0)[0]
    assert (frame.pcie_tx_bytes_per_s, frame.pcie_rx_bytes_per_s) == (1000.0, 250.0)
    assert (frame.nvlink_tx_bytes_per_s, frame.nvlink_rx_bytes_per_s) == (2048.0, None)


def test_what_seldom_changes_is_not_asked_every_time() -> None:
    machine = Machine(h100(), a100_divided())
    machine.read()
    machine.library.calls.clear()
    machine.read()
    seldom = {"HandleByIndex", "Name", "UUID", "MigMode", "MaxMigDeviceCount"}
    seldom |= {"MigDeviceHandleByIndex", "EnforcedPowerLimit", "GpuInstanceId"}
    assert not seldom & set(machine.library.calls)
    assert "PcieThroughput" not in machine.library.calls  # which takes 20 ms


def test_a_reading_too_soon_after_another_is_the_same_one() -> None:
    machine = Machine(h100())
    frames = machine.read()
    machine.library.calls.clear()
    assert machine.read(0.05) is frames
    assert machine.library.calls == []
    assert machine.devices.read_ns == S


def test_values_of_a_type_nobody_knows_are_not_reported() -> None:
    found = [SimpleNamespace(nvmlReturn=0, valueType=99, value=None)]
    library = SimpleNamespace(
        NVMLError=KeyError, nvmlDeviceGetFieldValues=lambda device, ids: found
    )
    assert Nvml(library).fields(None, [1]) == [None]


def test_memory_is_asked_in_the_form_that_leaves_the_drivers_own_out() -> None:
    gpu, asked = laptop(), []
    gpu.readings["MemoryInfo"] = lambda version: asked.append(version) or memory(1, 2)
    Machine(gpu).read()
    assert asked == [pynvml.nvmlMemory_v2]


def test_no_driver_is_no_problem() -> None:
    assert find_gpus(None) == []


def test_the_driver_of_this_machine_answers_as_the_fake_does() -> None:
    nvml = open_nvml()
    if nvml is None:
        pytest.skip("no NVIDIA driver")
    gpus = find_gpus(nvml)
    frames = Devices([], gpus).read(0)
    assert [frame.name for frame in frames if frame.parent is None] == [gpu.name for gpu in gpus]
    assert all(frame.uuid for frame in frames)
