"""What other clients notice of a flood of grammars that take long to read.

usage: python -m tests.benchmarks.grammar_floods SOCKET [--connections 8] [--seconds 5]
       [--kinds names,schema] [--bytes 15000]

Two streams write, and `/health` is asked every 20 ms: first alone, then beside clients that send
bodies with one kind of grammar over and over, each time the last byte of all at once. Prints for
each kind how late `/health` and the streams' lines were. Exit code 1 if something ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter

HEALTH_PAUSE_S = 0.02
NUM_STREAMS = 2
CHAT = {"messages": [{"role": "user", "content": "Count on and on."}], "max_tokens": 4}


def repeated(text: str, num_bytes: int) -> str:
    return text * (num_bytes // len(text))


def schema_of(num_bytes: int) -> dict[str, object]:
    properties = {f"p{i}": {"type": "string", "enum": ["a"]} for i in range(num_bytes // 60)}
    return {"type": "object", "properties": properties}


def bodies(num_bytes: int) -> dict[str, tuple[str, dict[str, object]]]:
    """Bodies of about this size: a path, and what is sent there."""
    chat, completion = "/v1/chat/completions", "/v1/completions"
    prompt = {"prompt": "a", "max_tokens": 4}
    schema, size = schema_of(num_bytes), num_bytes
    tool = {"name": "f", "parameters": schema}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    return {
        "names": (completion, {**prompt, "grammar": "root ::= " + repeated("a ", size)}),
        "groups": (completion, {**prompt, "grammar": "root ::= " + repeated("(a)", size)}),
        "choices": (completion, {**prompt, "grammar": "root ::= " + repeated('"a"|', size) + "b"}),
        "lark": (completion, {**prompt, "grammar": "start: " + repeated('"a" ', size)}),
        "pattern": (completion, {**prompt, "guided_regex": repeated("(ab|c)", size)}),
        "schema": (chat, {**CHAT, "response_format": form}),
        "tools": (chat, {**CHAT, "tools": [{"type": "function", "function": tool}],
                         "tool_choice": "required"}),
    }  # fmt: skip


def message(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Run:
    """One phase: what was measured while it lasted."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.health_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.num_broken = 0
        self.is_over = False

    async def ask_health(self) -> None:
        """Ask over and over, on a connection each time."""
        while not self.is_over:
            began = time.monotonic()
            reader, writer = await asyncio.open_unix_connection(self.socket)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
            self.health_ms.append((time.monotonic() - began) * 1e3)
            await asyncio.sleep(HEALTH_PAUSE_S)

    async def stream(self) -> None:
        """Read a long stream, and note the time between its lines."""
        body = {**CHAT, "stream": True, "max_tokens": 2000, "ignore_eos": True, "temperature": 1}
        while not self.is_over:
            reader, writer = await asyncio.open_unix_connection(self.socket)
            writer.write(message("/v1/chat/completions", body))
            last = None
            while not self.is_over and (line := await reader.readline()):
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is not None:
                        self.gaps_ms.append((now - last) * 1e3)
                    last = now
            writer.close()

    async def flood(self, data: bytes, count: int) -> None:
        """Send one body on many connections at once, over and over."""
        while not self.is_over:
            opened = await asyncio.gather(*(self._begun(data) for _ in range(count)))
            for _reader, writer in opened:
                writer.write(data[-1:])
            await asyncio.gather(*(self._ended(*each) for each in opened))

    async def _begun(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        writer.write(data[:-1])
        await writer.drain()
        return reader, writer

    async def _ended(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            self.statuses[line.split()[1].decode() if line else "none"] += 1
        except OSError:
            self.num_broken += 1
        writer.close()


async def phase(
    socket: str, seconds: float, data: bytes | None = None, connections: int = 0
) -> Run:
    """Measure for a while; with a body, beside a flood of it."""
    run = Run(socket)
    tasks = [asyncio.create_task(run.stream()) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(1.0)
    run.gaps_ms.clear()
    tasks.append(asyncio.create_task(run.ask_health()))
    if data is not None:
        tasks.append(asyncio.create_task(run.flood(data, connections)))
    await asyncio.sleep(seconds)
    run.is_over = True
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return run


def quantile(values: list[float], share: float) -> float:
    if not values:
        return math.inf
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def told(name: str, run: Run) -> str:
    health, gaps = run.health_ms, run.gaps_ms
    return (
        f"{name:10} health p50 {quantile(health, 0.5):7.1f} p99 {quantile(health, 0.99):7.1f}"
        f" worst {quantile(health, 1):7.1f} ms; gaps p50 {quantile(gaps, 0.5):6.1f}"
        f" p99 {quantile(gaps, 0.99):6.1f} worst {quantile(gaps, 1):6.1f} ms;"
        f" {dict(run.statuses)} broken {run.num_broken}"
    )


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bytes", type=int, default=15_000)
    parser.add_argument("--kinds", default="")
    asked = parser.parse_args()
    print(told("quiet", await phase(asked.socket, asked.seconds)), flush=True)
    for kind, (path, body) in bodies(asked.bytes).items():
        if asked.kinds and kind not in asked.kinds.split(","):
            continue
        data = message(path, body)
        run = await phase(asked.socket, asked.seconds, data, asked.connections)
        print(told(kind, run), flush=True)
        if not run.health_ms or not run.gaps_ms:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
