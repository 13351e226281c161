"""The verbs on the machine: doctor, devices.

Owns: how findings and devices are listed.
Invariant: doctor ends with 8 if something was bad, else with 0.
Never: looks at anything itself.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.tables import Column, Format
from appliance.cli.terminal import Host, Output
from appliance.cli.text import DASH, count, in_unit, size, word

BAD_EXIT_CODE = 8
_READING_S = 0.25
"""Between two readings of an energy counter; power is their difference."""


def _reasons(value: Any) -> str:
    return DASH if value is None else word(", ".join(value) or "no")


def _per_s(value: float | None) -> str:
    return DASH if value is None else f"{size(value)}/s"


_FINDINGS = (
    Column("CHECK", "check"),
    Column("VERDICT", "verdict"),
    Column("FOUND", "found"),
    Column("WHAT TO DO", "hint"),
)
_DEVICES = (
    Column("DEVICE", "name"),
    Column("KIND", "kind"),
    Column("POWER", "power_w", in_unit("W")),
    Column("LIMIT", "power_limit_w", in_unit("W")),
    Column("TEMP", "temperature_c", in_unit("C")),
    Column("CLOCK", "clock_mhz", in_unit("MHz")),
    Column("BUSY", "utilization_ratio", in_unit("%", 100)),
    Column("MEMORY", "memory_used_bytes", size),
    Column("OF", "memory_total_bytes", size),
    Column("THROTTLED", "throttle_reasons", _reasons),
    Column("XID", "last_xid", count),
    Column("POWER BY", "power_source", is_wide=True),
    Column("NOW", "power_instant_w", in_unit("W"), is_wide=True),
    Column("MEM CLOCK", "memory_clock_mhz", in_unit("MHz"), is_wide=True),
    Column("SM", "sm_ratio", in_unit("%", 100), is_wide=True),
    Column("TENSOR", "tensor_ratio", in_unit("%", 100), is_wide=True),
    Column("MEM BW", "memory_bandwidth_ratio", in_unit("%", 100), is_wide=True),
    Column("PCIE IN", "pcie_rx_bytes_per_s", _per_s, is_wide=True),
    Column("PCIE OUT", "pcie_tx_bytes_per_s", _per_s, is_wide=True),
    Column("NVLINK IN", "nvlink_rx_bytes_per_s", _per_s, is_wide=True),
    Column("NVLINK OUT", "nvlink_tx_bytes_per_s", _per_s, is_wide=True),
    Column("MODEL", "model", is_wide=True),
    Column("UUID", "uuid", is_wide=True),
)


def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="As serve takes it.")] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    host: Host = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write a file for a report: no prompts, no keys.", metavar="FILE"),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Look at this machine, the settings, the log and the daemon; say what is wrong and what to do.

    Ends with 8 if something is bad, and with 0 if it serves.
    """
    from appliance.doctor import examine

    settings = {"model": model, "config": config_file}
    findings = list(examine(settings, lambda: terminal.client(host)))
    if bundle is not None:
        from appliance.bundle import write_bundle

        parts = write_bundle(bundle, settings, findings, lambda: terminal.client(host))
        terminal.note(f"wrote {bundle}; it has {', '.join(parts)}")
    rows = [asdict(each) for each in findings]
    if output is Format.TABLE:
        for row in rows:
            terminal.write(f"{row['verdict']:5}{row['check']:15}{row['found']}\n")
            if row["hint"] and row["verdict"] != "ok":
                terminal.write(f"{'':20}{row['hint']}\n")
    else:
        terminal.write(terminal.listing("doctor", _FINDINGS, output).render(rows))
    if any(row["verdict"] == "bad" for row in rows):
        raise typer.Exit(BAD_EXIT_CODE)


def devices(output: Output = Format.TABLE) -> None:
    """List what computes here and what it reports of itself; - is not reported."""
    import msgspec

    from appliance.devices.machine import Devices
    from appliance.placement import available_cores
    from appliance.protocol import DeviceFrame

    machine = Devices.of_machine()
    machine.read(time.monotonic_ns())
    time.sleep(_READING_S)
    cores = DeviceFrame(name=f"cores {', '.join(map(str, available_cores()))}", kind="cpu")
    rows = msgspec.to_builtins([*machine.read(time.monotonic_ns()), cores])
    terminal.write(terminal.listing("devices", _DEVICES, output).render(rows))
