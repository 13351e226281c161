"""What other clients notice of a flood of grammars that take long to read.

usage: python -m tests.benchmarks.grammar_floods SOCKET [--connections 8] [--seconds 5]
       [--kinds names,schema] [--bytes 15000] [--rounds 1] [--control-rate 500]

Two streams write, and `/health` is asked every 20 ms: alone and, in turn, beside a process whose
clients send bodies with one kind of grammar over and over, each time the last byte of all at once.
Prints for each kind how late `/health` and the streams' lines were, and both beside what they were
before and after it. `quiet` is a kind without a flood: its figures are the band in which the others
say nothing. `plain` has no grammar: of kinds that are served, it says what serving them costs.
`lost` is a path that is not there. In `control`, a program drops `--control-rate` bodies a second:
what the clients themselves take from streams on the same cores.
Exit code 1 if something ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HEALTH_PAUSE_S = 0.02
NUM_STREAMS = 2
SETTLE_S = 1.0
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
    gbnf_choices = "root ::= " + repeated('"a"|', size) + '"b"'
    tool = {"name": "f", "parameters": schema}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    return {
        "control": (completion, {"user": "a" * size}),
        "lost": ("/v1/lost", {"user": "a" * size}),
        "plain": (completion, {**prompt, "user": "a" * size}),
        "names": (completion, {**prompt, "grammar": "root ::= " + repeated("a ", size)}),
        "groups": (completion, {**prompt, "grammar": "root ::= " + repeated("(a)", size)}),
        "choices": (completion, {**prompt, "grammar": gbnf_choices}),
        "choice": (completion, {**prompt, "guided_choice": [f"c{i}" for i in range(1000)]}),
        "lark": (completion, {**prompt, "grammar": "start: " + repeated('"a" ', size)}),
        "pattern": (completion, {**prompt, "guided_regex": repeated("(ab|c)", size)}),
        "schema": (chat, {**CHAT, "response_format": form}),
        "tools": (chat, {**CHAT, "tools": [{"type": "function", "function": tool}],
                         "tool_choice": "required"}),
    }  # fmt: skip


def drop(path: str, num_bytes: int, per_s: float) -> None:
    """Take a body of this size and refuse it, one after the other, so many a second."""
    due_s = 0.0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4096)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                left = num_bytes
                while left and (part := connection.recv(left)):
                    left -= len(part)
                connection.send(b"HTTP/1.1 400 dropped\r\n\r\n")
            due_s = max(due_s, time.monotonic()) + 1 / per_s
            time.sleep(max(due_s - time.monotonic(), 0.0))


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
        self.is_over = False
        self.num_streaming = 0
        self.are_streaming = asyncio.Event()

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
        """Read a long stream, and note the time between its tokens."""
        body = {
            **CHAT,
            "stream": True,
            "max_tokens": 2000,
            "ignore_eos": True,
            "temperature": 1,
            "return_token_ids": True,
        }  # a line for each: some tokens have no text of their own
        while not self.is_over:
            reader, writer = await asyncio.open_unix_connection(self.socket)
            writer.write(message("/v1/chat/completions", body))
            last = None
            while not self.is_over and (line := await reader.readline()):
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is None:
                        self.num_streaming += 1
                        if self.num_streaming >= NUM_STREAMS:
                            self.are_streaming.set()
                    else:
                        self.gaps_ms.append((now - last) * 1e3)
                    last = now
            writer.close()


class Flood:
    """Clients in a process of their own, so that their work delays no reading of a clock."""

    def __init__(self, socket: str, data: bytes, count: int) -> None:
        self._socket, self._data, self._count = socket, data, count
        self._answers: multiprocessing.Queue[Counter[str]] = multiprocessing.Queue()
        self._is_over = multiprocessing.Event()
        self._process = multiprocessing.Process(target=lambda: asyncio.run(self._run()))
        self._statuses: Counter[str] = Counter()

    def __enter__(self) -> Flood:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> Counter[str]:
        """Count the replies by their status."""
        self._is_over.set()
        return self._answers.get(timeout=120)

    async def _run(self) -> None:
        sending = asyncio.create_task(self._send())
        await asyncio.to_thread(self._is_over.wait)
        sending.cancel()
        self._answers.put(self._statuses)

    async def _send(self) -> None:
        """Send one body on many connections at once, over and over."""
        while True:
            opened = await asyncio.gather(*(self._begun() for _ in range(self._count)))
            for _reader, writer in opened:
                writer.write(self._data[-1:])
            await asyncio.gather(*(self._answer(*each) for each in opened))

    async def _begun(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        writer.write(self._data[:-1])
        await writer.drain()
        return reader, writer

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            self._statuses[line.split()[1].decode() if line else "none"] += 1
        except OSError:
            self._statuses["broken"] += 1
        writer.close()


async def phase(socket: str, seconds: float, flood: Flood | None = None) -> Run:
    """Measure for a while, beside a flood if there is one."""
    run = Run(socket)
    tasks = [asyncio.create_task(run.stream()) for _ in range(NUM_STREAMS)]
    await run.are_streaming.wait()  # of the last flood some may be left to refuse
    await asyncio.sleep(SETTLE_S)
    run.gaps_ms.clear()
    tasks.append(asyncio.create_task(run.ask_health()))
    with flood or contextlib.nullcontext():
        await asyncio.sleep(seconds)
        run.is_over = True
        if flood is not None:
            run.statuses = await asyncio.to_thread(flood.end)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return run


def quantile(values: list[float], share: float) -> float:
    if not values:
        return math.inf
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def told(name: str, run: Run, before: Run, after: Run) -> str:
    health, gaps = run.health_ms, run.gaps_ms
    over_ms = quantile(health, 0.99) - quantile(before.health_ms + after.health_ms, 0.99)
    ratio = quantile(gaps, 0.99) / quantile(before.gaps_ms + after.gaps_ms, 0.99)
    return (
        f"{name:10} health p50 {quantile(health, 0.5):7.1f} p99 {quantile(health, 0.99):7.1f}"
        f" worst {quantile(health, 1):7.1f} ms; gaps p50 {quantile(gaps, 0.5):6.1f}"
        f" p99 {quantile(gaps, 0.99):6.1f} worst {quantile(gaps, 1):6.1f} ms;"
        f" health p99 {over_ms:+.1f} ms, gaps p99 x{ratio:.2f}; {dict(run.statuses)}"
    )


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bytes", type=int, default=15_000)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--control-rate", type=float, default=500.0)
    asked = parser.parse_args()
    bodies_by_kind = bodies(asked.bytes)
    floods = {"quiet": None, **bodies_by_kind}
    kinds = (asked.kinds.split(",") if asked.kinds else [*floods]) * asked.rounds
    folder = tempfile.TemporaryDirectory(prefix="floods-")
    control = str(Path(folder.name, "s"))
    work = (control, len(message(*bodies_by_kind["control"])), asked.control_rate)
    multiprocessing.Process(target=drop, args=work, daemon=True).start()
    before = await phase(asked.socket, asked.seconds)
    for kind in kinds:
        body = floods[kind]
        where = control if kind == "control" else asked.socket
        flood = body and Flood(where, message(*body), asked.connections)
        run = await phase(asked.socket, asked.seconds, flood)
        after = await phase(asked.socket, asked.seconds)
        if not run.health_ms or not run.gaps_ms:
            return 1
        print(told(kind, run, before, after), flush=True)
        before = after
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
