"""Define the verbs on stored data: cache, db, record.

Owns: how ages and sizes are written on the command line; the descriptions of the files; writing a
recording.
Invariant: reading verbs work with and without a running daemon; clear touches nothing of a running
daemon; a recording is complete, or absent.
Never: overwrites a file; prints a hash, or anything that reveals a prompt.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from appliance.cli import activity, listings, terminal
from appliance.cli.activity import StateDir
from appliance.cli.tables import Format, printable
from appliance.cli.terminal import Host, Output, ProgressLine
from appliance.client import Client, DaemonUnreachable, ReplyError
from appliance.configuration import client_settings, paths
from appliance.configuration.setting_kinds import parse_bytes
from appliance.frame.figures import size, things
from appliance.frame.protocol import iso_time
from engine.errors import AlreadyRunning, FileError, PenstockError, RequestError, UsageError

# engine.offload costs 20 ms, so it comes with the verbs.

SsdDir = Annotated[str | None, typer.Option(help="Folder of the SSD cache.")]

_T = TypeVar("_T")

cache = typer.Typer(
    help="The SSD cache: KV blocks on disk.",
    no_args_is_help=True,
    callback=terminal.of_this_machine,
)


class Damaged(PenstockError):
    """A cached block differs from what was stored."""

    exit_code = 8


@cache.command("stats")
def cache_stats(
    ssd_dir: SsdDir = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> None:
    """Show the size and age of the cache."""
    from engine.offload.files import shares_of, slab_bytes, survey

    folder = _folder(ssd_dir, state_dir)
    found = [contents for _, contents in _guarded(survey(folder), folder)]
    slabs = [contents for contents in found if contents is not None]
    filled = [each for each in (contents.summary for contents in slabs) if each.num_blocks]
    content: dict[str, Any] = {
        "folder": str(folder),
        "files": len(found),
        "file_bytes": slab_bytes(folder),
        "blocks": sum(each.num_blocks for each in filled),
        "block_bytes": sum(each.block_bytes for each in filled),
        "models": [
            {"model": printable(each.model), "blocks": each.num_blocks, "bytes": each.num_bytes}
            for each in shares_of(filled)
        ],
        "oldest": iso_time(min(each.oldest_s for each in filled)) if filled else None,
        "newest": iso_time(max(each.age[0] for each in filled)) if filled else None,
        "damaged_files": len(found) - len(slabs),
        # None: only headers are read here, none of which is damaged; verify reads the blocks
        "damaged_blocks": sum(len(contents.damaged) for contents in slabs) or None,
    }
    shares = [
        f"{each['model'] or 'unknown'}: {things(each['blocks'], 'block')}, {size(each['bytes'])}"
        for each in content["models"]
    ]
    facts = content | {"models": "; ".join(shares) or None}
    terminal.show("cache", content, output, lambda: listings.facts(facts))


@cache.command()
def verify(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Read every block on disk; exits with 8 if one is damaged.

    A daemon finds damage before it uses a block. Blocks that it writes meanwhile may look damaged.
    """
    from engine.offload.files import check_records, survey

    folder, num_sound, num_damaged = _folder(ssd_dir, state_dir), 0, 0
    line = ProgressLine("read")
    found = list(_guarded(survey(folder), folder))
    total = sum(contents.head.num_bytes for _, contents in found if contents is not None)
    num_bytes, began_s = 0, time.monotonic()
    for path, contents in found:
        if contents is None:
            num_damaged += 1
            continue
        num_damaged += len(contents.damaged)
        for is_sound in _guarded(check_records(path, contents), path):
            num_sound += is_sound
            num_damaged += not is_sound
        num_bytes += contents.head.num_bytes
        line.show(num_bytes, total, num_bytes / (time.monotonic() - began_s))
    line.end()
    if num_damaged:
        what = f"{num_damaged} damaged, {things(num_sound, 'block')} sound"
        hint = "the daemon drops them when it reads them; check the disk in the kernel log"
        raise Damaged(what, where=str(folder), hint=hint)
    terminal.write(f"{things(num_sound, 'block')} sound\n")


@cache.command()
def clear(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Delete all blocks on disk; the daemon must not be running."""
    from engine.offload.files import BusyError, delete_slabs

    if ssd_dir is None and state_dir is None:
        hint = "run it there; for this machine's cache use --ssd-dir"
        terminal.needs_this_machine("what it deletes", hint)
    folder = _folder(ssd_dir, state_dir)
    try:
        num_bytes = delete_slabs(folder)
    except BusyError as error:
        hint = "stop it first, or serve with ssd_cache off"
        raise AlreadyRunning("a daemon uses it", where=str(folder), hint=hint) from error
    except OSError as error:
        hint = "run it as the user who serves"
        raise FileError("cannot delete", error, where=str(folder), hint=hint) from error
    terminal.write(f"deleted {size(num_bytes)} in {printable(folder)}\n")


def _folder(ssd_dir: str | None, state_dir: str | None) -> Path:
    """Return the folder of blocks; a named folder must exist, the default need not."""
    for named in filter(None, (ssd_dir, state_dir)):
        terminal.named_folder(named)
    return client_settings.ssd_folder(ssd_dir, state_dir, warn=terminal.passed_over)


def _guarded(found: Iterator[_T], where: Path) -> Iterator[_T]:
    """Yield the items, turning the disk's errors into errors for people."""
    try:
        yield from found
    except OSError as error:
        named, hint = str(error.filename or where), "run it as the user who serves"
        raise FileError("cannot read", error, where=named, hint=hint) from error


# The verbs on the request log's file: path, stats, export, prune.
# Invariant: each works with and without a running daemon.
# Never: overwrites a file, or deletes anything that was not named by an age or a size.


# appliance.log.store costs 70 ms, so it comes with the verbs.

_DAYS_BY_UNIT = {"d": 1, "w": 7, "m": 30, "y": 365}

db = typer.Typer(help="The request log.", no_args_is_help=True, callback=terminal.of_this_machine)


@db.command("path")
def show_path(state_dir: StateDir = None) -> None:
    """Print the path of the request log."""
    terminal.write(f"{_path(state_dir)}\n")


@db.command("stats")
def db_stats(state_dir: StateDir = None, output: Output = Format.TABLE) -> None:
    """Show the log's size, rows and time range."""
    from appliance.log import store as log_store

    content = log_store.stats(_path(state_dir))
    content["migration"] = content.pop("schema")  # a document's own `schema` is its form
    terminal.show("db", content, output, lambda: listings.facts(content))


@db.command()
def export(
    file: Annotated[Path, typer.Argument(help="New file.")],
    state_dir: StateDir = None,
) -> None:
    """Copy the log to a new SQLite file."""
    from appliance.log import store as log_store

    log_store.export(_path(state_dir), file)
    terminal.write(f"exported to {printable(file)}\n")


@db.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Delete rows older than e.g. 30d or 8w.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(help="Then delete the oldest rows until the log is smaller than e.g. 2GiB."),
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


# `penstock record`: an incident into one file, which the console replays anywhere.
# Invariant: the file is there whole, readable by its owner alone, or not at all.
# Never: overwrites a file; takes the text of a prompt.


DEFAULT_SINCE = "30m"
BUILD_TIMEOUT_S = 120.0


def record(
    file: Annotated[Path, typer.Option("--output", "-o", help="New file.")],
    since: activity.Since = DEFAULT_SINCE,
    until: activity.Until = None,
    host: Host = None,
    state_dir: activity.StateDir = None,
) -> None:
    """Save the console's history to a file for `penstock top --replay FILE`.

    The daemon keeps the last three days. Without a daemon the log's file is read.
    """
    if str(file) == "-":
        hint = "name a file, as -o incident.rec"
        raise UsageError("a recording cannot be written to a pipe", where="-o -", hint=hint)
    asked = {"since": since, "until": until}
    query = {name: value for name, value in asked.items() if value is not None}
    client = terminal.client(host, timeout_s=BUILD_TIMEOUT_S)
    with _appearing(file) as unfinished:
        try:
            _download(client, query, unfinished)
        except DaemonUnreachable as error:
            _extract(activity.log_file(client, state_dir, error), query, unfinished)
        summary = _summary(unfinished)
    terminal.write(f"{summary}\npenstock top --replay {printable(file)} shows it\n")


def _download(client: Client, query: dict[str, str], target: Path) -> None:
    with target.open("wb") as sink:
        for chunk in client.chunks("/v1/penstock/recording", query):
            sink.write(chunk)


def _extract(log_path: Path, query: dict[str, str], target: Path) -> None:
    from appliance.log.query import span_query
    from appliance.log.writer import write_recording  # 70 ms that only a missing daemon costs

    try:
        target.write_bytes(b"")
        write_recording(log_path, target, span_query(query))
    except RequestError as error:
        raise ReplyError(str(error), status=error.status, code=error.code) from error


def _summary(path: Path) -> str:
    """Summarise a recording by opening it as the console will."""
    from appliance.frame.recording import open_recording

    with closing(open_recording(path)) as db:
        first, last, num_frames = db.execute(
            "SELECT min(at), max(at), count(*) FROM frames"
        ).fetchone()
        num_requests, num_events = (
            db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("requests", "events")
        )
    counts = ((num_frames, "frame"), (num_requests, "request"), (num_events, "event"))
    held = ", ".join(things(number, noun) for number, noun in counts)
    return f"{printable(first)} to {printable(last)}: {held}"


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Make a private file beside the path, renamed to it when the block succeeds.

    Raises:
        FileError: the path exists, or nothing can be written there.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    hint = "name a new file in a folder that you can write to"
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield unfinished
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.rename(unfinished, path)
    except OSError as error:
        raise FileError("cannot write the recording", error, where=str(path), hint=hint) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
