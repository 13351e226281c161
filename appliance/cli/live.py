"""Define the verbs on what runs now: ps, show, whoami, version, top.

Invariant: nothing changes in the daemon.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import fact_pages, listings, short_ids, terminal
from appliance.cli.activity import StateDir, request_from_file
from appliance.cli.completion import request_ids
from appliance.cli.tables import Format
from appliance.cli.terminal import Host, Output
from appliance.client.address import SshAddress, UnixAddress
from appliance.client.calls import ClientError, DaemonUnreachable
from engine.errors import UsageError
from engine.printable import printable
from engine.system.python_child import become_python

STARTING = "penstock: starting the console"
"""A line without an end, which the console erases before it draws."""


class State(StrEnum):
    """The phases of a request."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    PAUSED = "paused"
    DECODING = "decoding"
    FINISHED = "finished"


def ps(
    host: Host = None,
    show_all: Annotated[
        bool, typer.Option("-a", "--all", help="Also recently finished ones.")
    ] = False,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="NAME", help="Only this user's.")
    ] = None,
    state: Annotated[State | None, typer.Option(help="Only in this phase.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """List live requests with their phase."""
    client = terminal.client(host)
    frames = client.rows("/v1/requests")
    shown = [
        frame
        for frame in frames
        if (show_all or state is State.FINISHED or frame.get("phase") != "finished")
        and user in (None, frame.get("user"))
        and state in (None, frame.get("phase"))
    ]
    with client.reading():
        terminal.write(terminal.listing("ps", listings.REQUESTS, output).render(shown))
    if not shown and output.is_for_people:
        what = "no request" if user is None and state is None else "no such request"
        others = "; -a shows finished ones" if not show_all else ""
        terminal.note(f"penstock: {what} now{others}")


def show(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            help="From ps, log or top; the first characters are enough. Default: the last one.",
            autocompletion=request_ids,
        ),
    ] = short_ids.LAST,
    host: Host = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> None:
    """Show where one request's time went, stage by stage; live, or from the log."""
    client = terminal.client(host)
    sources = (partial(short_ids.recent, client), partial(short_ids.logged, client))
    try:
        frame = short_ids.with_id(request_id, client.request, *sources)
    except DaemonUnreachable as error:
        frame = request_from_file(request_id, client, state_dir, error)
    width, bar, room = terminal.width(), terminal.bar(), terminal.room()

    def page() -> str:
        return fact_pages.request_page(frame, width=width, bar=bar, room=room)

    with client.reading():
        terminal.show("show", frame, output, page)


def whoami(host: Host = None, output: Output = Format.TABLE) -> None:
    """Show your user name and role at the daemon, and what they permit."""
    client = terminal.client(host)
    content = client.get("/v1/penstock/whoami", has="role")
    with client.reading():
        terminal.show("whoami", content, output, lambda: fact_pages.facts(content))


def top(
    host: Host = None,
    once: Annotated[bool, typer.Option("--once", help="Print one page as text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    as_lines: Annotated[
        bool, typer.Option("--plain", help="Print plain lines instead of a screen.")
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Disable actions.")] = False,
    as_ascii: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII only.")] = False,
    no_mouse: Annotated[
        bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal, to copy text.")
    ] = False,
    replay: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replay a file that `penstock record` wrote.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start of the replay: 14:02:11 or +5m.")
    ] = None,
) -> None:
    """Open the live console, or replay a recording; plain text when piped."""
    wanted = {
        "--once": once,
        "--json": as_json,
        "--plain": as_lines,
        "--read-only": read_only,
        "--ascii": as_ascii,
        "--no-mouse": no_mouse,
    }
    flags = [flag for flag, is_wanted in wanted.items() if is_wanted]
    if replay is not None:
        flags += ["--at", at] if at else []
        become_python("-m", "tui", f"--replay={replay}", *flags)
    address = terminal.address(host)
    if isinstance(address, UnixAddress):
        path = os.fspath(address.path)
        if not (once or as_lines) and terminal.has_screen() and sys.stderr.isatty():
            sys.stderr.write(STARTING)  # its modules take a second, on a busy machine several
            sys.stderr.flush()
        become_python("-m", "tui", "--socket", path, *flags)
    if isinstance(address, SshAddress):  # the console runs there, on this terminal
        options = ("-t",) if sys.stdout.isatty() else ("-T",)
        os.execvp("ssh", address.command("top", *flags, options=options))
    raise UsageError(
        "the console needs the daemon's Unix socket",
        where=str(address),
        hint="run it on the daemon's machine, or with --host ssh://...",
    )


def version(host: Host = None, output: Output = Format.TABLE) -> None:
    """Show the versions of this command and of the running daemon."""
    from importlib import metadata  # 20 ms that only this verb needs

    content: dict[str, Any] = {"version": None, "daemon_version": None}
    with suppress(metadata.PackageNotFoundError):  # run from a source tree, not installed
        content["version"] = metadata.version("penstock")
    with suppress(ClientError):
        content["daemon_version"] = terminal.client(host).get("/version").get("version")
    theirs = content["daemon_version"]
    about = "" if theirs is None else f" (daemon {printable(theirs)})"
    line = f"penstock {content['version'] or '(not installed)'}{about}"
    terminal.show("version", content, output, lambda: line)
