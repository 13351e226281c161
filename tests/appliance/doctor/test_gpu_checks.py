"""Doctor before the first run on a GPU, over machines as records."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.devices.gpu_list import Gpu, Holder, list_gpus
from appliance.devices.nvml import Nvml
from appliance.doctor import gpu_checks
from appliance.doctor.gpu_checks import (
    GpuHost,
    _parted,
    gpu_findings,
)
from tests.appliance.fake_nvml import FakeNvml, a100_divided, h100

GIB = 1 << 30
H100 = Gpu("gpu0", "NVIDIA H100 80GB HBM3", "GPU-h100", 80 * GIB, (9, 0), free_bytes=79 * GIB)
NO_FLASH = "no flash_attn"
GOOD = GpuHost(
    [H100],
    "2.11.0+cu130",
    torch_cuda=(13, 0),
    driver="580.95.05",
    driver_cuda=(13, 0),
    flash_attn_fault=NO_FLASH,
)
T4 = Gpu("gpu0", "Tesla T4", "GPU-t4", 15 * GIB, (7, 5), free_bytes=14 * GIB)
BROKEN = "not imported: ImportError: undefined symbol: _ZN3c10"
INSTANCE = Gpu("gpu0/mig0", "A100 MIG 3g.20gb", "MIG-0", 20 * GIB, (8, 0), free_bytes=19 * GIB)
HIDDEN = replace(H100, obstacle="CUDA_VISIBLE_DEVICES hides it")
EMPTY = replace(H100, obstacle="MIG is on but has no instance: nvidia-smi mig -cgi 0 -C")
MACHINES = {
    "server": (GOOD, {}),
    "server with flash-attn": (replace(GOOD, flash_attn_fault=None), {}),
    "driver of two years ago": (
        replace(GOOD, driver="535.183.06", driver_cuda=(12, 2)),
        {"driver": ("bad", "no worker starts", "whl/cu126")},
    ),
    "slim container": (
        replace(GOOD, triton_fault="no C compiler for triton", has_uvm=False),
        {
            "triton": ("note", "several times slower", "apt install gcc"),
            "uvm": ("bad", "cannot start CUDA", "nvidia-modprobe -u -c 0"),
        },
    ),
    "python without headers": (
        replace(GOOD, triton_fault="no Python.h for triton"),
        {"triton": ("note", "no Python.h", "apt install python3-dev")},
    ),
    "flash-attn of another torch": (
        replace(GOOD, flash_attn_fault=BROKEN),
        {"flash-attn": ("note", "undefined symbol", "--force-reinstall")},
    ),
    "turing": (
        replace(GOOD, gpus=[T4]),
        {
            "attention": ("note", "older than compute capability 8.0", "newer GPU"),
            "gpu memory": ("bad", "do not fit", "smaller model"),
        },
    ),
    "desktop in use": (
        replace(GOOD, gpus=[replace(H100, free_bytes=10 * GIB)], memlock_bytes=8 << 20),
        {
            "gpu memory": ("bad", "10.0 of 80.0 GiB free", "nvidia-smi --query-compute-apps"),
            "memlock": ("note", "8.0 MiB", "ulimit -l unlimited"),
        },
    ),
    "held by another process": (
        replace(
            GOOD,
            gpus=[replace(H100, free_bytes=10 * GIB, holders=(Holder(os.getpid(), 69 * GIB),))],
        ),
        {"gpu memory": ("bad", "10.0 of 80.0 GiB free", f"pid {os.getpid()} (")},
    ),
    "held by a process that a container does not show": (
        replace(GOOD, gpus=[replace(H100, free_bytes=10 * GIB, holders=(Holder(1 << 30, None),))]),
        {"gpu memory": ("bad", "10.0 of 80.0 GiB free", f"pid {1 << 30} (another process)")},
    ),
    "barely enough": (
        replace(GOOD, gpus=[replace(H100, memory_bytes=18 * GIB, free_bytes=17 * GIB)]),
        {"gpu memory": ("note", "left for KV", "nvidia-smi")},
    ),
    "divided": (
        replace(GOOD, gpus=[INSTANCE]),
        {"gpu memory": ("note", "left for KV", "smaller model")},
    ),
    "divided, no instance": (
        replace(GOOD, gpus=[EMPTY]),
        {"gpu": ("note", "serves on CPU cores", "nvidia-smi mig -cgi")},
    ),
    "hidden": (
        replace(GOOD, gpus=[HIDDEN]),
        {"gpu": ("note", "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES")},
    ),
    "torch for the CPU": (
        replace(GOOD, torch="2.13.0+cpu"),
        {"gpu": ("note", "serves on CPU cores", "install torch for CUDA")},
    ),
    "two behind an IOMMU": (
        replace(
            GOOD,
            gpus=[H100, replace(H100, name="gpu1", uuid="GPU-2")],
            parted=[("gpu0", "gpu1")],
            has_mps=True,
        ),
        {"p2p": ("note", "through the host", "nvidia-smi topo")},
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_wrong_is_said_with_its_consequence_and_a_command(name: str) -> None:
    host, expected = MACHINES[name]
    findings = {f.check: f for f in gpu_findings(host, weights_bytes=15 * GIB)}
    assert {check for check, f in findings.items() if f.verdict != "ok"} == expected.keys()
    for check, (verdict, found, hint) in expected.items():
        assert findings[check].verdict == verdict
        assert found in findings[check].found
        assert hint in findings[check].hint


def test_what_is_not_known_is_not_taken_for_bad() -> None:
    unknown = GpuHost([replace(H100, free_bytes=None, capability=None)], "2.11.0")
    assert {f.verdict for f in gpu_findings(unknown)} == {"ok"}
    assert [f.verdict for f in gpu_findings(GpuHost([], None))] == ["ok"]


def test_an_instance_and_mps_are_named() -> None:
    host = replace(GOOD, gpus=[INSTANCE], has_mps=True)
    found = {f.check: f.found for f in gpu_findings(host)}
    assert "is an instance" in found["mig"]
    assert "at once" in found["mps"]


def test_mig_layouts_are_explained_by_what_the_model_needs() -> None:
    found = {f.check: f.found for f in gpu_findings(GOOD, 16 * GIB, 1 << 17)}
    assert "2 x 3g.40gb" in found["mig layouts"]
    assert "7 x 1g.10gb" in found["mig layouts"].partition("(not ")[2]
    large = {f.check: f.found for f in gpu_findings(GOOD, 60 * GIB, 1 << 17)}
    assert large["mig layouts"].startswith("no two instances")
    assert "mig layouts" not in {f.check for f in gpu_findings(GOOD)}


def test_gpus_that_cannot_reach_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(h100(), a100_divided())
    nvml = Nvml(library)
    assert _parted(nvml) == []  # it does not say
    library.gpus[0].readings["P2PStatus"] = lambda other, caps: caps * 4
    assert _parted(nvml) == [("gpu0", "gpu1")]
    library.gpus[0].readings["P2PStatus"] = lambda other, caps: 0
    assert _parted(nvml) == []
    assert list_gpus(nvml, visible=None)[0].free_bytes == 60 * GIB
    library.__dict__["nvmlSystemGetCudaDriverVersion_v2"] = lambda: 12040
    library.__dict__["nvmlSystemGetDriverVersion"] = lambda: "550.1"
    monkeypatch.setattr(gpu_checks, "open_nvml", lambda: nvml)
    host = GpuHost.of_machine()
    assert (host.driver, host.driver_cuda) == ("550.1", (12, 4))
    assert [gpu.name for gpu in host.gpus] == ["gpu0", "gpu1/mig0", "gpu1/mig2"]


def test_who_holds_a_gpus_memory_is_listed_the_largest_first() -> None:
    gpu = h100()
    running = [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in ((7, 1), (8, 5))]
    running.append(SimpleNamespace(pid=9, usedGpuMemory=None))
    gpu.readings["ComputeRunningProcesses"] = running
    (listed,) = list_gpus(Nvml(FakeNvml(gpu)), None)
    assert listed.holders == (Holder(8, 5), Holder(7, 1), Holder(9, None))
    (quiet,) = list_gpus(Nvml(FakeNvml(h100())), None)
    assert quiet.holders == ()
