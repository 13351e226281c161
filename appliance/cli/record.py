"""Define `penstock record`: write an incident to a file that the console replays.

Invariant: the file is complete and readable by its owner alone, or absent.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import activity, terminal
from appliance.cli.new_file import appearing
from appliance.cli.terminal import Host
from appliance.client.calls import Client, DaemonUnreachable, ReplyError
from appliance.observe.frame.figures import things
from engine.errors import RequestError, UsageError
from engine.printable import printable

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
    with appearing(file, "the recording") as unfinished:
        try:
            _download(client, query, unfinished)
            activity.note_gap(client)
        except DaemonUnreachable as error:
            _extract(activity.log_file(client, state_dir, error), query, unfinished)
        summary = _summary(unfinished)
    terminal.write(f"{summary}\npenstock top --replay {printable(file)} shows it\n")


def _download(client: Client, query: dict[str, str], target: Path) -> None:
    with target.open("wb") as sink:
        for chunk in client.chunks("/v1/penstock/recording", query):
            sink.write(chunk)


def _extract(log_path: Path, query: dict[str, str], target: Path) -> None:
    from appliance.observe.log.query import span_query
    from appliance.observe.log.recording_copy import (
        write_recording,  # 70 ms that only a missing daemon costs
    )

    try:
        target.write_bytes(b"")
        write_recording(log_path, target, span_query(query))
    except RequestError as error:
        raise ReplyError(str(error), status=error.status, code=error.code) from error


def _summary(path: Path) -> str:
    """Summarise a recording by opening it as the console will."""
    from appliance.observe.frame.recording import open_recording

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
