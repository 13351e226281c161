"""Define the verb worker: join a cluster of NVIDIA Dynamo until stopped."""

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
from appliance.client.address import UnixAddress
from engine.errors import PenstockError, UsageError

FILE_VARIABLE = "DYN_FILE_KV"
log = logging.getLogger("penstock.dynamo")


def worker(
    host: Host = None,
    dynamo: Annotated[bool, typer.Option("--dynamo", help="Join NVIDIA Dynamo.")] = False,
    discovery: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Dynamo's discovery: file:FOLDER (shared, writable), etcd (at ETCD_ENDPOINTS) "
            "or kubernetes.",
        ),
    ] = "",
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Dynamo's namespace.")
    ] = "penstock",
    component: Annotated[
        str, typer.Option(metavar="NAME", help="Dynamo's component in the namespace.")
    ] = "worker",
    model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model name for clients. Default: the daemon's."),
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
    # a second one ends the process
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
