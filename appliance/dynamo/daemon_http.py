"""The daemon's HTTP as the adapter reads it: a request a connection, outputs of token ids.

Owns: the form of outputs; which ends are answers, which are the client's fault, and which another
worker can make good; the connection.
Invariant: whatever goes wrong on the way is a LostError; hanging up makes the daemon cancel.
Never: tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import h11
import msgspec

from appliance.dynamo.requests import UnsupportedRequest

# What the daemon streams, as Dynamo reads it: outputs of token ids, and how they end.
# Invariant: every token id that came is told once, in order.
# Never: reads a socket.


Json = dict[str, Any]
_DATA = b"data:"
_DONE = b"[DONE]"
_PREFIX = "token_id:"
_ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "cancelled"}


class LostError(Exception):
    """The daemon cannot go on with this; another worker can."""


def output_of(line: bytes) -> Json | None:
    """The output in a line of the stream; None: it has none.

    Raises:
        Refused: the daemon found that what was asked cannot be done.
        LostError: the daemon failed, or ends.
    """
    if not line.startswith(_DATA):
        return None
    data = line[len(_DATA) :].strip()
    if not data or data == _DONE:
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise_error(event["error"])
    output: Json = {}
    if usage := event.get("usage"):
        output["completion_usage"] = usage
    for choice in event["choices"]:
        output["token_ids"] = choice.get("token_ids") or []
        if choice.get("logprobs"):
            output |= _logprobs(choice["logprobs"])
        if reason := choice.get("finish_reason"):
            output["finish_reason"] = _ENDS.get(reason, "stop")
    return output or None


def raise_error(error: Json) -> None:
    """What an error object of the daemon's means for whoever asked.

    Raises:
        Refused: the client can mend it.
        LostError: nobody but another worker can.
    """
    message = str(error.get("message") or "the daemon failed")
    if error.get("type") in ("invalid_request_error", "not_found_error"):
        raise UnsupportedRequest(message)
    raise LostError(message)


def _logprobs(columns: Json) -> Json:
    """Each token's own, and those of the likeliest at its place, the likeliest first."""
    told: Json = {"log_probs": columns["token_logprobs"]}
    if any(columns.get("top_logprobs") or ()):
        told["top_logprobs"] = [_ranked(place or {}) for place in columns["top_logprobs"]]
    return told


def _ranked(place: dict[str, float]) -> list[Json]:
    ordered = sorted(place.items(), key=lambda one: -one[1])
    return [
        {
            "rank": rank,
            "token_id": int(key.removeprefix(_PREFIX)),
            "token": key,
            "logprob": logprob,
        }
        for rank, (key, logprob) in enumerate(ordered, 1)
    ]


# --------------------------------------------------------------------------------------------------


_READ_BYTES = 1 << 16
CONNECT_S = 5.0


class DaemonExchange:
    """One exchange; use it as a context manager.

    Args:
        socket: of the daemon.
        silence_s: of a reply that is more than that is taken for a death; None: it may wait.
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
        """Hang up."""
        self.hang_up()

    def hang_up(self) -> None:
        """End it now; whoever reads it gets a LostError."""
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
        """The reply's body, line by line as they come, without empty ones."""
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
            raise LostError("the daemon is silent or gone") from error
        except h11.RemoteProtocolError as error:  # an end inside a reply
            raise LostError("the daemon went away") from error
        if isinstance(event, h11.ConnectionClosed):
            raise LostError("the daemon went away")
        if not isinstance(event, h11.Event):
            raise LostError("this is not the daemon")
        return event


async def get(socket: Path, target: str, silence_s: float = 10.0) -> Any:
    """GET one answer of the daemon's, decoded.

    Raises:
        LostError: there is none, or it is a refusal.
    """
    with contextlib.suppress(msgspec.DecodeError):
        async with DaemonExchange(socket, silence_s) as line:
            await line.ask("GET", target)
            body = await line.body()
            if line.status == 200:
                return body
            error = body.get("error", {}) if isinstance(body, dict) else {}
            raise LostError(error.get("message") or f"the daemon answers {line.status}")
    raise LostError("the daemon's answer cannot be read")
