"""Define doctor, devices and config: problems, hardware, settings.

Owns: how findings, devices and links are listed; how a setting's value is written, in the form that
a user would type.
Invariant: doctor ends with 8 if something was bad, otherwise with 0.
Never: checks anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.tables import Format, TableColumn, folded, in_unit, word, yes_or_no
from appliance.cli.terminal import Host, Output
from appliance.configuration.client_settings import explain
from appliance.configuration.setting_kinds import (
    a_duration,
    on_or_off,
    parse_bytes,
    size_setting,
    some_weights,
)
from appliance.configuration.settings import SETTINGS, Setting
from appliance.configuration.sources import FoundSetting
from appliance.frame.figures import ABSENT, bytes_per_s, count, size

if TYPE_CHECKING:
    from appliance.devices.inventory import Inventory

BAD_EXIT_CODE = 8

_FINDINGS = (
    TableColumn("CHECK", "check"),
    TableColumn("VERDICT", "verdict"),
    TableColumn("FOUND", "found"),
    TableColumn("WHAT TO DO", "hint"),
)


def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Check this model.")] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    host: Host = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Also write a file for a bug report, without prompts and keys.", metavar="FILE"
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Check this machine, the settings, the log and the daemon; say what to fix, and how.

    Ends with 8 if something is bad, and with 0 if it serves.
    """
    from appliance.doctor.checks import examine

    if bundle is not None:
        terminal.needs_this_machine("a report", "run it there", host)
    settings = {"model": model, "config": config_file}
    findings = list(examine(settings, lambda: terminal.client(host)))
    if bundle is not None:
        from appliance.doctor.bundle import write_bundle

        parts = write_bundle(bundle, settings, findings, lambda: terminal.client(host))
        terminal.note(f"wrote {bundle}; it has {', '.join(parts)}")
    rows = [asdict(each) for each in findings]
    if output is Format.TABLE:
        for row in rows:
            lines = [f"{row['verdict']:5}{row['check']:15}{row['found']}"]
            lines += [f"{'':20}{row['hint']}"] if row["hint"] and row["verdict"] != "ok" else []
            for line in lines:
                terminal.write(folded(line, terminal.room(), 20) + "\n")
    else:
        terminal.write(terminal.listing("doctor", _FINDINGS, output).render(rows))
    if any(row["verdict"] == "bad" for row in rows):
        raise typer.Exit(BAD_EXIT_CODE)


# The verb devices: what computes here, and what joins it.
# Invariant: what is not reported is a dash or a question mark, never a zero.
# Never: looks at anything itself.


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
    from appliance.frame.protocol import DeviceFrame

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
        terminal.write("".join(f"{line}\n" for line in drawing(inventory)))


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


# The verb on the daemon's settings: `config show`.
# Invariant: what is shown is what serve would take, from the same sources, in the same order.
# Never: asks a daemon; a running one may have been told something else.


config = typer.Typer(
    help="The daemon's settings.", no_args_is_help=True, callback=terminal.of_this_machine
)


@config.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also show what set each one.")] = False,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show every setting with the value that `penstock serve` would use."""
    written = _for_people if output.is_for_people else _plain
    rows = [_row(found, written) for found in explain({"config": config_file})]
    columns = [TableColumn("SETTING", "name"), TableColumn("VALUE", "value")]
    columns += [TableColumn("ORIGIN", "origin", is_wide=not origin)]
    columns += [TableColumn("RELOADS", "is_reloadable", yes_or_no, is_wide=True)]
    columns += [TableColumn("MEANING", "about", is_wide=True)]
    terminal.write(terminal.listing("config", tuple(columns), output).render(rows))


def _row(found: FoundSetting, written: Callable[[FoundSetting], Any]) -> dict[str, Any]:
    setting = _setting(found)
    return {
        "name": found.name,
        "value": written(found),
        "origin": found.origin,
        "is_reloadable": setting.is_reloadable and found.name in SETTINGS,
        "about": setting.about,
    }


def _setting(found: FoundSetting) -> Setting:
    """Find the setting; `models.small.dtype` is the setting `dtype` of one model."""
    return SETTINGS[found.name.rpartition(".")[2]]


def _for_people(found: FoundSetting) -> Any:
    """Format the value as a user would type it: a size or a time with its unit."""
    parse = _setting(found).parse
    if parse is a_duration:
        return f"{found.value:g}s"
    if parse is on_or_off:
        return "on" if found.value else "off"
    if parse is parse_bytes and found.value is not None:
        return size_setting(found.value)
    return _plain(found)


def _plain(found: FoundSetting) -> Any:
    """Format the value for JSON; an address and a list as in the file and the environment."""
    match found.value:
        case None | bool() | int() | float():
            return found.value
        case (str(host), int(port)):
            return f"{host}:{port}"
        case tuple() as pairs if _setting(found).parse is some_weights:
            return ",".join(f"{name}={weight:g}" for name, weight in pairs)
        case tuple() as names:
            return ",".join(map(str, names))
    return str(found.value)
