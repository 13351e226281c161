"""Define the verbs on API keys: new, add, list.

Invariant: a key is shown once; its file holds a hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import listings, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Output
from appliance.configuration import client_settings
from appliance.http import api_keys
from engine.errors import UsageError
from engine.printable import printable

keys = typer.Typer(help="API keys for clients on TCP.", no_args_is_help=True)


@keys.callback()
def keys_group() -> None:
    """API keys for clients on TCP."""


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key's user in the log.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, user or operator.")] = "user",
) -> None:
    """Make a key; its line for the file goes to stdout, the key itself to stderr, once."""
    key, line = api_keys.new_key(name, role)
    terminal.write(line + "\n")
    terminal.note(f"the key (shown only this once): {key}")


@keys.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="Name of the key's user in the log.")],
    file: Annotated[
        str, typer.Option("--file", metavar="FILE", help="File of keys; created with mode 600.")
    ],
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, user or operator.")] = "user",
) -> None:
    """Make a key and add it to a file; the key itself goes to stdout, once."""
    key = api_keys.add_key(Path(file), name, role)
    terminal.write(key + "\n")
    terminal.note(f"added {name} ({role}) to {printable(file)}; this key is not shown again")
    terminal.note("a running daemon reads it on SIGHUP (systemctl reload, kill -HUP)")


@keys.command("list")
def list_keys(
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="File of keys. Default: the one of api_keys."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """List the names and roles of a file's keys."""
    found = api_keys.read_keys(_file_in_use() if file is None else file)
    rows = [{"name": key.name, "role": key.role.name.lower()} for key in found]
    terminal.write(terminal.listing("keys", listings.KEYS, output).render(rows))


def _file_in_use() -> Path:
    """Find the file that a start from this shell would read.

    Raises:
        UsageError: it would read none.
    """
    found = client_settings.load_asked({}).api_keys
    if found is None:
        raise UsageError("no file of keys is set", hint="name it: --file FILE, or set api_keys")
    return found
