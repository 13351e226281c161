"""Define dial-stdio, which ssh:// addresses run on the daemon's machine."""

from __future__ import annotations

import os
import socket
import sys
import threading

import typer

from appliance.cli import terminal
from appliance.cli.terminal import Host
from appliance.client.address import UnixAddress
from appliance.client.calls import DaemonUnreachable

_COPY_BYTES = 1 << 16


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
