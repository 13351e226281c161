"""A server that speaks OpenAI's API as a script says: on a Unix socket and on TCP at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.client.address import TcpAddress, UnixAddress

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nConnection: close\r\n"


@dataclass
class Script:
    """How completions are answered."""

    first_s: float = 0.0
    gap_s: float = 0.0
    per_event: int = 1
    has_ids: bool = True
    """Events say which tokens they have."""
    refuse: Callable[[int], bool] = lambda index: False
    """Whether the request with this index gets a 429."""
    breaks_after: int | None = None
    """Events after which the connection is closed."""
    tokenizes: bool = True
    power_w: float | None = None
    starved: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_open: int = 0


class FakeOpenAI:
    """Serves in a thread of its own, from `with` to its end."""

    def __init__(self, socket_path: Path) -> None:
        self.script = Script()
        self.unix = UnixAddress(socket_path)
        self.tcp = TcpAddress("127.0.0.1", 0)
        self._num_open = 0
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        assert self._listening.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        unix = await asyncio.start_unix_server(self._answer, self.unix.path)
        tcp = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.tcp = TcpAddress("127.0.0.1", tcp.sockets[0].getsockname()[1])
        self._listening.set()
        await self._end.wait()
        for server in (unix, tcp):
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hang_up = contextlib.suppress(ConnectionError, asyncio.IncompleteReadError)
        with contextlib.closing(writer), hang_up:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            path = head.split(" ")[1]
            length = head.partition("content-length: ")[2].partition("\r\n")[0]
            body = json.loads(await reader.readexactly(int(length))) if length else None
            if path == "/v1/completions":
                await self._complete(body, writer)
            else:
                status, content = self._object(path)
                self._write(writer, status, content)
            await writer.drain()

    def _object(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "fake"}]}
        if path == "/tokenize" and self.script.tokenizes:
            return 200, {"tokens": [7, 8, 9]}
        if path == "/v1/penstock/state" and self.script.power_w is not None:
            devices = [{"power_w": self.script.power_w}, {"power_w": None}]
            return 200, {"devices": devices, "starved": self.script.starved}
        return 404, {"error": {"message": "no such path"}}

    def _write(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        writer.write(HEAD % (status, b"application/json"))
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        script = self.script
        index = len(script.bodies)
        script.bodies.append(body)
        if script.refuse(index):
            self._write(writer, 429, {"error": {"message": "the queue is full"}})
            return
        self._num_open += 1
        script.most_open = max(script.most_open, self._num_open)
        try:
            await self._stream(body, writer)
        finally:
            self._num_open -= 1

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        script, left = self.script, body["max_tokens"]
        writer.write(HEAD % (200, b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(script.first_s)
        for number in range(-(-left // script.per_event)):
            if number == script.breaks_after:
                return
            if number:
                await asyncio.sleep(script.gap_s)
            ids = list(range(min(script.per_event, left)))
            left -= len(ids)
            choice = {"index": 0, "text": "a" * len(ids)}
            self._event(
                writer, {"choices": [choice | ({"token_ids": ids} if script.has_ids else {})]}
            )
            await writer.drain()
        prompt = body["prompt"]
        num_prompt = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"E\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        data = b"data: %b\n\n" % json.dumps(content).encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
