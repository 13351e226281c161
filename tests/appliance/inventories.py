"""Machines as their drivers and kernels describe them, in NVML's own shapes.

Figures are those of data sheets and of `nvidia-smi topo`, `nvlink` and `mig` on such machines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from appliance.devices.inventory import Inventory, read_inventory
from appliance.devices.nvml import FIELD_NVLINK_MB_PER_S, Nvml
from tests.appliance.fake_nvml import GIB, UINT, FakeGpu, FakeInstance, FakeNvml, memory

SWITCH = "switch"
MIB = 1 << 20


@dataclass
class Board:
    """A GPU of a machine that is made up."""

    model: str
    memory_mib: int
    capability: tuple[int, int]
    node: int = 0
    nvlinks: dict[int | str, int] = field(default_factory=dict)
    """Their number, by the index of the GPU where they end, or SWITCH."""
    link_mb_per_s: int | None = None
    profiles: tuple[tuple[str, int], ...] = ()
    """Of its MIG instances: name, and memory in MiB."""
    is_divided: bool = False


@dataclass
class Machine:
    """Boards, the paths between them, and the host."""

    boards: list[Board]
    level: Callable[[int, int], int] = lambda one, other: pynvml.NVML_TOPOLOGY_SYSTEM
    reaches: Callable[[int, int], bool] = lambda one, other: True
    nodes: tuple[tuple[int, int], ...] = ((16, 128),)
    """Cores and GiB of each NUMA node."""
    visible: str | None = None

    def read(self, folder: Path) -> Inventory:
        """As it would be taken there; the kernel's description of nodes is written to a folder."""
        first = 0
        for number, (num_cores, gib) in enumerate(self.nodes):
            node = folder / f"node{number}"
            node.mkdir(parents=True)
            (node / "cpulist").write_text(f"{first}-{first + num_cores - 1}\n")
            (node / "meminfo").write_text(f"Node {number} MemTotal:  {gib << 20} kB\n")
            first += num_cores
        num_bytes = sum(gib for _, gib in self.nodes) * GIB * 9 // 10
        nvml = Nvml(FakeNvml(*map(self._gpu, range(len(self.boards)))))
        return read_inventory(range(first), num_bytes, nvml, self.visible, folder)

    def _gpu(self, index: int) -> FakeGpu:
        board = self.boards[index]
        ends = [end for end, count in board.nvlinks.items() for _ in range(count)]
        instances = {
            place: FakeInstance(
                f"{board.model} MIG {name}", f"MIG-{index}{place}c0ffee-5eed",
                {"MemoryInfo": _memory(mib)}, instance_id=place + 1,
            )
            for place, (name, mib) in enumerate(board.profiles)
        }  # fmt: skip

        def p2p(other: FakeGpu, caps: int) -> int:
            other_index = int(other.uuid[4])
            return 0 if self.reaches(index, other_index) else 4

        def end_of(link: int) -> Any:
            if link >= len(ends):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return ends[link]

        readings = {
            "CudaComputeCapability": list(board.capability),
            "MemoryInfo": _memory(board.memory_mib),
            "PciInfo": _pci(index),
            "P2PStatus": p2p,
            "TopologyCommonAncestor": lambda other: self.level(index, int(other.uuid[4])),
            "NvLinkState": lambda link: int(end_of(link) is not None),
            "NvLinkRemoteDeviceType": lambda link: 2 if end_of(link) == SWITCH else 0,
            "NvLinkRemotePciInfo": lambda link: (
                _pci(0x80) if end_of(link) == SWITCH else _pci(int(end_of(link)))
            ),
            "MemoryAffinity": lambda size, scope: _mask([board.node], size),
        }
        fields = {}
        if board.link_mb_per_s is not None:
            fields[FIELD_NVLINK_MB_PER_S] = (UINT, board.link_mb_per_s)
        return FakeGpu(
            board.model, f"GPU-{index}5eed", readings, fields=fields, instances=instances,
            mig_mode=int(board.is_divided),
        )  # fmt: skip


def _memory(mib: int) -> Callable[[int], SimpleNamespace]:
    return lambda version: memory(0, mib * MIB)


def _pci(bus: int) -> Any:
    return pynvml.nvmlPciInfo_t(domain=0, bus=bus, device=0)


def _mask(bits: Iterable[int], num_words: int) -> Any:
    words = (ctypes.c_ulonglong * num_words)()
    for bit in bits:
        words[bit // 64] |= 1 << bit % 64
    return words


def _h100(node: int, **more: Any) -> Board:
    return Board("NVIDIA H100 80GB HBM3", 81559, (9, 0), node, **more)


def _parts(node: int, *profiles: tuple[str, int]) -> Board:
    return _h100(node, profiles=profiles, is_divided=True)


def _divided(*profiles: tuple[str, int]) -> Machine:
    return Machine([_parts(0, *profiles)], nodes=((26, 220),))


def _near(*groups: set[int]) -> Callable[[int, int], int]:
    """GPUs of a group are under one host bridge; others are on another socket."""
    return lambda one, other: 30 if any({one, other} <= group for group in groups) else 50


def machines() -> dict[str, Machine]:
    """All of them, by what they are called in the golden texts."""
    h200 = [Board("NVIDIA H200", 143771, (9, 0), i // 4, {SWITCH: 18}, 26562) for i in range(8)]
    a100 = [
        Board("NVIDIA A100 80GB PCIe", 81920, (8, 0), i // 2, {i ^ 1: 12}, 25000) for i in range(4)
    ]
    rtx = [Board("NVIDIA GeForce RTX 4090", 24564, (8, 9)) for _ in range(2)]
    return {
        "2xh100-nvlink": Machine(
            [_h100(0, nvlinks={1: 18}, link_mb_per_s=26562),
             _h100(0, nvlinks={0: 18}, link_mb_per_s=26562)],
            level=lambda one, other: 40, nodes=((52, 480),),
        ),
        "4xa100-uneven": Machine(a100, _near({0, 1}, {2, 3}), nodes=((32, 250), (32, 250))),
        "8xh200-nvswitch": Machine(
            h200, _near({0, 1, 2, 3}, {4, 5, 6, 7}), nodes=((56, 1000), (56, 1000))
        ),
        "h100-mig-2x3g.40gb": _divided(("3g.40gb", 40448), ("3g.40gb", 40448)),
        "h100-mig-7x1g.10gb": _divided(*[("1g.10gb", 9984)] * 7),
        "2xh100-mig-2x3g.40gb": Machine(
            [_parts(node, *[("3g.40gb", 40448)] * 2) for node in (0, 1)],
            nodes=((26, 220), (26, 220)),
        ),
        "2xh100-one-divided": Machine(
            [_h100(0), _parts(1, ("4g.40gb", 40448), ("3g.40gb", 40448))],
            nodes=((26, 220), (26, 220)),
        ),
        "2xrtx4090-no-p2p": Machine(rtx, lambda one, other: 30, lambda one, other: False),
        "2xh100-one-hidden": Machine(
            [_h100(0, nvlinks={1: 18}, link_mb_per_s=26562),
             _h100(0, nvlinks={0: 18}, link_mb_per_s=26562)],
            level=lambda one, other: 40, visible="1",
        ),
        "rtx4090": Machine(rtx[:1], nodes=((8, 64),)),
        "laptop": Machine(
            [Board("NVIDIA GeForce RTX 3050 Laptop GPU", 4096, (8, 6))], nodes=((6, 16),)
        ),
        "two-socket-xeon": Machine([], nodes=((28, 256), (28, 256))),
        "none": Machine([], nodes=((4, 16),)),
    }  # fmt: skip
