"""Define the verbs that change a running daemon: roles, cancel, drain, resume, restart, stop.

Invariant: what was done is on stdout, one line for each thing; what was refused is on stderr.
"""

from __future__ import annotations

import os
import select
import signal
import time
from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import fact_pages, short_ids, terminal
from appliance.cli.completion import live_request_ids
from appliance.cli.install_service import (
    RESTART,
    do_step,
)
from appliance.cli.short_ids import AmbiguousId
from appliance.cli.tables import Format, within
from appliance.cli.terminal import Host, Output
from appliance.client.address import UnixAddress
from appliance.client.calls import (
    Client,
    DaemonAbsent,
    DaemonUnreachable,
    PermissionRefused,
    ReplyError,
)
from appliance.configuration import client_settings, paths
from appliance.configuration.settings import ROLES
from appliance.hub.names import NoSuchModel
from appliance.observe.frame.figures import things
from engine.errors import ConfigError, PenstockError, UsageError
from engine.printable import printable

POLL_S = 0.2
DRAIN_PATIENCE_S = 120.0
RESTART_PATIENCE_S = 600.0
"""Maximum wait for the new daemon's model."""
TIMED_OUT = 124


def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="From ps or top.", autocompletion=live_request_ids),
    ] = None,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="NAME", help="All requests of this user.")
    ] = None,
    host: Host = None,
) -> None:
    """Cancel requests; exits with 5 if one is not live."""
    if bool(ids) == (user is not None):
        raise typer.BadParameter("give request ids, or a user with --user")
    client = terminal.client(host)

    def end(request_id: str) -> str:
        client.cancel(request_id)
        return request_id

    asked = ids or _live_ids(client, user)
    if not asked:
        terminal.note(f"penstock: nothing to cancel: {printable(user)} has no live request")
    exit_code = 0
    for text in asked:
        try:
            ended = short_ids.with_id(text, end, partial(short_ids.live, client))
        except (AmbiguousId, UsageError) as error:
            exit_code = terminal.report(error)
        except ReplyError as error:
            error.where = text
            exit_code = terminal.report(error)
        else:
            terminal.write(f"cancelled {printable(ended)}\n")
    raise typer.Exit(exit_code)


def drain(
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no request is left.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(callback=within(0), help="Most seconds to wait; 120 with --wait."),
    ] = None,
    host: Host = None,
) -> None:
    """Accept no new requests; accepted ones continue. Exits with 124 after --timeout."""
    client = terminal.client(host)
    client.post("/v1/penstock/drain", has="status")
    if not wait and timeout is None:
        terminal.write("draining\n")
        return
    patience_s = DRAIN_PATIENCE_S if timeout is None else timeout
    end_s = time.monotonic() + patience_s
    while num_live := _num_requests(client):
        if time.monotonic() >= end_s:
            left = f"{things(num_live, 'request')} {'is' if num_live == 1 else 'are'} left"
            terminal.note(f"penstock: {left} after {patience_s:g} s")
            raise typer.Exit(TIMED_OUT)
        time.sleep(POLL_S)
    terminal.write("drained\n")


def _num_requests(client: Client) -> int:
    with client.reading():
        return int(client.get("/v1/penstock/state", has="num_requests")["num_requests"])


def resume(host: Host = None) -> None:
    """Accept requests again after a drain."""
    terminal.client(host).post("/v1/penstock/resume", has="status")
    terminal.write("serving\n")


def restart(host: Host = None) -> None:
    """Restart the daemon, for example as a new version; running requests continue in the new one.

    A daemon that systemd started is restarted by root.
    """
    client = terminal.client(host)
    frame = client.state()
    if frame["state"] == "loading":
        raise PenstockError("the daemon is loading", hint="restart it once it is ready")
    address = client.address
    if isinstance(address, UnixAddress) and address.path == paths.SYSTEM_SOCKET:
        do_step(RESTART)
    else:
        process = _open_daemon(client, frame, "start it again with what started it")
        signal.pidfd_send_signal(process, signal.SIGUSR2)
    end_s = time.monotonic() + RESTART_PATIENCE_S
    while not _is_next(client, frame):
        if time.monotonic() >= end_s:
            where = f"pid {frame.get('pid')}"
            hint = "its log says why, and `penstock events` too"
            raise PenstockError("the daemon has not restarted", where=where, hint=hint)
        time.sleep(POLL_S)
    served = client.state().get("model")
    terminal.write(f"restarted; serving {printable(served)}\n")


def _is_next(client: Client, old: dict[str, Any]) -> bool:
    """Say whether another daemon is ready; raise ConfigError if the old one refused."""
    try:
        frame = client.state()
    except DaemonAbsent:
        raise
    except (DaemonUnreachable, ReplyError):  # between two daemons
        return False
    with client.reading():
        refused = [each for each in frame["events"] if each["code"] == "restart.refused"]
        if refused and frame["pid"] == old["pid"] and refused[-1] not in old["events"]:
            raise ConfigError(str(refused[-1]["message"]))
        return bool(frame["pid"] != old["pid"] and frame["state"] != "loading")


def _open_daemon(client: Client, frame: dict[str, Any], hint: str) -> int:
    """Open the process of a daemon on this machine, for signals."""
    if not isinstance(client.address, UnixAddress):
        about = "this works over the daemon's Unix socket only"
        raise UsageError(about, where=str(client.address), hint="use it without --host, there")
    if client.address.listener_pid() != frame.get("pid"):
        raise UsageError(
            "the daemon was not started by a command on this machine",
            where=str(client.address),
            hint=hint,
        )
    process = os.pidfd_open(frame["pid"])
    try:
        signal.pidfd_send_signal(process, 0)
    except PermissionError as error:
        os.close(process)
        raise PermissionRefused(
            "the daemon is another user's", where=f"pid {frame['pid']}"
        ) from error
    return process


def stop(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Stop only if this model is the one served; unload it if it is another one.",
        ),
    ] = None,
    host: Host = None,
) -> None:
    """Stop the daemon, which frees the model's memory: running requests end first.

    A second stop ends running requests at once. A daemon that systemd started is stopped by
    systemctl.
    """
    client = terminal.client(host)
    frame = client.state()
    served = str(frame.get("model"))
    names = set() if model is None else set(client_settings.ids_of(model, terminal.passed_over))
    with client.reading():
        resident = {each["model"] for each in (frame.get("swaps") or {}).get("resident") or ()}
    if names & resident:
        (name,) = names & resident
        client.post("/api/generate", {"model": name, "keep_alive": 0})
        terminal.write(f"unloaded {printable(name)}; {printable(served)} is served\n")
        return
    if model is not None and served not in names:
        raise NoSuchModel(f"the daemon serves {served}", where=model)
    process = _open_daemon(client, frame, "systemctl stop penstock.socket penstock.service")
    signal.pidfd_send_signal(process, signal.SIGTERM)
    if num_running := frame.get("num_requests"):
        with client.reading():
            about = f"waiting for {things(num_running, 'request')}; stop again ends them at once"
        terminal.note(f"penstock: {about}")
    select.select([process], [], [])
    terminal.write(f"stopped {printable(served)}\n")


def _live_ids(client: Client, user: str | None) -> list[str]:
    with client.reading():
        return [
            str(frame["id"])
            for frame in client.rows("/v1/requests")
            if frame.get("user") == user and frame.get("phase") != "finished"
        ]


def roles(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar=f"[{'|'.join(ROLES)}]",
            help="Roles to switch to.",
            autocompletion=lambda incomplete: [r for r in ROLES if r.startswith(incomplete)],
        ),
    ] = None,
    slo_ttft_ms: Annotated[
        int | None,
        typer.Option(callback=within(0), help="TTFT target in ms; 0: relative."),
    ] = None,
    slo_itl_ms: Annotated[
        int | None, typer.Option(callback=within(0), help="ITL target in ms; 0: relative.")
    ] = None,
    host: Host = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the workers' roles and targets, or change them without a restart."""
    client = terminal.client(host)
    asked = {"roles": wanted, "slo_ttft_ms": slo_ttft_ms, "slo_itl_ms": slo_itl_ms}
    change = {name: value for name, value in asked.items() if value is not None}
    if change:
        content: dict[str, Any] = client.post("/v1/penstock/roles", change, has="roles")
    else:
        frame = client.get("/v1/penstock/state", has="roles")
        content = {name: frame.get(name) for name in asked}
    with client.reading():
        terminal.show("roles", content, output, lambda: fact_pages.roles_text(content))
