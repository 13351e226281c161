"""Define status, as a page or a line, and metrics.

Invariant: --check ends with 0 only if the daemon would take a request and no alert is raised.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from appliance.cli import listings, terminal
from appliance.cli.status_page import line, page
from appliance.cli.tables import Format, for_terminal
from appliance.cli.terminal import Host, Output
from appliance.client.calls import Client, DaemonUnreachable, GenerationFailed
from appliance.observe.frame.figures import state_words

FAULT_EXIT_CODE = 8
_ENDED = "the journal and `penstock events` say why"
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def status(
    check: Annotated[
        bool, typer.Option("--check", help="Only print problems; exits with 8 if there are any.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    host: Host = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the daemon's state, alerts, queue, workers, KV cache and latency."""
    client = terminal.client(host)
    if check and watch:
        raise typer.BadParameter("--check ends, and --watch does not")
    if watch:
        _watch(client, output)
        return
    frame = client.state()
    with client.reading():
        if check:
            _check(frame, output)
            return
        terminal.show("status", frame, output, lambda: _page(frame))


def metrics(host: Host = None) -> None:
    """Print the metrics in Prometheus' format."""
    terminal.write(for_terminal(terminal.client(host).text("/metrics")))


def _check(frame: dict[str, Any], form: Format) -> None:
    """Print the alerts, and the state if that is the fault."""
    state = frame.get("state")
    faults = list(frame.get("alerts") or ())
    if state != "ready" and not any(each.get("code") == f"state.{state}" for each in faults):
        reason = state_words(frame.get("state_reason")) or state
        severity = "error" if state == "degraded" else "warning"
        fault = {"severity": severity, "code": f"state.{state}", "message": reason}
        faults.insert(0, {**fault, "since": _since(frame)} if state == "loading" else fault)
    if faults or not form.is_for_people:
        terminal.write(terminal.listing("status-check", listings.ALERTS, form).render(faults))
    else:
        terminal.write("OK\n")
    if faults:
        raise typer.Exit(FAULT_EXIT_CODE)


def _since(frame: dict[str, Any]) -> str:
    """Return when the daemon started, which is when it began to load."""
    began = datetime.fromisoformat(frame["at"]) - timedelta(seconds=frame["uptime_s"])
    return began.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _watch(client: Client, form: Format) -> None:
    """Print each frame as it comes: redrawn on a screen, otherwise a line; until a signal."""
    if form in (Format.JSON, Format.CSV):
        raise typer.BadParameter("--watch never ends, so it prints lines: use -o ndjson")
    try:
        with client.stream("/v1/penstock/stream") as frames:
            for frame in frames:
                with client.reading():
                    terminal.write(_shown(frame, form))
    except GenerationFailed as error:
        what = "the daemon is not reachable"
        raise DaemonUnreachable(what, where=str(client.address), hint=_ENDED) from error
    raise DaemonUnreachable("the daemon has ended", where=str(client.address), hint=_ENDED)


def _shown(frame: dict[str, Any], form: Format) -> str:
    if form is Format.NDJSON:
        return json.dumps(frame) + "\n"
    if not terminal.has_screen():
        return line(frame) + "\n"
    return f"{_HOME_AND_CLEAR}{_page(frame)}\n"


def _page(frame: dict[str, Any]) -> str:
    return page(frame, colour=terminal.has_colour(), room=terminal.room())
