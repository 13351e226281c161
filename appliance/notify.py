"""Tell systemd how the daemon is doing (the sd_notify protocol, without its library).

Owns: the datagram to NOTIFY_SOCKET.
Invariant: without systemd every call does nothing.
Never: waits, or stops the daemon because a notification failed.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

_LOG = logging.getLogger("penstock.notify")


def notify_watchdog(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell systemd that all is well, where the unit has WatchdogSec=; silence kills the daemon."""
    is_for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return bool(is_for_us and environ.get("WATCHDOG_USEC")) and notify(WATCHDOG=1)


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
