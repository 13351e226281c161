"""Define the verbs on what is logged: log, events, usage.

Invariant: the daemon and the file take equal parameters; a reader of the file is told so.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from appliance.cli import listings, short_ids, terminal
from appliance.cli.tables import Format, Listing, TableColumn, within
from appliance.cli.terminal import Host, Output
from appliance.client.address import UnixAddress
from appliance.client.calls import (
    Client,
    ClientError,
    DaemonAbsent,
    DaemonUnreachable,
    ReplyError,
)
from appliance.configuration import client_settings, paths
from appliance.observe.frame.figures import things
from engine.errors import RequestError
from engine.printable import printable

POLL_S = 1.0
BATCH_ROWS = "1000"

StateDir = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder of the log, used if no daemon answers.")
]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new ones.")]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Start of the time range: 1h, 2d (ago) or 2026-01-31T12:00."),
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help="End of the time range, in the same forms.")
]
Limit = Annotated[
    int,
    typer.Option("-n", "--limit", callback=within(1, 10_000), help="How many, the newest ones."),
]
Rows = list[dict[str, Any]]


class Priority(StrEnum):
    """How much an event matters, from the least."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class UsageKey(StrEnum):
    """What usage can be summed up by."""

    USER = "user"
    MODEL = "model"
    DAY = "day"


def log(
    limit: Limit = 20,
    follow: Follow = False,
    since: Since = None,
    until: Until = None,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="NAME", help="Only this user's.")
    ] = None,
    errors: Annotated[
        bool,
        typer.Option("--errors", help="Only failed or cut-off requests; excludes cancelled ones."),
    ] = False,
    slow: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="Only slow ones, e.g. 'ttft>500' (ms) or 'e2e>2s'."),
    ] = None,
    host: Host = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> None:
    """Show finished requests, newest last; read from the log's file if no daemon runs."""
    wanted = {
        "limit": str(limit),
        "since": since,
        "until": until,
        "user": user,
        "errors": "true" if errors else None,
        "slow": slow,
    }
    source = _Source("log", terminal.client(host), state_dir, wanted)
    _print(source, listings.LOG, output, follow)


def events(
    limit: Limit = 20,
    follow: Follow = False,
    since: Since = None,
    until: Until = None,
    priority: Annotated[
        Priority | None, typer.Option("-p", "--priority", help="At least this severity.")
    ] = None,
    host: Host = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> None:
    """Show events (restarts, alerts, changed settings), newest last."""
    wanted = {"limit": str(limit), "since": since, "until": until, "severity": priority}
    source = _Source("events", terminal.client(host), state_dir, wanted)
    _print(source, listings.EVENTS, output, follow)


def usage(
    by: Annotated[UsageKey, typer.Option(help="What to sum by.")] = UsageKey.USER,
    since: Since = None,
    until: Until = None,
    host: Host = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> None:
    """Sum up requests and tokens by user, model or day."""
    wanted = {"by": by, "since": since, "until": until}
    client = terminal.client(host)
    source = _Source("usage", client, state_dir, wanted)
    rows = source.read()
    with client.reading():
        terminal.write(terminal.listing("usage", listings.usage(by), output).render(rows))
    source.note_gap()


def request_from_file(
    request_id: str, client: Client, state_dir: str | None, error: DaemonUnreachable
) -> dict[str, Any]:
    """Read a request from the log's file, in the daemon's form.

    Raises:
        DaemonUnreachable: `error`, if the file is missing, too.
        ReplyError: the log does not know it.
        AmbiguousId: it is the beginning of several.
    """
    path = log_file(client, state_dir, error)
    import msgspec

    from appliance.observe.frame.logged_requests import ended_frame
    from appliance.observe.log.query import RowQuery
    from appliance.observe.log.reader import read_row, read_rows

    def read(request_id: str) -> dict[str, Any]:
        row = read_row(path, request_id)
        if row is None:
            raise ReplyError("no such request in the log", status=404, code="request_not_found")
        return dict(msgspec.to_builtins(ended_frame(row)))

    def ids() -> list[str]:
        newest = read_rows(path, RowQuery(limit=short_ids.SEARCHED_ROWS))
        return [str(row["id"]) for row in newest]

    return short_ids.with_id(request_id, read, ids)


class _Source:
    """Read a verb's rows from the daemon, or from the file if no daemon answers."""

    def __init__(
        self, verb: str, client: Client, state_dir: str | None, wanted: dict[str, str | None]
    ) -> None:
        self.verb = verb
        self.client = client
        self._state_dir = state_dir
        self._wanted = {name: value for name, value in wanted.items() if value is not None}
        self._file: Path | None = None

    def read(self, **more: str) -> Rows:
        """Read the rows for the parameters and `more`.

        Raises:
            ClientError: a parameter is wrong, or neither daemon nor file is available.
            PenstockError: the file cannot be read.
        """
        query = {**self._wanted, **more}
        try:
            rows = self.client.rows(f"/v1/penstock/{self.verb}", query)
        except DaemonUnreachable as error:
            if self._file is None:
                self._file = log_file(self.client, self._state_dir, error)
            return _read_file(self.verb, self._file, query)
        self._file = None
        return rows

    def note_gap(self) -> None:
        """Say what the rows lack where the daemon cannot write its log."""
        if self._file is None:
            note_gap(self.client)


def note_gap(client: Client) -> None:
    """Say what the log lacks where the daemon cannot write it."""
    with suppress(ClientError), client.reading():
        if lacks := client.state().get("unwritten"):
            missing = f"{things(lacks['num_requests'], 'finished request')} missing here"
            terminal.note(printable(f"penstock: {lacks['reason']}; {missing}"))
            how = f"df -h {shlex.quote(lacks['folder'])}"
            terminal.note(printable(f"hint: free space there, or mend the disk: {how}"))


def _print(source: _Source, columns: tuple[TableColumn, ...], form: Format, follow: bool) -> None:
    """Print the rows, and if they are followed the new ones, until a signal."""
    if follow and form is Format.JSON:
        raise typer.BadParameter("-f never ends, so it prints lines: use -o ndjson")
    listing = terminal.listing(source.verb, columns, form)
    rows = source.read()
    with source.client.reading():
        terminal.write(listing.render(reversed(rows)))
    if not rows and form.is_for_people:
        terminal.note("penstock: nothing yet, or nothing that fits the options")
    source.note_gap()
    if follow:
        _follow(source, listing, rows)


def _follow(source: _Source, listing: Listing, rows: Rows) -> NoReturn:
    """Print the rows written after these, as they come."""
    cursor, newer = 0, rows
    while True:
        with source.client.reading():
            cursor = max((int(row["cursor"]) for row in newer), default=cursor)
        time.sleep(POLL_S)
        newer = source.read(after=str(cursor), limit=BATCH_ROWS)
        if newer:
            with source.client.reading():
                terminal.write(listing.render(newer))


def log_file(client: Client, state_dir: str | None, error: DaemonUnreachable) -> Path:
    """Return the log's file of a silent daemon, if it belongs to this machine's daemon."""
    folder = client_settings.state_dir(state_dir, warn=terminal.passed_over)
    path = paths.log_path(folder)
    if not isinstance(client.address, UnixAddress):
        raise error
    if not os.path.exists(path):
        what = "no requests yet: no daemon has run, and there is no request log"
        raise DaemonAbsent(what, where=str(path), hint=error.hint) from error
    other = "" if state_dir is not None else paths.socket_of(folder)
    if other and not paths.is_of_socket(folder, client.address.path):
        error.hint = f"{path} is of the daemon at {other}; name the folder of this one: --state-dir"
        raise error
    terminal.note(printable(f"penstock: no daemon at {error.where}; reading {path}"))
    return path


def _read_file(verb: str, path: Path, query: dict[str, str]) -> Rows:
    # 70 ms that only a missing daemon costs
    from appliance.observe.log import query as log_query
    from appliance.observe.log import reader

    readers: dict[str, Callable[[], Rows]] = {
        "log": lambda: reader.read_rows(path, log_query.row_query(query)),
        "events": lambda: reader.read_events(path, log_query.event_query(query)),
        "usage": lambda: reader.read_usage(path, log_query.usage_query(query)),
    }
    try:
        return readers[verb]()
    except RequestError as error:
        raise ReplyError(str(error), status=error.status, code=error.code) from error
