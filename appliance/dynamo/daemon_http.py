"""Call the daemon from Dynamo's adapter: its card, completions, tokens.

Invariant: every failure of the connection is a LostError; hanging up makes the daemon cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import h11
import msgspec

from appliance.dynamo.outputs import LostError
from engine.wire.not_json import NOT_JSON

_READ_BYTES = 1 << 16
CONNECT_S = 5.0


class DaemonExchange:
    """Exchange one request and its reply with the daemon; use it as a context manager.

    Args:
        silence_s: maximum silence within a reply; None: unlimited.
    """

    def __init__(self, socket: Path, silence_s: float | None = None) -> None:
        self._socket = socket
        self._silence_s = silence_s
        self._parser = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_hung_up = False
        self.status = 0

    async def __aenter__(self) -> DaemonExchange:
        """Connect."""
        try:
            async with asyncio.timeout(CONNECT_S):
                opened = await asyncio.open_unix_connection(str(self._socket))
        except (OSError, TimeoutError) as error:
            raise LostError(f"no daemon answers on {self._socket}") from error
        self._reader, self._writer = opened
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """End it now; its reader gets a LostError."""
        self._is_hung_up = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def ask(self, method: str, target: str, body: object = None) -> None:
        """Send a request and read the head of the reply into `status`."""
        assert self._writer is not None
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [("host", "localhost"), ("content-length", str(len(content)))]
        headers += [("content-type", "application/json"), ("connection", "close")]
        request = h11.Request(method=method, target=target, headers=headers)
        for part in (request, h11.Data(data=content), h11.EndOfMessage()):
            self._writer.write(self._parser.send(part) or b"")
        while not isinstance(event := await self._next_event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed | h11.EndOfMessage):
                raise LostError("the daemon closed the connection without an answer")
        self.status = event.status_code

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the reply's body line by line, without empty ones."""
        rest = b""
        while isinstance(event := await self._next_event(), h11.Data):
            *lines, rest = (rest + bytes(event.data)).split(b"\n")
            for line in lines:
                if line:
                    yield line
        if rest:
            yield rest

    async def body(self) -> Any:
        """Read the whole reply, decoded."""
        return msgspec.json.decode(b"\n".join([line async for line in self.lines()]) or b"null")

    async def _next_event(self) -> h11.Event:
        assert self._reader is not None
        try:
            while (event := self._parser.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._silence_s):
                    data = await self._reader.read(_READ_BYTES)
                if self._is_hung_up:
                    raise LostError("hung up")
                self._parser.receive_data(data)
        except (OSError, TimeoutError) as error:
            raise LostError("the daemon does not answer") from error
        except h11.RemoteProtocolError as error:  # an end inside a reply
            raise LostError("the connection to the daemon was lost") from error
        if isinstance(event, h11.ConnectionClosed):
            raise LostError("the connection to the daemon was lost")
        if not isinstance(event, h11.Event):
            raise LostError("the answer is not the daemon's")
        return event


async def get(socket: Path, target: str, silence_s: float = 10.0) -> Any:
    """GET one answer of the daemon, decoded.

    Raises:
        LostError: no answer, or an error.
    """
    with contextlib.suppress(*NOT_JSON):
        async with DaemonExchange(socket, silence_s) as line:
            await line.ask("GET", target)
            body = await line.body()
            if line.status == 200:
                return body
            error = body.get("error", {}) if isinstance(body, dict) else {}
            raise LostError(error.get("message") or f"the daemon answers {line.status}")
    raise LostError("the daemon's answer cannot be read")
