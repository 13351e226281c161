"""The real server on real sockets around a FakeAppliance, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai

from appliance.api.routes import build_app
from appliance.http.access import AccessPolicy
from appliance.http.api_keys import new_key, read_keys
from appliance.http.listeners import bind_socket, bind_tcp
from appliance.http.server import ApiServer
from tests.worlds.daemon_parts import FakeAppliance, until

DOORS = ("socket", "tcp")
KEY_NAME = "laptop"


class Served:
    """A running server, and clients for it that come in by one of its doors.

    Nothing is encrypted, so no client reads the system's certificates: that takes 26 ms a client.

    Args:
        appliance: what is served.
        path: of the Unix socket.
        port: of TCP, if the clients come in there.
        key: that they show there.
    """

    def __init__(
        self, appliance: FakeAppliance, path: Path, port: int | None = None, key: str = "-"
    ) -> None:
        self.appliance = appliance
        self.path = path
        self.url = "http://localhost" if port is None else f"http://127.0.0.1:{port}"
        self.key = key
        self.uds = str(path) if port is None else None
        """None on TCP, as httpx takes it."""
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            transport=httpx.AsyncHTTPTransport(uds=self.uds, verify=False),
        )
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            http_client=httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=self.uds, verify=False)
            ),
            max_retries=0,
        )
        """The official client, as an application would set it up."""
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the socket, closed at the end if not before."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """Hang up everywhere."""
        await self.http.aclose()
        await self.openai.close()
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hello", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **body})

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """A POST of which nothing has been read yet: (reader, writer)."""
        reader, writer = await self.connect()
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        await writer.drain()
        return reader, writer


@contextlib.asynccontextmanager
async def serving(
    appliance: FakeAppliance, path: Path, door: str = "socket", grace_s: float = 2.0
) -> AsyncIterator[Served]:
    """Serve until the block ends; then every accepted request must have been closed."""
    listeners, entrance, policy = [bind_socket(path)], (), None
    if door == "tcp":
        listeners += bind_tcp("127.0.0.1", 0)
        key, policy = one_key(path.parent)
        entrance = listeners[-1].getsockname()[1], key
    async with started(appliance, listeners, policy, grace_s=grace_s):
        served = Served(appliance, path, *entrance)
        try:
            yield served
        finally:
            await served.close()
    assert len(appliance.closed) == len(appliance.submitted)


@contextlib.asynccontextmanager
async def started(
    appliance: FakeAppliance,
    listeners: list[socket.socket],
    policy: AccessPolicy | None = None,
    grace_s: float = 1.0,
) -> AsyncIterator[ApiServer]:
    """A server on these listeners, until the block ends."""
    server = ApiServer(build_app(appliance), listeners, policy)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=grace_s)


def one_key(
    folder: Path, name: str = KEY_NAME, role: str = "user", **settings: Any
) -> tuple[str, AccessPolicy]:
    """A key, and a policy that knows it."""
    key, line = new_key(name, role)
    path = folder / "keys"
    path.write_text(line)
    path.chmod(0o600)
    return key, AccessPolicy(keys=read_keys(path), **settings)


def url_of(listener: socket.socket) -> str:
    """The address of a server on TCP."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def events(body: str) -> list[Any]:
    """The data of server-sent events; `[DONE]` must be the last."""
    data = [block[len("data: ") :] for block in body.split("\n\n") if block.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def says(appliance, text: str):
    """Make the appliance answer with a text, whatever the prompt."""
    ids = appliance.tokenizer.encode(text, add_special_tokens=False)
    appliance.script = lambda prompt: ids


async def fill(served, num_requests: int) -> list[asyncio.Task]:
    """Requests that wait at the gate."""
    served.appliance.gate.clear()
    tasks = [asyncio.create_task(served.complete(prompt=["a"])) for _ in range(num_requests)]
    await until(lambda: len(served.appliance.live) == num_requests)
    return tasks
