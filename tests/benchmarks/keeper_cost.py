"""Compare streams that a next daemon could continue with streams that end with their daemon.

usage: python -m tests.benchmarks.keeper_cost MODEL [--rounds 20] [--streams 8] [--tokens 400]

Three daemons run, and each round asks them in turn: one keeps nothing, a second one keeps nothing
(A/A), one keeps every reply by journal and file. Prints the daemon's CPU time a token, and gaps
between the parts of a stream, as medians of the rounds with their quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.daemons import Daemon
from tests.test_daemon_death import request_of

NOTHING_KEPT = {"FDSTORE": "0"}


def gaps_of(daemon: Daemon, number: int, num_tokens: int) -> list[float]:
    """Stream one reply, and return the milliseconds between its parts."""
    body = {"prompt": f"{number} Once", "max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    times = []
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(300)
        client.connect(str(daemon.socket))
        client.sendall(request_of("/v1/completions", {**body, "temperature": 1.0}))
        while client.recv(1 << 16):
            times.append(time.monotonic())
    return [1000 * (b - a) for a, b in itertools.pairwise(times)]


def measured(daemon: Daemon, num_streams: int, num_tokens: int) -> tuple[float, float, float]:
    """Return CPU us a token of the daemon, and the median and the 99th percentile of gaps in ms."""
    process = psutil.Process(daemon.pid)
    before = sum(process.cpu_times()[:2])
    with ThreadPoolExecutor(num_streams) as pool:
        found = pool.map(lambda n: gaps_of(daemon, n, num_tokens), range(num_streams))
        gaps = sorted(gap for each in found for gap in each)
    cpu_us = 1e6 * (sum(process.cpu_times()[:2]) - before) / (num_streams * num_tokens)
    return cpu_us, statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))]


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keeper-cost-") as folder, ExitStack() as stack:
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(f"{folder}/notify")  # only so that no keeper of our own is started
        drained = stack.enter_context(ThreadPoolExecutor(1))
        drained.submit(lambda: all(manager.recv(4096) != b"end" for _ in iter(int, 1)))
        stack.callback(lambda: manager.sendto(b"end", f"{folder}/notify"))
        daemons = {}
        for name in ("nothing kept", "nothing kept (A/A)", "kept"):
            env = {} if name == "kept" else {**NOTHING_KEPT, "NOTIFY_SOCKET": f"{folder}/notify"}
            daemons[name] = Daemon(Path(folder) / str(len(daemons)), model=args.model, env=env)
            stack.callback(daemons[name].stop)
            daemons[name].wait_ready()
            measured(daemons[name], args.streams, args.tokens)
        found = {name: [] for name in daemons}
        for number in range(args.rounds):
            for name in list(daemons)[number % 3 :] + list(daemons)[: number % 3]:
                found[name].append(measured(daemons[name], args.streams, args.tokens))
        for name, rounds in found.items():
            cpu, middle, high = (spread([each[i] for each in rounds]) for i in range(3))
            print(f"{name}: CPU {cpu} us a token; gaps {middle} ms, 99th percentile {high} ms")
        base = found["nothing kept"]
        for name, rounds in list(found.items())[1:]:
            ratios = zip(rounds, base, strict=True)
            ratios = [[a / b for a, b in zip(x, y, strict=True)] for x, y in ratios]
            told = ", ".join(spread([each[i] for each in ratios]) for i in range(3))
            print(f"{name} over nothing kept: {told}")


if __name__ == "__main__":
    main()
