"""Define the verbs on the machine's profile: show, measure, clear.

Invariant: show and clear work with and without a running daemon; measure asks the daemon.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.activity import StateDir
from appliance.cli.tables import Format, Listing, TableColumn
from appliance.cli.terminal import Host, Output, ProgressLine
from appliance.client.address import UnixAddress
from appliance.configuration import client_settings, paths
from appliance.observe.frame.figures import things
from engine.errors import UsageError
from engine.profile.facts import DECODE_MS, DISK_BYTES_PER_S, LINK_BYTES_PER_S, MANY, PROMPT_MS

# appliance.fleet.profile_store costs 70 ms, so it comes with the verbs.

POLL_S = 0.5
PATH = "/v1/penstock/measure"
MIN_SAMPLES = 5
"""Samples that have a spread."""

profile = typer.Typer(
    help="What this machine does, measured once and kept.",
    no_args_is_help=True,
)


_WHAT = {
    PROMPT_MS: ("prefill step", "ms"),
    DECODE_MS: ("decode step", "ms"),
    DISK_BYTES_PER_S: ("disk read", "B/s"),
    LINK_BYTES_PER_S: ("link", "B/s"),
}
_ON = re.compile(r"(.+) on (\d+)")


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def _whole(value: Any) -> str:
    return f"{value:,}" if value else "-"


COLUMNS = (
    TableColumn("MODEL", "model", rank=3),
    TableColumn("DTYPE", "dtype", is_wide=True),
    TableColumn("MACHINE", "machine", is_wide=True),
    TableColumn("KERNELS", "build", is_wide=True),
    TableColumn("DEVICES", "placement", is_wide=True),
    TableColumn("WHAT", "what", lambda what: _WHAT[what][0]),
    TableColumn("WHERE", "place", lambda place: _ON.sub(r"\1, cores: \2", place)),
    TableColumn("SIZE", "size", _whole),
    TableColumn("CONTEXT", "depth", _whole),
    TableColumn("MEDIAN", "value", _figure),
    TableColumn("UNIT", "unit"),
    TableColumn("LOW", "low", _figure, rank=2),
    TableColumn("HIGH", "high", _figure, rank=2),
    TableColumn("SAMPLES", "samples", _whole, rank=4),
    TableColumn("DATE", "at", rank=5),
)


@profile.command("show")
def show_profile(state_dir: StateDir = None, output: Output = Format.TABLE) -> None:
    """Show every measured fact of this machine and its models.

    SIZE is a prefill step's tokens or a decode step's sequences, CONTEXT the tokens before them in
    each sequence, WHERE the worker and the cores that it used. A tenth of the samples are below
    LOW, a tenth above HIGH; fewer than 5 samples have neither.
    """
    terminal.of_this_machine()
    found = [row for row in _store(state_dir).rows() if row.key.what in _WHAT]
    rows = []
    for scope, key, fact in found:
        low, high = (fact.low, fact.high) if len(fact.samples) >= MIN_SAMPLES else (None, None)
        figures = {"value": fact.value, "low": low, "high": high, "samples": len(fact.samples)}
        more = {"unit": _WHAT[key.what][1], "at": fact.at}
        rows.append({**scope._asdict(), **key._asdict(), **figures, **more})
    colour, room = terminal.has_colour(), terminal.room()
    terminal.write(Listing("profile", COLUMNS, output, colour=colour, room=room).render(rows))
    num_few = sum(len(row.fact.samples) < MANY for row in found)
    if num_few and output.is_for_people:
        about = f"{num_few} of {things(len(found), 'fact')} have fewer than {MANY} samples"
        terminal.note(f"penstock: {about}; requests and idle time add more")


@profile.command()
def measure(
    timeout: Annotated[float, typer.Option(help="Maximum seconds to wait.")] = 60.0,
    host: Host = None,
) -> None:
    """Have the daemon measure now what its profile lacks; requests go first."""
    client, line = terminal.client(host), ProgressLine()
    state = client.post(PATH)
    end_s = time.monotonic() + timeout
    with client.reading():
        while state["num_unknown"] and state["is_going_on"] and time.monotonic() < end_s:
            line.say(f"{things(state['num_unknown'], 'size')} to go")
            time.sleep(POLL_S)
            state = client.get(PATH)
        line.end()
        left = f", {state['num_unknown']} not measured" if state["num_unknown"] else ""
        known = things(state["num_facts"], "fact")
    terminal.write(f"{known} known{left}; `penstock profile show` lists them\n")


@profile.command("clear")
def clear_profile(state_dir: StateDir = None) -> None:
    """Forget every fact; the next start measures again while idle."""
    if state_dir is None:
        hint = "run it there; for this machine's profile use --state-dir"
        terminal.needs_this_machine("what it forgets", hint)
    terminal.write(f"forgot {things(_store(state_dir).clear(), 'fact')}\n")


def _store(state_dir: str | None) -> Any:
    """Open the profile in a state folder.

    Raises:
        UsageError: none is named, and the daemon that clients find uses another.
    """
    from appliance.fleet.profile_store import ProfileStore

    folder = client_settings.state_dir(state_dir, warn=terminal.passed_over)
    if state_dir is None and _is_of_another(folder):
        raise UsageError(
            "the running daemon has another state folder",
            where=str(folder),
            hint="name its folder with --state-dir; `penstock doctor` shows the daemon's",
        )
    return ProfileStore(folder)


def _is_of_another(folder: Path) -> bool:
    """Say whether a daemon listens where clients look, and uses another state folder."""
    where = terminal.client(None).address
    if not isinstance(where, UnixAddress) or paths.is_of_socket(folder, where.path):
        return False
    try:
        where.dial(1.0).hang_up()
    except OSError:
        return False
    return True
