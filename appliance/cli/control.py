"""Define the verbs that change something: serve, roles, cancel, drain, keys, services.

Owns: their flags, of which serve has one for each setting.
Invariant: what was done is on stdout, one line for each thing; what was refused is on stderr.
Never: imports the daemon before serve needs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import fact_pages, short_ids, terminal
from appliance.cli.completion import live_request_ids
from appliance.cli.install_service import (
    RESTART,
    check_program,
    check_reach,
    do_step,
    install_steps,
    own_program,
)
from appliance.cli.short_ids import AmbiguousId
from appliance.cli.tables import Format, printable, within
from appliance.cli.terminal import Host, Output
from appliance.client import Client, DaemonAbsent, DaemonUnreachable, PermissionRefused, ReplyError
from appliance.configuration import client_settings, config, paths, sources
from appliance.configuration.address import UnixAddress
from appliance.configuration.setting_kinds import a_flag
from appliance.configuration.settings import ROLES, SETTINGS
from appliance.frame.figures import things
from appliance.http import api_keys
from appliance.models.names import NoSuchModel
from engine.errors import PenstockError, UsageError

POLL_S = 0.2
DRAIN_PATIENCE_S = 120.0
RESTART_PATIENCE_S = 600.0
"""Maximum wait for the new daemon's model."""
TIMED_OUT = 124
_COPY_BYTES = 1 << 16

keys = typer.Typer(help="API keys for clients on TCP.", no_args_is_help=True)


def _with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb an option for each setting."""
    flags = {
        name: Annotated[
            bool | None if setting.parse is a_flag else str | None,
            typer.Option(*_decls(name), help=f"{setting.about[0].upper()}{setting.about[1:]}."),
        ]
        for name, setting in SETTINGS.items()
    }
    return terminal.with_options(verb, flags)


def _decls(name: str) -> list[str]:
    """Return the option's spellings, if it has more than its name."""
    return ["--model", "-m"] if name == "model" else []


@_with_settings
def serve(
    folder: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="IP address for --port. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        str | None, typer.Option("--port", help="TCP port: short for --listen HOST:PORT.")
    ] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Only check the settings and the model.")
    ] = False,
    **given: Any,
) -> None:
    """Run the daemon in the foreground; SIGTERM stops it after a drain, SIGHUP reloads settings."""
    if folder is not None and given["model"] is not None:
        raise typer.BadParameter("give the model once: as an argument, or with --model")
    model = given["model"] if folder is None else folder
    listen = _listen_address(given["listen"], host, port)
    flags = {**given, "model": model, "listen": listen, "port": port, "config": config_file}
    load_config = partial(config.load, flags)
    with sources.named_by_source(flags):
        if check_config:
            _check(load_config())
            return
        from appliance.keeper import keep_daemon

        keep_daemon(_end_replies)
        from appliance import daemon, process

        process.keep_small()
        raise typer.Exit(daemon.serve(load_config))


def _end_replies(kept: dict[str, list[int]]) -> None:
    from appliance.http.kept_replies import end_kept  # the keeper needs it at its end alone

    end_kept(kept)


def _listen_address(listen: str | None, host: str | None, port: str | None) -> str | None:
    """Return the setting `listen`, which --host and --port say in two words."""
    if host is None and port is None:
        return listen
    if listen is not None:
        raise typer.BadParameter("give either --listen, or --host and --port")
    if port is None:
        raise typer.BadParameter("--host needs --port, as --port 8000")
    host = host or "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(settings: config.ServeConfig) -> None:
    from appliance import daemon
    from appliance.fleet.boot import place
    from appliance.fleet.boot_check import check_files, check_plan, dram_forecast
    from appliance.fleet.ssd_cache import ssd_forecast
    from appliance.models.model_files import is_to_be_fetched

    for sentence in config.unknown_variables():
        terminal.note(f"penstock: {printable(sentence)}")
    _, placed, others = daemon.check(settings)
    placed = placed or place(settings)  # which says what to pull, where a start pulls it
    sentence, where = check_plan(settings, placed)
    for each in (settings, *settings.models.values()):  # a start finds it when the model is loaded
        if not is_to_be_fetched(each.model):
            check_files(each)
    asked = dram_forecast(settings, placed), ssd_forecast(settings, placed.placement)
    caches = [each for each in asked if each is not None]
    verdict = "the configuration is good"
    if any(each.is_missed for each in caches):
        verdict = "a start would serve, but without a configured cache"
    lines = (f"{verdict}; {sentence}", *where, *(each.text for each in caches), *others)
    terminal.write("".join(f"{printable(line)}\n" for line in lines))


def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="From ps or top.", autocompletion=live_request_ids),
    ] = None,
    user: Annotated[
        str | None, typer.Option("-u", "--user", help="All requests of this user.")
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
    """Accept requests again after a drain."""
    terminal.client(host).post("/v1/penstock/resume")
    terminal.write("serving\n")


def restart(host: Host = None) -> None:
    """Restart the daemon, for example as a new version; running requests continue in the new one.

    A daemon that systemd started is restarted by root.
    """
    client = terminal.client(host)
    frame = client.get("/v1/penstock/state")
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
            where = f"pid {frame['pid']}"
            hint = "its log says why, and `penstock events` too"
            raise PenstockError("the daemon has not restarted", where=where, hint=hint)
        time.sleep(POLL_S)
    served = client.get("/v1/penstock/state")["model"]
    terminal.write(f"restarted; serving {printable(str(served))}\n")


def _is_next(client: Client, old: dict[str, Any]) -> bool:
    """Say whether another daemon is ready; raise PenstockError if the old one refused."""
    try:
        frame = client.get("/v1/penstock/state")
    except DaemonAbsent:
        raise
    except (DaemonUnreachable, ReplyError):  # between two daemons
        return False
    refused = [each for each in frame["events"] if each["code"] == "restart.refused"]
    if refused and frame["pid"] == old["pid"] and refused[-1] not in old["events"]:
        raise PenstockError(str(refused[-1]["message"]))
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
    frame = client.get("/v1/penstock/state")
    served = str(frame.get("model"))
    names = set() if model is None else set(client_settings.ids_of(model, terminal.passed_over))
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
        about = f"waiting for {things(num_running, 'request')}; stop again ends them at once"
        terminal.note(f"penstock: {about}")
    select.select([process], [], [])
    terminal.write(f"stopped {printable(served)}\n")


@keys.callback()
def keys_group() -> None:
    """API keys for clients on TCP."""


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key's user in the log.")],
    role: Annotated[str, typer.Option(help="viewer, user or operator.")] = "user",
) -> None:
    """Make a key; its line for the file goes to stdout, the key itself to stderr, once."""
    key, line = api_keys.new_key(name, role)
    terminal.write(line + "\n")
    terminal.note(f"the key (shown only this once): {key}")


@keys.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="Name of the key's user in the log.")],
    file: Annotated[str, typer.Option("--file", help="File of keys; created with mode 600.")],
    role: Annotated[str, typer.Option(help="viewer, user or operator.")] = "user",
) -> None:
    """Make a key and add it to a file; the key itself goes to stdout, once."""
    key = api_keys.add_key(Path(file), name, role)
    terminal.write(key + "\n")
    terminal.note(f"added {name} ({role}) to {printable(file)}; this key is not shown again")


def dial_stdio(host: Host = None) -> None:
    """Carry stdin and stdout to the daemon's socket; what ssh:// addresses run."""
    address = terminal.address(host)
    if not isinstance(address, UnixAddress):
        raise typer.BadParameter("only a Unix socket of this machine can be dialled")
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
        content: dict[str, Any] = client.post("/v1/penstock/roles", change)
    else:
        frame = client.get("/v1/penstock/state")
        content = {name: frame.get(name) for name in asked}
    terminal.show("roles", content, output, lambda: fact_pages.roles_text(content))


FILE_VARIABLE = "DYN_FILE_KV"
log = logging.getLogger("penstock.dynamo")


def worker(
    host: Host = None,
    dynamo: Annotated[bool, typer.Option("--dynamo", help="Join NVIDIA Dynamo.")] = False,
    discovery: Annotated[
        str,
        typer.Option(
            help="Dynamo's discovery: file:FOLDER (shared, writable), etcd (at ETCD_ENDPOINTS) "
            "or kubernetes."
        ),
    ] = "",
    namespace: Annotated[str, typer.Option(help="Dynamo's namespace.")] = "penstock",
    component: Annotated[str, typer.Option(help="Dynamo's component in the namespace.")] = "worker",
    model_name: Annotated[
        str | None, typer.Option(help="Model name for clients. Default: the daemon's.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", help="Most seconds to wait for replies at the end.")
    ] = 90.0,
) -> None:
    """Join a multi-node cluster (NVIDIA Dynamo) until stopped."""
    if not dynamo:
        raise UsageError("of which system?", where="penstock worker", hint="--dynamo is required")
    address = terminal.address(host)
    if not isinstance(address, UnixAddress):
        raise UsageError(
            "the adapter speaks to a daemon on its own machine, by its socket",
            where=str(address),
            hint="run it beside the daemon",
        )
    kind, _, folder = discovery.partition(":")
    if kind == "file" and folder:
        os.environ[FILE_VARIABLE] = str(Path(folder).expanduser().absolute())
    elif kind not in ("etcd", "kubernetes") or folder:
        raise UsageError(
            f"{discovery!r} is not a discovery backend"
            if discovery
            else "the discovery backend is missing",
            where="--discovery",
            hint="give file:FOLDER, etcd or kubernetes",
        )
    from appliance.dynamo.runtime import DynamoNames

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = DynamoNames(namespace, component, discovery=kind, model_name=model_name)
    raise typer.Exit(asyncio.run(_run(address.path, names, drain_s)))


async def _run(socket: Path, names: object, drain_s: float) -> int:
    from appliance.dynamo.runtime import DynamoNames, DynamoRuntime
    from appliance.dynamo.worker import Adapter

    assert isinstance(names, DynamoNames)
    plane = DynamoRuntime(names)
    adapter = plane.adapter = Adapter(socket, plane)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _first_signal, adapter)
    try:
        await adapter.run()
        is_drained = await adapter.drained(drain_s)
        log.info("ended" if is_drained else "ended; some replies were cut off")
        code = 0 if is_drained else 1
    except PenstockError as error:
        code = terminal.report(error)
    plane.close()
    os._exit(code)  # the runtime's threads wait for what the operating system takes away sooner


def _first_signal(adapter: object) -> None:
    from appliance.dynamo.worker import Adapter

    assert isinstance(adapter, Adapter)
    adapter.end()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


def install_service(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the steps and the files.")
    ] = False,
) -> None:
    """Install or update the daemon's systemd units and start them (needs root).

    The unit runs the command of this environment. After an upgrade, run it again: it restarts the
    daemon, and clients that connect meanwhile wait.
    """
    program = own_program()
    if not dry_run:
        check_program(program)
    for step in install_steps(program):
        terminal.write(f"{printable(step.about)}\n")
        if not dry_run:
            do_step(step)
        elif step.text:
            terminal.write("".join(f"    {line}\n" for line in step.text.splitlines()))
    if dry_run:
        check_reach(program)  # after the plan, so that it is printed even if this fails
    else:
        terminal.write("serving; penstock status, journalctl -fu penstock\n")
