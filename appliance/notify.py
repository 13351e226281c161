"""Tell systemd how the daemon is doing (the sd_notify protocol, without its library).

Owns: the datagram to NOTIFY_SOCKET. Called by: the daemon.
Invariant: without systemd every call does nothing.
Never: waits, or stops the daemon because a notification failed.
"""

from __future__ import annotations

import logging
import os
import socket

_LOG = logging.getLogger("penstock.notify")


def notify(**fields: str | int) -> bool:
    """Send one notification to systemd.

    Fields of use: READY=1, STOPPING=1, STATUS=text, EXTEND_TIMEOUT_USEC=microseconds.

    Returns:
        False if nobody listens or the message could not be sent.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # in the abstract namespace, which has no file
        address = "\0" + address[1:]
    lines = [f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items()]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
            channel.sendto("\n".join(lines).encode(errors="replace"), address)
    except OSError as error:
        _LOG.warning("cannot notify systemd: %s", error)
        return False
    return True
