"""Verbs that change something: serve, cancel, drain, resume, keys; and dial-stdio for ssh.

Owns: their flags; serve has one for each setting.
Invariant: what was done is on stdout, one line for each thing; what was refused is on stderr.
Never: imports the daemon before serve needs it.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import short_ids, terminal
from appliance.cli.completion import live_request_ids
from appliance.cli.short_ids import AmbiguousId
from appliance.cli.terminal import Host
from appliance.cli.text import printable, things
from appliance.client import Client, DaemonUnreachable, ReplyError
from appliance.configuration import config
from appliance.configuration.address import UnixAddress, find
from appliance.configuration.setting_kinds import a_flag
from appliance.configuration.settings import SETTINGS

POLL_S = 0.2
DRAIN_PATIENCE_S = 120.0
TIMED_OUT = 124
_COPY_BYTES = 1 << 16

keys = typer.Typer(help="API keys for clients on TCP.", no_args_is_help=True)


def _with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb an option for each setting, in place of its `**given`."""
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[
                bool | None if setting.parse is a_flag else str | None,
                typer.Option(*_decls(name), help=f"{setting.about[0].upper()}{setting.about[1:]}."),
            ],
        )
        for name, setting in SETTINGS.items()
    ]
    verb.__signature__ = signature.replace(parameters=[*flags, *own])  # type: ignore[attr-defined]
    return verb


def _decls(name: str) -> list[str]:
    """How an option is written, where that is not its name alone."""
    return ["--model", "-m"] if name == "model" else []


@_with_settings
def serve(
    folder: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Only say whether all of it could be served.")
    ] = False,
    **given: Any,
) -> None:
    """Run the daemon in the foreground; SIGTERM drains it, SIGHUP reads its settings again."""
    if folder is not None and given["model"] is not None:
        raise typer.BadParameter("give the model once: as an argument, or with --model")
    model = given["model"] if folder is None else folder
    load_config = partial(config.load, {**given, "model": model, "config": config_file})
    if check_config:
        _check(load_config())
        return
    from appliance import daemon, process_limits

    process_limits.keep_small()
    raise typer.Exit(daemon.serve(load_config))


def _check(settings: config.ServeConfig) -> None:
    from appliance.fleet.boot import check_others, check_plan
    from appliance.fleet.ssd_cache import ssd_problem
    from appliance.http.access import AccessPolicy

    for sentence in config.unknown_variables():
        terminal.note(f"penstock: {printable(sentence)}")
    AccessPolicy.from_config(settings)
    check_others(settings)
    sentence, where = check_plan(settings)
    if problem := ssd_problem(settings.ssd_folder, settings.ssd_cache):
        terminal.write(f"{printable(problem)}\n")
    terminal.write("".join(f"{line}\n" for line in (sentence, *where)))


def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="From ps or top.", autocompletion=live_request_ids),
    ] = None,
    user: Annotated[str | None, typer.Option("-u", "--user", help="All of this user's.")] = None,
    host: Host = None,
) -> None:
    """End requests; exits 5 if one of them is not live."""
    if bool(ids) == (user is not None):
        raise typer.BadParameter("give ids, or a user with --user")
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
        except AmbiguousId as error:
            exit_code = terminal.report(error)
        except ReplyError as error:
            terminal.note(f"penstock: {printable(text)}: {printable(error)}")
            exit_code = error.exit_code
        else:
            terminal.write(f"cancelled {printable(ended)}\n")
    raise typer.Exit(exit_code)


def drain(
    wait: Annotated[bool, typer.Option("--wait", help="Until no request is left.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Wait so many seconds at most; 120 with --wait.")
    ] = None,
    host: Host = None,
) -> None:
    """Take no new requests; those accepted go on. Exits 124 when the time to wait is up."""
    client = terminal.client(host)
    client.post("/v1/penstock/drain")
    if not wait and timeout is None:
        terminal.write("draining\n")
        return
    patience_s = DRAIN_PATIENCE_S if timeout is None else timeout
    end_s = time.monotonic() + patience_s
    while num_live := client.get("/v1/penstock/state")["num_requests"]:
        if time.monotonic() >= end_s:
            left = f"{things(num_live, 'request')} {'is' if num_live == 1 else 'are'} left"
            terminal.note(f"penstock: {left} after {patience_s:g} s")
            raise typer.Exit(TIMED_OUT)
        time.sleep(POLL_S)
    terminal.write("drained\n")


def resume(host: Host = None) -> None:
    """Take requests again after a drain."""
    terminal.client(host).post("/v1/penstock/resume")
    terminal.write("serving\n")


@keys.callback()
def keys_group() -> None:
    """API keys for clients on TCP."""


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="What the log will call its user.")],
    role: Annotated[str, typer.Option(help="viewer, user or operator.")] = "user",
) -> None:
    """Make a key: its line for the file on stdout, the key itself on stderr, once."""
    from appliance.http import api_keys as key_file

    key, line = key_file.new_key(name, role)
    terminal.write(line + "\n")
    terminal.note(f"the key, which is shown only now: {key}")


def dial_stdio(host: Host = None) -> None:
    """Carry stdin and stdout to the daemon's socket; what ssh:// addresses run."""
    address = find(host)
    if not isinstance(address, UnixAddress):
        raise typer.BadParameter("only a socket of this machine can be dialled")
    connection = _dial(address)
    threading.Thread(target=_copy_in, args=(connection,), daemon=True).start()
    try:
        while data := connection.recv(_COPY_BYTES):
            _write_all(data)
    except BrokenPipeError:
        sys.exit(terminal.BROKEN_PIPE)
    except ConnectionResetError:
        return  # the end, as the other side will see for itself


def _dial(address: UnixAddress) -> socket.socket:
    try:
        return address.dial(None).socket
    except OSError as error:
        raise DaemonUnreachable(
            f"the daemon does not answer: {error.strerror or error}", where=str(address)
        ) from error


def _copy_in(connection: socket.socket) -> None:
    try:
        while data := os.read(0, _COPY_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the daemon hung up, which the other direction reports


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _live_ids(client: Client, user: str | None) -> list[str]:
    frames: list[dict[str, Any]] = client.get("/v1/requests").get("data", [])
    return [
        frame["id"]
        for frame in frames
        if frame.get("user") == user and frame.get("phase") != "finished"
    ]
