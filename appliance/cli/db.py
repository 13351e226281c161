"""The verbs on the request log's file: path, stats, export, prune.

Owns: how ages and sizes are written on the command line.
Invariant: each works with and without a running daemon.
Never: overwrites a file, or deletes anything that was not named by an age or a size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import listings, terminal
from appliance.cli.history import StateDir
from appliance.cli.tables import Format, printable
from appliance.cli.terminal import Output
from appliance.configuration import config
from appliance.configuration.setting_kinds import parse_bytes
from appliance.frame.figures import things

# appliance.log.store costs 70 ms, so it comes with the verbs.

_DAYS_BY_UNIT = {"d": 1, "w": 7, "m": 30, "y": 365}

db = typer.Typer(help="The request log's file.", no_args_is_help=True)


@db.command("path")
def show_path(state_dir: StateDir = None) -> None:
    """Print where the file is, or would be."""
    terminal.write(f"{_path(state_dir)}\n")


@db.command()
def stats(state_dir: StateDir = None, output: Output = Format.TABLE) -> None:
    """Show the file's sizes, its rows and the time that it covers."""
    from appliance.log import store as log_store

    content = log_store.stats(_path(state_dir))
    content["migration"] = content.pop("schema")  # a document's own `schema` is its form
    terminal.show("db", content, output, lambda: listings.facts(content))


@db.command()
def export(
    file: Annotated[Path, typer.Argument(help="The copy; it must not exist yet.")],
    state_dir: StateDir = None,
) -> None:
    """Write a complete, compact copy that any SQLite tool can open."""
    from appliance.log import store as log_store

    log_store.export(_path(state_dir), file)
    terminal.write(f"exported to {printable(file)}\n")


@db.command()
def prune(
    older_than: Annotated[str | None, typer.Option(help="Forget what is older: 30d, 8w.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Then the oldest beyond: 2GiB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Forget old requests and events; give the space back."""
    if older_than is None and max_size is None:
        raise typer.BadParameter("say what to forget: --older-than, --max-size")
    from appliance.log import store as log_store

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
    return config.log_path(config.state_dir(state_dir, warn=terminal.passed_over))


def _days(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([dwmy])", text, re.ASCII)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age; give 30d, 8w, 6m or 1y")
    return int(match[1]) * _DAYS_BY_UNIT[match[2]]


def _num_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no size; give {error}") from error
