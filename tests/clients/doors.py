"""Where clients go in, and what HTTP library theirs is."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import httpx

TIMEOUT_S = 120


@dataclass(frozen=True)
class Door:
    """Where a client goes in."""

    url: str
    key: str
    socket: str | None
    """The Unix socket; None on TCP."""

    def http(self, library=httpx):
        """A client of the HTTP library that somebody's own client is built upon."""
        transport = library.HTTPTransport(uds=self.socket)
        return library.Client(transport=transport, timeout=TIMEOUT_S)

    def async_http(self, library=httpx):
        transport = library.AsyncHTTPTransport(uds=self.socket)
        return library.AsyncClient(transport=transport, timeout=TIMEOUT_S)


def http_library(package):
    """httpx, or httpx2 in newer releases."""
    return sys.modules[package.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]
