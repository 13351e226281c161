"""Define `penstock doctor`: list problems, and what mends each.

Invariant: it ends with 8 if something was bad, otherwise with 0.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.new_file import appearing
from appliance.cli.tables import Format, TableColumn, folded
from appliance.cli.terminal import Host, Output
from engine.printable import printable

BAD_EXIT_CODE = 8

_FINDINGS = (
    TableColumn("CHECK", "check"),
    TableColumn("VERDICT", "verdict"),
    TableColumn("FOUND", "found"),
    TableColumn("WHAT TO DO", "hint"),
)


def doctor(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Check this model.")
    ] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings.")
    ] = None,
    host: Host = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Also write a file for a bug report, without prompts and keys.", metavar="FILE"
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Also prove this machine's kernels, in seconds.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Check this machine, the settings, the log and the daemon; say what to fix, and how.

    Ends with 8 if something is bad, and with 0 if it serves.
    """
    from appliance.doctor.checks import examine

    if bundle is not None:
        terminal.needs_this_machine("a report", "run it there", host)
    settings = {"model": model, "config": config_file}
    if self_test:
        terminal.needs_this_machine("a self-test", "run it there", host)
    how = {"runs_self_test": self_test}
    findings = list(examine(settings, lambda: terminal.client(host), **how))
    if bundle is not None:
        from appliance.doctor.bundle import write_bundle

        with appearing(bundle, "the report") as unfinished:
            parts = write_bundle(unfinished, settings, findings, lambda: terminal.client(host))
        terminal.note(f"wrote {bundle}; it has {', '.join(parts)}")
    rows = [asdict(each) for each in findings]
    if output is Format.TABLE:
        for row in rows:
            lines = [f"{row['verdict']:5}{row['check']:15}{row['found']}"]
            lines += [f"{'':20}{row['hint']}"] if row["hint"] and row["verdict"] != "ok" else []
            for line in lines:
                terminal.write(folded(printable(line), terminal.room(), 20) + "\n")
    else:
        terminal.write(terminal.listing("doctor", _FINDINGS, output).render(rows))
    if any(row["verdict"] == "bad" for row in rows):
        raise typer.Exit(BAD_EXIT_CODE)
