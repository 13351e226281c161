"""A daemon on a real Unix socket that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import msgspec

from appliance.observe.frame.protocol import Frame, RequestFrame


class FakeDaemon:
    """Streams `lines` to every reader, then what `send` adds; can die and come back."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.lines: list[bytes] = []
        self.requests: dict[str, RequestFrame] = {}
        self.cancelled: list[str] = []
        self.caller: bytes = b'{"name": "ana", "role": "operator", "uid": 1001, "key": null}'
        self.changes: list[tuple[str, bytes]] = []
        """Paths and bodies of what it was asked to change."""
        self.recording = b""
        """What it recorded; empty: nothing."""
        self.num_streams = 0
        self._readers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeDaemon:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def start(self) -> None:
        # Python 3.13 takes the file away, as one that is killed does not
        stays = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        path = str(self.socket_path)
        self._server = await asyncio.start_unix_server(self._answer, path, **stays)

    async def die(self) -> None:
        """As after kill -9: connections end in the middle, the socket file stays."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._readers):
            writer.transport.abort()
        self._readers.clear()
        await asyncio.sleep(0)

    def send(self, frame: Frame | bytes) -> None:
        line = frame if isinstance(frame, bytes) else msgspec.json.encode(frame) + b"\n"
        self.lines.append(line)
        for writer in self._readers:
            writer.write(_chunk(line))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.decode().split("\r\n")[0].split(" ")
        if target == "/v1/penstock/stream":
            self.num_streams += 1
            self._readers.add(writer)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for line in self.lines:
                writer.write(_chunk(line))
            await reader.read()  # until the console hangs up
            self._readers.discard(writer)
        else:
            length = re.search(rb"content-length: (\d+)", head)
            content = await reader.readexactly(int(length[1])) if length else b""
            status, body = self._reply(method, target, content)
            head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
        writer.close()

    def _reply(self, method: str, target: str, content: bytes) -> tuple[int, bytes]:
        if target == "/v1/penstock/whoami":
            return 200, self.caller
        if target.startswith("/v1/requests?limit="):
            most = int(target.partition("=")[2])
            return 200, msgspec.json.encode({"data": list(self.requests.values())[:most]})
        if target == "/v1/penstock/recording?since=300s":
            return (200, self.recording) if self.recording else (404, b"{}")
        if target.startswith("/v1/penstock/"):
            self.changes.append((target, content))
            return 200, b"{}"
        request_id = target.removeprefix("/v1/requests/").removesuffix("/cancel")
        if method == "POST" and request_id in self.requests:
            self.cancelled.append(request_id)
            return 200, b"{}"
        if method == "GET" and request_id in self.requests:
            return 200, msgspec.json.encode(self.requests[request_id])
        if request_id == "forbidden":
            return 403, b'{"error": {"message": "not yours", "code": "forbidden"}}'
        return 404, b'{"error": {"message": "no such request", "code": "not_found"}}'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
