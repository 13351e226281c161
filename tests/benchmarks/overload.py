"""What a daemon does with more than it can serve, beside another version of it.

usage: python -m tests.benchmarks.overload MODEL [--base CHECKOUT] [--seconds 30] [--within-s 4]
       [--prompt-tokens 300] [--output-tokens 64] [--loads 1,2,10] [--burst 700] [--silent 600]

CHECKOUT is a checkout of another commit with an environment of its own (.venv). All daemons run
all the time, on the same cores, and take turns: one is asked, the others are idle. Each gets the
target for the first token that goodput is counted by (`slo_ttft_ms`).

Parts: capacity (a closed loop of eight clients); an open loop of random arrivals at multiples of
the first daemon's capacity; a burst at once, each refused client of which comes back once, when it
was told to; connections that ask nothing, under which `/ready` and `penstock status` are asked;
CPU time of the idle daemon. Every request has a prompt of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 90.0
CLOSED_CLIENTS = 8
CLOSED_S = 15.0
BURST_S = 20.0
"""How long who was taken out of a burst, or comes back, is watched."""
IDLE_S = 10.0


@dataclass(slots=True)
class Outcome:
    """One request, in seconds from its sending."""

    status: int | None = None
    """None: nothing came, or the connection was cut."""
    head_s: float | None = None
    first_s: float | None = None
    retry_after_s: float | None = None
    is_done: bool = False


class Arm:
    """A daemon of one checkout."""

    def __init__(self, name: str, checkout: Path, options: argparse.Namespace) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="overload-"))
        self.socket = self.folder / "p.sock"
        self.checkout = checkout
        self.python = checkout / ".venv" / "bin" / "python"
        if not self.python.exists():
            self.python = Path(sys.executable)
        command = [str(self.python), "-m", "appliance.cli", "serve", "--socket", str(self.socket)]
        command += ["--state-dir", str(self.folder / "state"), "--model", options.model]
        command += ["--slo-ttft-ms", str(int(1e3 * options.within_s))]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.env |= {"XDG_CONFIG_HOME": str(self.folder), "PYTHONPATH": str(checkout)}
        with (self.folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(command, cwd=checkout, stderr=stderr, env=self.env)

    async def ready(self) -> None:
        deadline = time.monotonic() + START_S
        while (await get(self, "/ready"))[0] != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit((self.folder / "stderr").read_text())
            await asyncio.sleep(0.2)

    async def idle(self) -> None:
        """Wait until nothing is live: what was hung up is gone."""
        while True:
            _, body, _ = await get(self, "/v1/penstock/state")
            if body and not json.loads(body)["num_requests"]:
                return
            await asyncio.sleep(0.2)

    def cpu_s(self) -> float:
        """Return the daemon's CPU time; `process` is its keeper, if it has one."""
        keeper = psutil.Process(self.process.pid)
        daemons = [each for each in keeper.children() if "serve" in each.cmdline()]
        used = (daemons or [keeper])[0].cpu_times()
        return used.user + used.system

    def stop(self) -> None:
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        self.process.wait(30)
        shutil.rmtree(self.folder)


async def get(arm: Arm, path: str, patience_s: float = 5.0) -> tuple[int | None, bytes, float]:
    """Status, body and seconds of a GET on a connection of its own."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_unix_connection(str(arm.socket))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            reply = await reader.read(-1)
            writer.close()
    except (OSError, TimeoutError):
        return None, b"", time.monotonic() - began
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = b"".join(body.split(b"\r\n")[1::2])
    status = int(head.split()[1]) if head else None
    return status, body, time.monotonic() - began


async def ask(arm: Arm, rng: random.Random, options: argparse.Namespace, until: float) -> Outcome:
    """One streamed completion, hung up at `until`."""
    request = written(rng, options)
    outcome, began, writer = Outcome(), time.monotonic(), None
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - began):
            reader, writer = await asyncio.open_unix_connection(str(arm.socket))
            writer.write(request)
            reply = (await reader.readuntil(b"\r\n\r\n")).decode()
            outcome.status = int(reply.split()[1])
            outcome.head_s = time.monotonic() - began
            if outcome.status != 200:
                outcome.retry_after_s = retry_after_s(reply)
                return outcome
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    outcome.first_s = outcome.first_s or time.monotonic() - began
                elif line.startswith(b"data: [DONE]"):
                    outcome.is_done = True
                    return outcome
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return outcome


def written(rng: random.Random, options: argparse.Namespace) -> bytes:
    """A request with a prompt of its own."""
    prompt = [rng.randrange(1000, 40_000) for _ in range(options.prompt_tokens)]
    fields = {"max_tokens": options.output_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def retry_after_s(head: str) -> float | None:
    headers = dict(line.partition(":")[::2] for line in head.lower().splitlines())
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1e3
    return float(headers["retry-after"]) if "retry-after" in headers else None


async def capacity(arm: Arm, options: argparse.Namespace) -> float:
    """Requests a second that clients get who ask again as soon as they are answered, or may."""
    rng, num_done = random.Random(1), 0
    began = time.monotonic()

    async def client() -> None:
        nonlocal num_done
        while time.monotonic() < began + CLOSED_S:
            outcome = await ask(arm, rng, options, began + CLOSED_S)
            num_done += outcome.is_done
            await asyncio.sleep(outcome.retry_after_s or 0)

    await asyncio.gather(*(client() for _ in range(CLOSED_CLIENTS)))
    await arm.idle()
    return max(num_done, 1) / CLOSED_S


async def open_loop(arm: Arm, rate: float, options: argparse.Namespace) -> list[Outcome]:
    """Random arrivals at a rate; who still waits `within_s` after the last is hung up."""
    # the same for all arms, and another for each load: nothing is found in a prefix cache
    rng, tasks = random.Random(f"{rate:.6f}"), []
    began = time.monotonic()
    at = began
    until = began + options.seconds + options.within_s
    while (at := at + rng.expovariate(rate)) < began + options.seconds:
        await asyncio.sleep(max(at - time.monotonic(), 0))
        tasks.append(asyncio.create_task(ask(arm, rng, options, until)))
    outcomes = list(await asyncio.gather(*tasks))
    await arm.idle()
    return outcomes


async def burst(arm: Arm, options: argparse.Namespace) -> tuple[list[Outcome], list[Outcome]]:
    """All at once, and those who come back once, when they were told to.

    The flood is sent by plain sockets in a thread, from requests that are written before: this
    client shares the cores, and its own work would be most of what is measured.
    """
    rng = random.Random(3)
    until = time.monotonic() + BURST_S
    loop = asyncio.get_running_loop()
    again: list[asyncio.Task[Outcome]] = []

    async def come_back(after_s: float) -> Outcome:
        await asyncio.sleep(after_s)
        return await ask(arm, rng, options, until)

    def refused(outcome: Outcome) -> None:
        after_s = outcome.retry_after_s
        if after_s is not None and time.monotonic() + after_s < until:
            again.append(asyncio.create_task(come_back(after_s)))

    first = await asyncio.to_thread(
        flood, str(arm.socket), [written(rng, options) for _ in range(options.burst)], until,
        lambda outcome: loop.call_soon_threadsafe(refused, outcome),
    )  # fmt: skip
    came = list(await asyncio.gather(*again))
    await arm.idle()
    return first, came


def flood(
    path: str, requests: list[bytes], until: float, on_refusal: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send all requests, each on a connection of its own, and read what comes."""
    poll = select.epoll()
    open_ones: dict[int, tuple[socket.socket, Outcome, float, bytearray]] = {}
    outcomes = []

    def read(patience_s: float) -> None:
        for fd, _ in poll.poll(patience_s):
            connection, outcome, began, received = open_ones[fd]
            try:
                part = connection.recv(1 << 16)
            except OSError:
                part = b""
            received += part
            take_in(outcome, bytes(received), time.monotonic() - began)
            if not part or outcome.is_done or outcome.status not in (None, 200):
                poll.unregister(fd)
                open_ones.pop(fd)[0].close()
                on_refusal(outcome)

    for request in requests:
        outcome, began = Outcome(), time.monotonic()
        outcomes.append(outcome)
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            connection.settimeout(max(until - began, 0))
            connection.connect(path)
            connection.sendall(request)
            connection.setblocking(False)
            open_ones[connection.fileno()] = connection, outcome, began, bytearray()
            poll.register(connection, select.EPOLLIN)
        read(0)
    while open_ones and time.monotonic() < until:
        read(max(until - time.monotonic(), 0))
    for connection, *_ in open_ones.values():
        connection.close()
    return outcomes


def take_in(outcome: Outcome, received: bytes, after_s: float) -> None:
    """What all that has come so far says."""
    head, is_whole, body = received.partition(b"\r\n\r\n")
    if is_whole and outcome.status is None:
        outcome.status, outcome.head_s = int(head.split()[1]), after_s
        if outcome.status != 200:
            outcome.retry_after_s = retry_after_s(head.decode())
    if outcome.first_s is None and b"data: {" in body:
        outcome.first_s = after_s
    outcome.is_done = b"data: [DONE]" in body


async def silent(arm: Arm, options: argparse.Namespace) -> str:
    """`/ready` and `penstock status` while connections are held that ask nothing."""
    held = []
    for _ in range(options.silent):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                held.append((await asyncio.open_unix_connection(str(arm.socket)))[1])
    answers = [await get(arm, "/ready") for _ in range(10)]
    command = [str(arm.python), "-m", "appliance.cli", "status"]
    asked = await asyncio.create_subprocess_exec(
        *command,
        cwd=arm.checkout,
        env={**arm.env, "PENSTOCK_SOCKET": str(arm.socket)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        code = str(await asyncio.wait_for(asked.wait(), 10))
    except TimeoutError:
        asked.kill()
        code = "no answer"
    for writer in held:
        writer.close()
    good = sum(status == 200 for status, _, _ in answers)
    slowest = max(took for _, _, took in answers)
    return (
        f"{len(held)} held; /ready {good}/10 (at most {1e3 * slowest:.0f} ms), status exit {code}"
    )


def quantile(values: list[float], share: float) -> str:
    if not values:
        return "-"
    return f"{sorted(values)[min(int(share * len(values)), len(values) - 1)]:.3g}"


def told(outcomes: list[Outcome], options: argparse.Namespace, seconds: float) -> str:
    """A row: what became of requests."""
    taken = [one for one in outcomes if one.status == 200]
    refused = [one for one in outcomes if one.status in (429, 503)]
    firsts = [one.first_s for one in taken if one.first_s is not None]
    good = sum(first <= options.within_s for first in firsts)
    retry = [one.retry_after_s for one in refused if one.retry_after_s is not None]
    heads_ms = [1e3 * one.head_s for one in refused if one.head_s is not None]
    statuses = Counter("none" if one.status is None else one.status for one in outcomes)
    return (
        f"{len(outcomes)} | {dict(statuses)} | {good / seconds:.2f} | "
        f"{good}/{len(taken)} | {quantile(firsts, 0.5)} / {quantile(firsts, 0.99)} | "
        f"{quantile(heads_ms, 0.5)} / {quantile(heads_ms, 0.99)} | "
        f"{quantile(retry, 0.0)} to {quantile(retry, 1.0)}"
    )


HEADER = (
    "| part | arm | requests | statuses | goodput/s | in time/taken | first token p50 / p99, s | "
    "refused p50 / p99, ms | Retry-After, s |\n|---|---|---|---|---|---|---|---|---|"
)


async def run(options: argparse.Namespace) -> None:
    here = Path(__file__).parents[2]
    arms = [Arm("this", here, options)]
    if options.base:
        arms.append(Arm("base", Path(options.base), options))
    try:
        for arm in arms:
            await arm.ready()
        await asyncio.sleep(2)
        before = [arm.cpu_s() for arm in arms]
        await asyncio.sleep(IDLE_S)
        for arm, was in zip(arms, before, strict=True):
            share = (arm.cpu_s() - was) / IDLE_S
            print(f"idle daemon, {arm.name}: {share:.2%} of a core", flush=True)
        rates = [await capacity(arm, options) for arm in arms]
        for arm, rate in zip(arms, rates, strict=True):
            print(f"capacity, {arm.name}: {rate:.2f} requests/s", flush=True)
        print(HEADER, flush=True)
        for load in options.loads:
            for arm in arms:
                outcomes = await open_loop(arm, load * rates[0], options)
                row = told(outcomes, options, options.seconds)
                print(f"| {load:g}x | {arm.name} | {row} |", flush=True)
        for arm in arms if options.burst else []:
            first, again = await burst(arm, options)
            print(f"| burst | {arm.name} | {told(first, options, BURST_S)} |")
            print(f"| who came back | {arm.name} | {told(again, options, BURST_S)} |", flush=True)
        for arm in arms if options.silent else []:
            print(f"silent connections, {arm.name}: {await silent(arm, options)}", flush=True)
    finally:
        for arm in arms:
            arm.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--base")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--within-s", type=float, default=4.0)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--loads", default="1,2,10")
    parser.add_argument("--burst", type=int, default=700)
    parser.add_argument("--silent", type=int, default=600)
    options = parser.parse_args()
    options.loads = [float(load) for load in options.loads.split(",") if load]
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
