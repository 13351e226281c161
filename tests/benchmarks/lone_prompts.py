"""How soon the first token of a lone prompt comes, by several servers that are asked in turn.

usage: python -m tests.benchmarks.lone_prompts MODEL ARM... [--tokens 128,512,1500] [--rounds 12]
       [--rest 0.5] [--settle 2] [--state FOLDER] [--pid PID]...

An arm is `NAME=OPTIONS of penstock serve`, perhaps none; `NAME=http://HOST:PORT`, a running server
whose model is called m (--pid names its process, whose CPU time is then not another's); or
`NAME=steps`, a worker without a server, of which the steps of the prompt are added up. Two arms of
the same options show what the machine's noise makes of them.

A sample counts only if nothing else ran: while it was taken all other processes used less than 25
ms of CPU, or 3 % of it, and the hypervisor took at most a tick. FOLDER/NAME keeps an arm's profile
for the next run, whose start is its second.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from appliance.configuration import config
from appliance.fleet.boot import make_plan
from tests.benchmarks.worker_steps import StepWorker

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MOST_OTHERS_S, _MOST_OTHERS_SHARE = 0.025, 0.03
_CALM_S = 0.15
Ask = Callable[[int], float]
"""Milliseconds to the first token of a prompt of so many."""


class Machine:
    """What the machine did besides, from one look to the next.

    Args:
        pids: of servers that were started elsewhere.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def look(self) -> tuple[float, float, float]:
        """Seconds of CPU used by processes that are not descendants, stolen, and in all."""
        busy = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        idle, stolen = busy[3] + busy[4], busy[7]
        own = sum(map(self._ticks, self._descendants()))
        return (sum(busy) - idle - stolen - own) * _TICK_S, stolen * _TICK_S, sum(busy) * _TICK_S

    def wait_until_calm(self, most_s: float = 4.0) -> None:
        """Wait until everything has been idle for a moment, or for so long."""
        until_s = time.monotonic() + most_s
        while time.monotonic() < until_s:
            before = self.look()
            time.sleep(_CALM_S)
            if self.look()[0] - before[0] <= _TICK_S:
                return

    def is_undisturbed(self, before: tuple[float, float, float]) -> bool:
        """True if nothing else ran since a look."""
        others_s, stolen_s, all_s = (a - b for a, b in zip(self.look(), before, strict=True))
        limit_s = max(_MOST_OTHERS_S, _MOST_OTHERS_SHARE * all_s)
        return others_s <= limit_s and stolen_s <= 1.1 * _TICK_S

    def _descendants(self) -> list[int]:
        found = [os.getpid(), *self._pids]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, children.read_text().split())
        return found

    def _ticks(self, pid: int) -> int:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])


def ask(address: str, num_tokens: int) -> float:
    """Milliseconds to the first event of a completion; a path of a socket, or HOST:PORT."""
    prompt = [random.randrange(5, 3000) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    body["return_token_ids"] = True  # or no event comes of a token that is half a character
    connection = http.client.HTTPConnection("localhost")
    if address.startswith("/"):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(address)
    else:
        host, _, port = address.partition(":")
        connection.sock = socket.create_connection((host, int(port)))
        body["model"] = "m"
    started_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first_s = next(time.perf_counter() for line in response if line.startswith(b"data: {"))
    response.read()
    connection.close()
    return (first_s - started_s) * 1e3


def daemon(stack: ExitStack, model: str, state: Path, options: list[str]) -> Ask:
    """Start one and wait until it is ready."""
    state.mkdir(parents=True, exist_ok=True)
    address, log = f"{state}/p.sock", stack.enter_context((state / "stderr").open("w+"))
    command = [sys.executable, "-m", "appliance.cli", "serve", "--model", model]
    command += ["--socket", address, "--state-dir", str(state), *options]
    started_s = time.perf_counter()
    process = stack.enter_context(subprocess.Popen(command, stderr=log))
    stack.callback(process.terminate)
    while "ready on" not in (state / "stderr").read_text():
        assert process.poll() is None, (state / "stderr").read_text()
        time.sleep(0.01)
    print(f"{state.name}: ready after {time.perf_counter() - started_s:.2f} s", flush=True)
    return partial(ask, address)


def steps(stack: ExitStack, runner: asyncio.Runner, model: str) -> Ask:
    """Start a worker with all cores and no server."""
    settings = config.load({"model": model, "roles": "colocated", "transport": "auto"})
    worker = StepWorker(make_plan(settings))
    runner.run(worker.start())
    stack.callback(lambda: runner.run(worker.stop()))
    return lambda num_tokens: runner.run(worker.prefill_ms(num_tokens))


def main() -> None:
    """Start the arms, ask them in turn, print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("arms", nargs="+", metavar="NAME=OPTIONS")
    parser.add_argument("--tokens", default="128,512,1500")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rest", type=float, default=0.5, help="seconds between two prompts")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds after the last start")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--pid", type=int, action="append", default=[])
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for all of it")
    options = parser.parse_args()
    until_s, machine = time.monotonic() + options.limit, Machine(options.pid)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        folder = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        asks: dict[str, Ask] = {}
        for name, _, what in (arm.partition("=") for arm in options.arms):
            if what == "steps":
                asks[name] = steps(stack, runner, options.model)
            elif what.startswith("http"):
                asks[name] = partial(ask, urlsplit(what).netloc)
            else:
                asks[name] = daemon(stack, options.model, folder / name, what.split())
        time.sleep(options.settle)
        num_left_out = 0
        for num_tokens in map(int, options.tokens.split(",")):
            taken: dict[str, list[float]] = {name: [] for name in asks}
            share_s = (until_s - time.monotonic()) / 2
            ends_s = time.monotonic() + share_s
            while time.monotonic() < ends_s:
                missing = [n for n, times in taken.items() if len(times) < options.rounds]
                for name in random.sample(missing, len(missing)):
                    time.sleep(options.rest)
                    machine.wait_until_calm()
                    before = machine.look()
                    took_ms = asks[name](num_tokens)
                    is_good = machine.is_undisturbed(before)
                    num_left_out += not is_good
                    taken[name] += [took_ms] * is_good
                if not missing:
                    break
            first = statistics.median(next(iter(taken.values())) or [0.0])
            for name, times in taken.items():
                if times and first:
                    middle, low, high = statistics.median(times), min(times), max(times)
                    print(f"{num_tokens:6,} {name:10} {middle:8.1f} ms [{low:.1f}, {high:.1f}] "
                          f"x{middle / first:.3f}, {len(times)} samples", flush=True)  # fmt: skip
        print(f"{num_left_out} samples left out")


if __name__ == "__main__":
    main()
