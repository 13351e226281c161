"""The verb doctor.

Owns: how findings are listed.
Invariant: doctor ends with 8 if something was bad, else with 0.
Never: looks at anything itself.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.tables import Format, TableColumn
from appliance.cli.terminal import Host, Output

BAD_EXIT_CODE = 8

_FINDINGS = (
    TableColumn("CHECK", "check"),
    TableColumn("VERDICT", "verdict"),
    TableColumn("FOUND", "found"),
    TableColumn("WHAT TO DO", "hint"),
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
    from appliance.doctor.checks import examine

    settings = {"model": model, "config": config_file}
    findings = list(examine(settings, lambda: terminal.client(host)))
    if bundle is not None:
        from appliance.doctor.bundle import write_bundle

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
