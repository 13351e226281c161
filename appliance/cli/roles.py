"""The verb that looks at and switches what the workers are for.

Owns: its flags.
Invariant: without anything to change it only looks; what it prints is what the daemon then has.
Never: knows what the roles mean; `serve --help` and the daemon do.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import pages, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Host, Output
from appliance.configuration.settings import ROLES


def roles(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar=f"[{'|'.join(ROLES)}]",
            help="What to switch to.",
            autocompletion=lambda incomplete: [r for r in ROLES if r.startswith(incomplete)],
        ),
    ] = None,
    slo_ttft_ms: Annotated[
        int | None, typer.Option(min=0, help="Target for the first token; 0 is relative.")
    ] = None,
    slo_itl_ms: Annotated[
        int | None, typer.Option(min=0, help="Target for the gaps; 0 is relative.")
    ] = None,
    host: Host = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the workers' roles and targets, or change them while everything runs."""
    client = terminal.client(host)
    asked = {"roles": wanted, "slo_ttft_ms": slo_ttft_ms, "slo_itl_ms": slo_itl_ms}
    change = {name: value for name, value in asked.items() if value is not None}
    if change:
        content: dict[str, Any] = client.post("/v1/penstock/roles", change)
    else:
        frame = client.get("/v1/penstock/state")
        content = {name: frame.get(name) for name in asked}
    terminal.show("roles", content, output, lambda: pages.roles_text(content))
