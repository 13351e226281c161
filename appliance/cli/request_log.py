"""Define the verbs on the request log's file: path, stats, export, prune.

Invariant: each works with and without a running daemon.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import fact_pages, terminal
from appliance.cli.activity import StateDir
from appliance.cli.tables import Format
from appliance.cli.terminal import Output
from appliance.configuration import client_settings, paths
from appliance.configuration.setting_kinds import parse_bytes
from appliance.observe.frame.figures import things
from engine.printable import printable

_DAYS_BY_UNIT = {"d": 1, "w": 7, "m": 30, "y": 365}

db = typer.Typer(help="The request log.", no_args_is_help=True, callback=terminal.of_this_machine)


@db.command("path")
def show_path(state_dir: StateDir = None) -> None:
    """Print the path of the request log."""
    terminal.write(f"{_path(state_dir)}\n")


@db.command("stats")
def db_stats(state_dir: StateDir = None, output: Output = Format.TABLE) -> None:
    """Show the log's size, rows and time range."""
    from appliance.observe.log import store as log_store

    content = log_store.stats(_path(state_dir))
    content["migration"] = content.pop("schema")  # a document's own `schema` is its form
    terminal.show("db", content, output, lambda: fact_pages.facts(content))


@db.command()
def export(
    file: Annotated[Path, typer.Argument(help="New file.")],
    state_dir: StateDir = None,
) -> None:
    """Copy the log to a new SQLite file."""
    from appliance.observe.log import store as log_store

    log_store.export(_path(state_dir), file)
    terminal.write(f"exported to {printable(file)}\n")


@db.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Delete rows older than e.g. 30d or 8w.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Then delete the oldest rows until the log is smaller than e.g. 2GiB.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print how much would be deleted.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Delete old requests and events, and free their space."""
    if older_than is None and max_size is None:
        raise typer.BadParameter("name a limit: --older-than or --max-size")
    if state_dir is None:
        hint = "run it there; for this machine's log use --state-dir"
        terminal.needs_this_machine("what it forgets", hint)
    from appliance.observe.log import store as log_store

    pruned = log_store.prune(
        _path(state_dir),
        keep_days=None if older_than is None else _days(older_than),
        max_bytes=None if max_size is None else _num_bytes(max_size),
        dry_run=dry_run,
    )
    verb = "would forget" if dry_run else "forgot"
    terminal.write(
        f"{verb} {things(pruned.requests, 'request')}, {things(pruned.events, 'event')},"
        f" {things(pruned.frames, 'frame')}\n"
    )


def _path(state_dir: str | None) -> Path:
    return paths.log_path(client_settings.state_dir(state_dir, warn=terminal.passed_over))


def _days(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([dwmy])", text, re.ASCII)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age; give 30d, 8w, 6m or 1y")
    return int(match[1]) * _DAYS_BY_UNIT[match[2]]


def _num_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a size; give {error}") from error
