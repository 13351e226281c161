"""One request and its reply on a connection of its own.

Owns: the connection, and the stamp of each read.
Invariant: a read is stamped before it is looked at; whatever goes wrong is a sentence in the
reply's `problem`.
Never: raises for what a server does, retries, or keeps a connection.
"""

from __future__ import annotations

import asyncio
import time

from appliance.bench.reply_events import ReceivedReply, ReplyReader
from appliance.configuration.address import Address, TcpAddress, UnixAddress
from engine.errors import ConfigError


async def exchange(
    address: Address, request: bytes, reply: ReceivedReply, deadline_s: float
) -> None:
    """Send a request and fill its reply until that ends, or until so many seconds have passed.

    A reply that the deadline cut off has neither an end nor a problem. Hanging up, as by
    cancelling this, makes a server cancel what it still computes.

    Raises:
        ConfigError: the address is behind ssh.
    """
    loop = asyncio.get_running_loop()
    line = _Line(request, reply, loop.create_future())
    try:
        async with asyncio.timeout(deadline_s):
            match address:
                case UnixAddress(path):
                    await loop.create_unix_connection(lambda: line, str(path))
                case TcpAddress(host, port, is_tls):
                    await loop.create_connection(lambda: line, host, port, ssl=is_tls or None)
                case _:
                    raise ConfigError(
                        "a benchmark does not go through ssh",
                        where=str(address),
                        hint="run it on that machine",
                    )
            await line.ended
    except TimeoutError:
        pass  # the caller knows whether that was meant
    except OSError as error:
        reply.problem = f"cannot connect: {error.strerror or error}"
    finally:
        line.hang_up()


class _Line(asyncio.Protocol):
    """Both directions of one exchange."""

    def __init__(self, request: bytes, reply: ReceivedReply, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self._request = request
        self._reader = ReplyReader(reply)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if not self.ended.done():
            self._reader.feed(data, now_ns)
            if self._reader.is_over:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._reader.close()
            self.ended.set_result(None)

    def hang_up(self) -> None:
        """Close the connection at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()
