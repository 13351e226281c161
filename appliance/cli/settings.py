"""The verb on the daemon's settings: `config show`.

Owns: how a setting's value is written, which is as its file would have it. Called by: main.
Invariant: what is shown is what serve would take, from the same sources, in the same order.
Never: asks a daemon; a running one may have been told something else.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.tables import Column, Format
from appliance.cli.terminal import Output
from appliance.config import SETTINGS, Found, explain

config = typer.Typer(help="The daemon's settings.", no_args_is_help=True)


@config.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="And what set each one.")] = False,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show every setting as serve would find it here and now."""
    rows = [_row(found) for found in explain({"config": config_file})]
    columns = [Column("SETTING", "name"), Column("VALUE", "value")]
    columns += [Column("ORIGIN", "origin", is_wide=not origin)]
    columns += [Column("RELOADS", "is_reloadable", is_wide=True)]
    columns += [Column("MEANING", "about", is_wide=True)]
    terminal.write(terminal.listing("config", tuple(columns), output).render(rows))


def _row(found: Found) -> dict[str, Any]:
    setting = SETTINGS[found.name]
    return {
        "name": found.name,
        "value": _plain(found.value),
        "origin": found.origin,
        "is_reloadable": setting.is_reloadable,
        "about": setting.about,
    }


def _plain(value: object) -> Any:
    """As JSON has it; an address and a list as the file and the environment have them."""
    match value:
        case None | bool() | int():
            return value
        case (str(host), int(port)):
            return f"{host}:{port}"
        case tuple():
            return ",".join(map(str, value))
    return str(value)
