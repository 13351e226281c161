"""List the hardware to place workers on: GPUs, links, NUMA nodes, cores.

Invariant: placement depends on the record alone, so that any machine can be placed anywhere; an
unreported value is None.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.devices.gpu_list import Gpu, list_gpus
from appliance.devices.nvml import NvLinks, Nvml, open_nvml
from engine.units import size_text

NODES = Path("/sys/devices/system/node")
PATHS = {
    0: ("PSB", "one board"),
    10: ("PIX", "one PCIe switch"),
    20: ("PXB", "several PCIe switches"),
    30: ("PHB", "the host bridge"),
    40: ("NODE", "PCIe within a NUMA node"),
    50: ("SYS", "the link between sockets"),
}
"""Names in `nvidia-smi topo` and in words, by nvmlGpuTopologyLevel_t."""


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The link between two GPUs: NVLink or PCIe, and whether P2P works."""

    one: str
    other: str
    num_nvlinks: int = 0
    """NVLinks each way, directly or through switches."""
    nvlink_bytes_per_s: float | None = None
    """The rate of all NVLinks together, one way; None: not reported, or no NVLink."""
    level: int | None = None
    """Their nearest common ancestor, a key of PATHS; None: not reported."""
    can_reach: bool | None = None
    """Whether each can read and write the other's memory (P2P); None: not reported."""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """A key that sorts links: larger is faster."""
        level = 99 if self.level is None else self.level
        return (bool(self.can_reach), self.nvlink_bytes_per_s or float(self.num_nvlinks), -level)

    @property
    def short(self) -> str:
        """Its name in `nvidia-smi topo -m`: NV18, PIX, SYS; an x follows without P2P."""
        name = PATHS[self.level][0] if self.level in PATHS else "?"
        name = f"NV{self.num_nvlinks}" if self.num_nvlinks else name
        return name if self.can_reach else f"{name}x" if self.can_reach is False else f"{name}?"

    @property
    def words(self) -> str:
        """A description for people: `18 NVLinks, 445 GiB/s each way`."""
        if self.num_nvlinks:
            links = "1 NVLink" if self.num_nvlinks == 1 else f"{self.num_nvlinks} NVLinks"
            rate = self.nvlink_bytes_per_s
            return links if rate is None else f"{links}, {size_text(rate)}/s each way"
        return PATHS[self.level][1] if self.level in PATHS else "a path that is not reported"


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: its cores, and memory near them."""

    number: int
    cores: tuple[int, ...]
    """One logical CPU of each usable physical core; empty: memory alone."""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The hardware facts that placement depends on."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()
    """The links between the boards of `gpus`."""
    nodes: tuple[Node, ...] = (Node(0, (0,)),)
    memory_bytes: int = 0
    """Usable bytes of host memory."""
    has_mps: bool = False
    """Whether the MPS control daemon runs, so that processes on one GPU compute at once."""
    driver: str | None = None
    """The version of the GPUs' driver; None: no driver, or not reported."""

    @property
    def cores(self) -> list[int]:
        """CPU cores of all NUMA nodes, in order."""
        return sorted(core for node in self.nodes for core in node.cores)

    def link(self, one: Gpu, other: Gpu) -> GpuLink:
        """Return the link of two GPUs, in either order.

        A MIG instance reaches no other memory, not even that of the same GPU's other instances; its
        links only say how near the boards are.
        """
        names = {one.board, other.board}
        unknown = GpuLink(one.name, other.name, level=0 if len(names) == 1 else None)
        found = next((each for each in self.links if {each.one, each.other} == names), unknown)
        if one.is_instance or other.is_instance:
            return GpuLink(one.name, other.name, level=found.level, can_reach=False)
        return found

    def cores_near(self, gpu: Gpu) -> tuple[int, ...]:
        """List the cores of its NUMA node; all cores if the node is unknown or has none."""
        near = [core for node in self.nodes if node.number == gpu.node for core in node.cores]
        return tuple(sorted(near or self.cores))


def read_inventory(
    cores: Iterable[int],
    memory_bytes: int,
    nvml: Nvml | None = None,
    visible: str | None = os.environ.get("CUDA_VISIBLE_DEVICES"),
    nodes: Path = NODES,
) -> Inventory:
    """Read GPUs, links and NUMA nodes of this machine.

    Args:
        cores: that may be used, one logical CPU each.
        memory_bytes: usable bytes of host memory.
        nvml: the driver's library; None: it is opened.
        visible: what CUDA is told to see; None: everything.
        nodes: where the kernel describes NUMA nodes.
    """
    nvml = nvml or open_nvml()  # CUDA would make a context, which takes memory of each GPU
    gpus = list_gpus(nvml, visible)
    links = (
        () if nvml is None else _links(nvml, dict.fromkeys(gpu.board for gpu in gpus if gpu.uuid))
    )
    driver = None if nvml is None else nvml.ask("nvmlSystemGetDriverVersion")
    return Inventory(tuple(gpus), links, read_nodes(cores, nodes), memory_bytes, mps_runs(), driver)


def mps_runs() -> bool:
    """Say whether the MPS control daemon has its pipe where clients look for it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return (Path(folder) / "control").exists()


def read_nodes(cores: Iterable[int], root: Path = NODES) -> tuple[Node, ...]:
    """List the nodes with a usable core; one node of all cores where the kernel names none."""
    usable = set(cores)
    found = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            own = usable & set(_cpus((folder / "cpulist").read_text()))
            memory = _total_bytes((folder / "meminfo").read_text())
        except (OSError, ValueError):
            continue
        if own:
            found.append(Node(int(folder.name[4:]), tuple(sorted(own)), memory))
    left = usable - {core for node in found for core in node.cores}
    return tuple(found) if found and not left else (Node(0, tuple(sorted(usable))),)


def _cpus(text: str) -> list[int]:
    """Parse `0-3,8` as the kernel writes it."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _total_bytes(text: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if "MemTotal:" in words:
            return int(words[words.index("MemTotal:") + 1]) * 1024
    return None


def _links(nvml: Nvml, boards: Iterable[str]) -> tuple[GpuLink, ...]:
    handles = {
        name: nvml.ask("nvmlDeviceGetHandleByIndex", int(name.removeprefix("gpu")))
        for name in boards
    }
    ends = {name: (nvml.address(each), nvml.nvlinks(each)) for name, each in handles.items()}
    return tuple(
        _link(nvml, one, other, handles, ends) for one, other in itertools.combinations(handles, 2)
    )


def _link(
    nvml: Nvml,
    one: str,
    other: str,
    handles: dict[str, Any],
    ends: dict[str, tuple[tuple[int, int, int] | None, NvLinks]],
) -> GpuLink:
    (_, ours), (address, theirs) = ends[one], ends[other]
    direct = 0 if address is None else ours.by_gpu[address]
    count = direct or min(ours.to_switches, theirs.to_switches)
    rates = [each.bytes_per_s for each in (ours, theirs) if each.bytes_per_s is not None]
    return GpuLink(
        one,
        other,
        count,
        count * min(rates) if count and rates else None,
        nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other]),
        nvml.can_reach(handles[one], handles[other]),
    )
