"""Define `penstock devices`: what computes here, and what links it.

Invariant: an unreported figure is a dash or a question mark, never a zero.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.cli import terminal
from appliance.cli.tables import Format, TableColumn, in_unit, word
from appliance.cli.terminal import Output
from appliance.configuration import client_settings
from appliance.hub.names import model_name
from appliance.observe.frame.figures import ABSENT, bytes_per_s, count, size
from engine.errors import PenstockError
from engine.text.read_models import read_checkpoint

if TYPE_CHECKING:
    from appliance.devices.inventory import Inventory

_READING_S = 0.25
"""Seconds between two readings of an energy counter; their difference gives the power."""


def _reasons(value: Any) -> str:
    return ABSENT if value is None else word(", ".join(value) or "no")


_DEVICES = (
    TableColumn("DEVICE", "name"),
    TableColumn("KIND", "kind"),
    TableColumn("POWER", "power_w", in_unit("W")),
    TableColumn("LIMIT", "power_limit_w", in_unit("W")),
    TableColumn("TEMP", "temperature_c", in_unit("C")),
    TableColumn("CLOCK", "clock_mhz", in_unit("MHz")),
    TableColumn("BUSY", "utilization_ratio", in_unit("%", 100)),
    TableColumn("MEMORY", "memory_used_bytes", size),
    TableColumn("OF", "memory_total_bytes", size),
    TableColumn("THROTTLED", "throttle_reasons", _reasons),
    TableColumn("XID", "last_xid", count),
    TableColumn("POWER BY", "power_source", is_wide=True),
    TableColumn("NOW", "power_instant_w", in_unit("W"), is_wide=True),
    TableColumn("MEM CLOCK", "memory_clock_mhz", in_unit("MHz"), is_wide=True),
    TableColumn("SM", "sm_ratio", in_unit("%", 100), is_wide=True),
    TableColumn("TENSOR", "tensor_ratio", in_unit("%", 100), is_wide=True),
    TableColumn("MEM BW", "memory_bandwidth_ratio", in_unit("%", 100), is_wide=True),
    TableColumn("PCIE IN", "pcie_rx_bytes_per_s", bytes_per_s, is_wide=True),
    TableColumn("PCIE OUT", "pcie_tx_bytes_per_s", bytes_per_s, is_wide=True),
    TableColumn("NVLINK IN", "nvlink_rx_bytes_per_s", bytes_per_s, is_wide=True),
    TableColumn("NVLINK OUT", "nvlink_tx_bytes_per_s", bytes_per_s, is_wide=True),
    TableColumn("MODEL", "model", is_wide=True),
    TableColumn("UUID", "uuid", is_wide=True),
)


def devices(output: Output = Format.TABLE) -> None:
    """List CPUs, GPUs and their links; - means not reported."""
    import msgspec

    from appliance.devices.machine import Devices
    from appliance.fleet.placer import this_inventory
    from appliance.observe.frame.protocol import DeviceFrame

    terminal.of_this_machine()
    machine, inventory = Devices.of_machine(), this_inventory()
    machine.read(time.monotonic_ns())
    time.sleep(_READING_S)
    cores = DeviceFrame(name=f"cores {', '.join(map(str, inventory.cores))}", kind="cpu")
    rows = msgspec.to_builtins([*machine.read(time.monotonic_ns()), cores])
    for row in rows:
        row["links"] = [asdict(x) for x in inventory.links if row["name"] in (x.one, x.other)]
    terminal.write(terminal.listing("devices", _DEVICES, output).render(rows))
    if output.is_for_people:
        terminal.write(
            "".join(f"{line}\n" for line in (*drawing(inventory), *_proposed(inventory)))
        )


def _proposed(inventory: Inventory) -> Iterator[str]:
    """Propose how to serve the configured model where it needs more than a start does by itself."""
    from appliance.fleet.model_files import model_folder
    from appliance.fleet.proposals import propose

    try:
        checkpoint = read_checkpoint(model_folder(client_settings.load_asked({}).model))
    except (PenstockError, OSError):  # doctor says what is wrong with it
        return
    proposed = propose(checkpoint, inventory)
    if proposed is not None:
        yield f"{model_name(checkpoint.folder)}: {proposed}"


def drawing(inventory: Inventory) -> Iterator[str]:
    """Draw NUMA nodes with their devices, and the links between GPUs as a matrix with a legend."""
    from appliance.fleet.placement import cpu_names

    for node in inventory.nodes:
        near = [gpu.name for gpu in inventory.gpus if gpu.node == node.number]
        memory = "" if node.memory_bytes is None else f", {size(node.memory_bytes)}"
        yield f"node {node.number}: {cpu_names(node.cores)}{memory}{', '.join(('', *near))}"
    for gpu in inventory.gpus:
        if gpu.obstacle is not None:
            yield f"{gpu.name}: {gpu.obstacle}"
    names = [gpu.name for gpu in inventory.gpus]
    if len(names) < 2:
        return
    pairs = {
        (a.name, b.name): inventory.link(a, b)
        for a in inventory.gpus
        for b in inventory.gpus
        if a != b
    }
    width = max(map(len, (*names, "links", *(link.short for link in pairs.values())))) + 2
    yield "".join(cell.ljust(width) for cell in ("links", *names)).rstrip()
    for name in names:
        cells = (ABSENT if name == other else pairs[name, other].short for other in names)
        yield "".join(cell.ljust(width) for cell in (name, *cells)).rstrip()
    words = {link.short: link for link in pairs.values()}
    for short, link in sorted(words.items()):
        reach = {True: "", False: "; no P2P", None: "; P2P is not reported"}[link.can_reach]
        yield f"{short.ljust(width)}{link.words}{reach}"
