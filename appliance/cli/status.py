"""Verbs that say how the appliance is: status, metrics.

Owns: what --check takes for a fault, and how a frame is shown again and again.
Invariant: --check ends with 0 only if the daemon would take a request and no alert is raised.
Never: judges a figure; the alerts are the daemon's.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from appliance.cli import listings, status_page, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Host, Output
from appliance.client import Client, DaemonUnreachable, GenerationFailed

FAULT_EXIT_CODE = 8
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def status(
    check: Annotated[
        bool, typer.Option("--check", help="Only what is wrong; ends with 8 if something is.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again and again.")] = False,
    host: Host = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what the daemon is doing: state, alerts, queue, workers, KV, latency."""
    client = terminal.client(host)
    if check and watch:
        raise typer.BadParameter("--check ends, and --watch does not")
    if watch:
        _watch(client, output)
        return
    frame = client.get("/v1/penstock/state")
    if check:
        _check(frame, output)
        return
    terminal.show("status", frame, output, lambda: _page(frame))


def metrics(host: Host = None) -> None:
    """Print what the daemon shows to Prometheus."""
    terminal.write(terminal.client(host).text("/metrics"))


def _check(frame: dict[str, Any], form: Format) -> None:
    """The alerts, and the state if that is the trouble."""
    state = frame.get("state")
    faults = list(frame.get("alerts") or ())
    if state != "ready" and not any(each.get("code") == f"state.{state}" for each in faults):
        reason = frame.get("state_reason") or state
        severity = "error" if state == "degraded" else "warning"
        faults.insert(0, {"severity": severity, "code": f"state.{state}", "message": reason})
    if faults or not form.is_for_people:
        terminal.write(terminal.listing("status-check", listings.ALERTS, form).render(faults))
    else:
        terminal.write("ready, and nothing is wrong\n")
    if faults:
        raise typer.Exit(FAULT_EXIT_CODE)


def _watch(client: Client, form: Format) -> None:
    """Each frame as it comes: redrawn on a screen, a line elsewhere; until a signal."""
    if form in (Format.JSON, Format.CSV):
        raise typer.BadParameter("--watch has no end, and a document has: use -o ndjson")
    try:
        with client.stream("/v1/penstock/stream") as frames:
            for frame in frames:
                terminal.write(_shown(frame, form))
    except GenerationFailed as error:
        raise DaemonUnreachable("the daemon is gone", where=str(client.address)) from error
    raise DaemonUnreachable("the daemon has ended", where=str(client.address))


def _shown(frame: dict[str, Any], form: Format) -> str:
    if form is Format.NDJSON:
        return json.dumps(frame) + "\n"
    if not terminal.has_screen():
        return status_page.line(frame) + "\n"
    return f"{_HOME_AND_CLEAR}{_page(frame)}\n"


def _page(frame: dict[str, Any]) -> str:
    return status_page.page(frame, colour=terminal.has_colour(), room=terminal.room())
