"""worker: an adapter beside the daemon, which makes the appliance one of several.

Owns: the life of the adapter's process: its options, its signals, its end.
Invariant: a signal ends it after the replies under way, a second one at once.
Never: imports what speaks to others before it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.cli.terminal import Host
from appliance.configuration.address import UnixAddress, find
from engine.errors import ConfigError, PenstockError

FILE_VARIABLE = "DYN_FILE_KV"
log = logging.getLogger("penstock.dynamo")


def worker(
    host: Host = None,
    dynamo: Annotated[bool, typer.Option("--dynamo", help="Be a worker of NVIDIA Dynamo.")] = False,
    discovery: Annotated[
        str,
        typer.Option(
            help="How Dynamo's parts find each other: file:FOLDER, which all can write, or etcd "
            "(ETCD_ENDPOINTS says where), or kubernetes."
        ),
    ] = "",
    namespace: Annotated[str, typer.Option(help="In Dynamo.")] = "penstock",
    component: Annotated[str, typer.Option(help="In the namespace.")] = "worker",
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; else as the daemon does.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", help="Longest wait for replies when it is told to end.")
    ] = 90.0,
) -> None:
    """Make this appliance a worker of a system of several, until a signal."""
    if not dynamo:
        raise ConfigError(
            "of which system?", where="penstock worker", hint="say --dynamo; there is no other"
        )
    address = find(host)
    if not isinstance(address, UnixAddress):
        raise ConfigError(
            "the adapter speaks to a daemon on its own machine, by its socket",
            where=str(address),
            hint="run it beside the daemon",
        )
    kind, _, folder = discovery.partition(":")
    if kind == "file" and folder:
        os.environ[FILE_VARIABLE] = str(Path(folder).expanduser().absolute())
    elif kind not in ("etcd", "kubernetes") or folder:
        raise ConfigError(
            f"{discovery!r} is no way to find others" if discovery else "how are others found?",
            where="--discovery",
            hint="give file:FOLDER, etcd or kubernetes",
        )
    from appliance.dynamo.plane import Names

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = Names(namespace, component, discovery=kind, model_name=model_name)
    raise typer.Exit(asyncio.run(_run(address.path, names, drain_s)))


async def _run(socket: Path, names: object, drain_s: float) -> int:
    from appliance.dynamo.plane import DynamoPlane, Names
    from appliance.dynamo.worker import Adapter

    assert isinstance(names, Names)
    plane = DynamoPlane(names)
    adapter = plane.adapter = Adapter(socket, plane)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _first_signal, adapter)
    try:
        await adapter.run()
        is_drained = await adapter.drained(drain_s)
        log.info("ended" if is_drained else "ended, with replies cut")
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
