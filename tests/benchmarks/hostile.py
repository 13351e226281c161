"""What is left behind by very many requests that nobody should send.

usage: python -m tests.benchmarks.hostile SOCKET [--tcp HOST:PORT --key KEY] [--requests 100000]
       [--seed 0] [--concurrency 32] [--minutes 60]

Clients send garbage, halves, floods and mutations of good requests, and leave when they like. After
each thousand a normal request must be answered, the pools must be free, and what the daemon and its
workers hold is printed. Exit code 1 if a normal request fails, blocks stay taken, descriptors or
threads pile up, or memory still grows in the second half of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

BATCH = 1000
PATIENCE_S = 20.0
SPARE_FDS = 4
"""Descriptors that come and go by themselves, such as the log's."""
MAX_GROWTH = 1.05
MAX_GROWTH_BYTES = 8 << 20
"""Of a process's memory in the second half; both must be exceeded."""
PATHS = (
    "/v1/completions /v1/chat/completions /v1/models /v1/models/x /health /ready /version "
    "/v1/requests /v1/requests/x /v1/requests/x/cancel /v1/penstock/state /v1/penstock/stream "
    "/v1/penstock/log?limit=-1 /tokenize /detokenize /v1/responses / // /../etc/passwd /%00 /%ff "
    "/v1/messages /v1/messages/count_tokens /v1/responses/x /api/chat /api/generate /api/tags "
    "/api/show /api/ps /api/version /api/pull /chat/completions /models "
    "http://elsewhere/ * /v1/penstock/log?limit=99999999999999999999 /openapi.json"
)
GENERATING = (
    "/v1/completions /v1/chat/completions /v1/responses /v1/messages /api/chat /api/generate"
)
METHODS = "GET POST PUT DELETE PATCH HEAD OPTIONS TRACE CONNECT BREW get"
VALUES: list[object] = [
    None, True, -1, 0, 1, 2**31, 2**63, 1e308, -0.0, "", "a", "\x00", "\ud800", [], {}, [[]],
    [None], [-1], [2**40], "x" * 5000, {"a": {"b": []}}, [["a"]], 0.5, "nan", [1] * 300,
]  # fmt: skip
FIELDS = (
    "prompt messages model max_tokens max_completion_tokens min_tokens n best_of temperature top_p "
    "top_k min_p seed stop stream stream_options logprobs top_logprobs echo suffix logit_bias "
    "presence_penalty frequency_penalty repetition_penalty response_format tools tool_choice user "
    "ignore_eos stop_token_ids return_token_ids parallel_tool_calls metadata input instructions "
    "previous_response_id store reasoning system thinking stop_sequences options format think raw "
    "allowed_token_ids bad_words prompt_logprobs structured_outputs guided_json grammar documents "
    "json_schema truncate_prompt_tokens skip_special_tokens chat_template_kwargs "
    "add_generation_prompt output_config tokens content with_pieces name verbose"
)
COUNTING = "/v1/messages/count_tokens /tokenize /detokenize /api/show /infill /chat/completions"


@dataclass
class Target:
    """Where one hostile client goes, and what opens the door there."""

    address: str | tuple[str, int]
    headers: str

    async def connect(self):
        if isinstance(self.address, str):
            return await asyncio.open_unix_connection(self.address)
        return await asyncio.open_connection(*self.address)

    def request(self, method: str, path: str, body: bytes = b"", extra: str = "") -> bytes:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        return f"{method} {path} HTTP/1.1\r\n{self.headers}{extra}{length}\r\n".encode() + body


def body_of(rng: random.Random, *, max_tokens: int = 4) -> tuple[str, dict[str, object]]:
    """A good request."""
    fields: dict[str, object] = {"max_tokens": rng.randint(1, max_tokens)}
    if rng.random() < 0.5:
        fields["stream"] = True
    path = rng.choice(GENERATING.split())
    if path == "/v1/completions":
        return path, {"prompt": "a" * rng.randint(1, 40), **fields}
    if path == "/v1/responses":
        fields["max_output_tokens"] = fields["max_tokens"]
        return path, {"input": "hi", **fields}
    if path.startswith("/api/"):
        fields["options"] = {"num_predict": fields["max_tokens"]}
        fields.setdefault("stream", False)
    if path == "/api/generate":
        return path, {"prompt": "hi", "raw": rng.random() < 0.5, **fields}
    return path, {"messages": [{"role": "user", "content": "hi"}], **fields}


# Each kind returns what to send, in parts; then the client reads a little, or nothing, and leaves.


def garbage(rng, target):
    return [rng.randbytes(rng.randint(1, 2000))]


def almost_http(rng, target):
    data = bytearray(target.request("POST", "/v1/completions", b'{"prompt":"a","max_tokens":1}'))
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return [bytes(data)]


def half(rng, target):
    path, body = body_of(rng)
    whole = target.request("POST", path, json.dumps(body).encode())
    return [whole[: rng.randrange(len(whole))]]


def trickle(rng, target):
    whole = target.request("GET", rng.choice(PATHS.split()))
    cuts = sorted(rng.sample(range(1, len(whole)), 4))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def mutated(rng, target):
    path, body = body_of(rng)
    if rng.random() < 0.2:  # the same fields where nothing is generated, or by another path
        path = rng.choice(COUNTING.split())
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(FIELDS.split())] = rng.choice(VALUES)
    # Whatever else was asked for, it must not run for long.
    body["max_tokens"] = rng.choice([0, 1, 3, -1, "3", None]) if rng.random() < 0.3 else 3
    body["max_output_tokens"] = 3
    return [target.request("POST", path, json.dumps(body).encode())]


def broken_json(rng, target):
    path, body = body_of(rng)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return [target.request("POST", path, bytes(data))]


def deep_json(rng, target):
    depth = rng.randint(100, 50_000)
    return [target.request("POST", "/v1/completions", b'{"prompt":' + b"[" * depth)]


def wrong_way(rng, target):
    body = b"x" * rng.choice([0, 0, 10])
    return [target.request(rng.choice(METHODS.split()), rng.choice(PATHS.split()), body)]


def too_large(rng, target):
    size = rng.choice([2**24, 2**31, 2**63, 10**30])
    head = f"POST /v1/completions HTTP/1.1\r\n{target.headers}Content-Length: {size}\r\n\r\n"
    return [head.encode(), b"x" * rng.randint(0, 100_000)]


def many_headers(rng, target):
    extra = "".join(f"X-{i}: {'y' * rng.randint(0, 50)}\r\n" for i in range(rng.randint(50, 3000)))
    return [target.request("GET", "/health", extra=extra)]


def smuggled(rng, target):
    extra = rng.choice(
        ["Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "Content-Length: 1\r\n",
         "Transfer-Encoding: gzip, chunked\r\n", "Content-Length: -1\r\n", "Host: y\r\n"]
    )  # fmt: skip
    return [target.request("POST", "/v1/completions", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n", extra)]


def bad_chunks(rng, target):
    head = f"POST /v1/completions HTTP/1.1\r\n{target.headers}Transfer-Encoding: chunked\r\n\r\n"
    chunk = rng.choice(
        [b"zz\r\n", b"f" * 30 + b"\r\n", b"5\r\nhello\r\n", b"-1\r\n\r\n", b"1\r\nab"]
    )
    return [head.encode(), chunk]


def pipelined(rng, target):
    path, body = body_of(rng)
    return [target.request("POST", path, json.dumps(body).encode()) * rng.randint(2, 5)]


def cancelled(rng, target):
    path, body = body_of(rng, max_tokens=200)
    body["ignore_eos"] = True
    return [target.request("POST", path, json.dumps(body).encode())]


def other_protocol(rng, target):
    hello = bytes.fromhex("160301020001000001fc0303") + rng.randbytes(200)
    return [rng.choice([hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"EHLO x\r\n", b"\r\n" * 50])]


def valid(rng, target):
    path, body = body_of(rng)
    return [target.request("POST", path, json.dumps(body).encode(), "Connection: close\r\n")]


KINDS = (
    garbage, almost_http, half, trickle, mutated, mutated, mutated, broken_json, deep_json,
    wrong_way, wrong_way, too_large, many_headers, smuggled, bad_chunks, pipelined, cancelled,
    other_protocol, valid,
)  # fmt: skip


async def attack(rng: random.Random, target: Target) -> str:
    """One hostile client from connect to leaving; what became of it."""
    kind = rng.choice(KINDS)
    try:
        reader, writer = await target.connect()
    except OSError:
        return "no connection"
    status = "no reply"
    try:
        async with asyncio.timeout(PATIENCE_S):
            for part in kind(rng, target):
                writer.write(part)
                await asyncio.sleep(0)
            leaving = rng.random()
            if kind is not valid and leaving < 0.2:
                return "left at once"
            # On TCP that cannot be told from leaving, so a good client does not do it there.
            if leaving < 0.4 and (kind is not valid or isinstance(target.address, str)):
                writer.write_eof()
            # Some wait for an end that does not come: halves, and connections kept alive.
            wait_s = PATIENCE_S if kind is valid else rng.choice([0.01, 0.1, 0.5])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    reply = await reader.read(4096)
                    if match := re.match(rb"HTTP/1\.1 (\d{3}) ", reply):
                        status = match[1].decode()
                    while kind is valid and await reader.read(65536):
                        pass
        if kind is valid and status not in ("200", "429", "503"):
            return f"VALID GOT {status}"
    except (OSError, TimeoutError):
        return "cut off"
    else:
        return status
    finally:
        if rng.random() < 0.3 and (sock := writer.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # a reset in place of a goodbye, on TCP
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    """Its own; pages of the KV pools are there from the start, and count when first touched."""
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_kib = int(re.search(r"RssAnon:\s+(\d+)", status)[1])
        threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
        return cls(rss_kib * 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads)


class Watch:
    """Asks the daemon how it is, over the socket, as a normal client."""

    def __init__(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.daemon_pid = struct.unpack("3i", raw)[0]
        transport = httpx.AsyncHTTPTransport(uds=path, retries=2)
        self.http = httpx.AsyncClient(
            base_url="http://localhost", transport=transport, timeout=60.0
        )
        self.history: list[dict[str, Held]] = []

    async def check(self, num_sent: int, outcomes: Counter[str], seconds: float) -> list[str]:
        """Print one line; what is wrong."""
        problems = [f"a {outcome}" for outcome in outcomes if outcome.startswith("VALID")]
        state = await self._quiet_state()
        pools = {
            pool["name"]: (pool["free"] + pool["cached"], pool["num_blocks"])
            for pool in state["pools"]
        }
        if not self._is_free(state):
            problems.append(f"blocks stay taken: {pools}")
        reply = await self.http.post(
            "/v1/completions", json={"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
        )
        if reply.status_code != 200 or reply.json()["usage"]["completion_tokens"] != 2:
            problems.append(f"a normal request got {reply.status_code}: {reply.text[:200]}")
        pids = {"daemon": self.daemon_pid} | {w["name"]: w["pid"] for w in state["workers"]}
        held = {name: Held.of(pid) for name, pid in pids.items()}
        self.history.append(held)
        shown = "  ".join(
            f"{name} {h.rss_bytes / 2**20:.1f} MiB {h.num_fds} fds {h.num_threads} threads"
            for name, h in held.items()
        )
        free = " ".join(f"{name} {free}/{size}" for name, (free, size) in pools.items())
        top = " ".join(f"{outcome}:{count}" for outcome, count in sorted(outcomes.items()))
        print(f"{num_sent:7d} {seconds:6.1f} s  {shown}  free {free}  [{top}]", flush=True)
        return problems

    def growth(self) -> list[str]:
        """What the second half of the run holds more than the end of the first."""
        problems = []
        middle, last = self.history[len(self.history) // 2], self.history[-1]
        for name, before in middle.items():
            after = last.get(name, before)
            grown = after.rss_bytes - before.rss_bytes
            if grown > max(MAX_GROWTH_BYTES, before.rss_bytes * (MAX_GROWTH - 1)):
                problems.append(f"{name} has grown by {grown / 2**20:.1f} MiB")
            if after.num_fds > before.num_fds + SPARE_FDS:
                problems.append(f"{name} has {after.num_fds - before.num_fds} more descriptors")
            if after.num_threads > before.num_threads + SPARE_FDS:
                problems.append(f"{name} has {after.num_threads - before.num_threads} more threads")
        return problems

    async def _quiet_state(self) -> dict:
        """The state once nothing runs any more, or as it is after a while."""
        for _ in range(120):
            state = (await self.http.get("/v1/penstock/state")).json()
            if self._is_free(state):
                break
            await asyncio.sleep(0.5)
        return state

    @staticmethod
    def _is_free(state: dict) -> bool:
        return all(pool["free"] + pool["cached"] == pool["num_blocks"] for pool in state["pools"])


async def run(options: argparse.Namespace) -> int:
    targets = [Target(options.socket, "Host: localhost\r\n")]
    if options.tcp:
        host, _, port = options.tcp.rpartition(":")
        key = f"Authorization: Bearer {options.key}\r\n" if options.key else ""
        targets.append(Target((host, int(port)), f"Host: localhost\r\n{key}"))
    rng = random.Random(options.seed)
    watch = Watch(options.socket)
    start = time.monotonic()
    problems = await watch.check(0, Counter(), 0.0)
    for num_sent in range(BATCH, options.requests + 1, BATCH):
        outcomes: Counter[str] = Counter()
        seeds = iter([rng.getrandbits(64) for _ in range(BATCH)])

        async def client(seeds=seeds, outcomes=outcomes):
            for seed in seeds:
                own = random.Random(seed)
                outcomes[await attack(own, own.choice(targets))] += 1

        await asyncio.gather(*(client() for _ in range(options.concurrency)))
        problems += await watch.check(num_sent, outcomes, time.monotonic() - start)
        if problems or time.monotonic() - start > options.minutes * 60:
            break
    problems += watch.growth()
    await watch.http.aclose()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("socket")
    parser.add_argument("--tcp", help="HOST:PORT")
    parser.add_argument("--key")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=60.0)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
