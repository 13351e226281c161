"""Kill the daemon again and again under streams of every API, and compare every reply.

usage: python -m tests.benchmarks.daemon_deaths MODEL [--kills 200] [--streams 12] [--seed 0]
       [--restart] [-- OPTIONS of penstock serve]

Each round begins the streams, kills the daemon at a random moment and reads all replies to their
ends. With --restart it asks for a restart on purpose, and streams follow each other until the next
daemon serves. A pause is the longest time that a client waits for anything after the kill. Exit
code 1 if a reply differs from the undisturbed one or has not exactly one row.

Have bytecode written and compiled (no PYTHONDONTWRITEBYTECODE): without it an import of torch takes
twice the time, and the pause with it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sqlite3
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from tests.daemons import Daemon
from tests.test_daemon_death import BODIES, request_of, said

_BEGUN_BYTES = 300


class Stream:
    """One reply; when it was asked for, and when its parts came."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.name, self.received, self.times = name, b"", []
        self.has_ended = False
        self._daemon = daemon

    def read(self) -> Stream:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(180)
            client.connect(str(self._daemon.socket))
            client.sendall(request_of(*BODIES[self.name]))
            self.times.append(time.monotonic())
            while part := client.recv(1 << 16):
                self.received += part
                self.times.append(time.monotonic())
        self.has_ended = True
        return self

    @property
    def has_begun(self) -> bool:
        return self.has_ended or len(self.received) > _BEGUN_BYTES

    def pause_s(self, killed_s: float) -> float | None:
        """Return the longest wait that began or ended after the kill; None: it ended before."""
        later = [(a, b) for a, b in zip(self.times, self.times[1:], strict=False) if b > killed_s]
        return max((b - a for a, b in later), default=None)


def holdings(daemon: Daemon) -> str:
    """Write descriptors and memory of the keeper and of the daemon."""
    both = psutil.Process(daemon.process.pid), psutil.Process(daemon.pid)
    return ", ".join(f"{p.num_fds()} fds {p.memory_info().rss >> 20} MiB" for p in both)


def num_rows(daemon: Daemon) -> tuple[int, int]:
    """Count the request log's rows, and the requests that have one."""
    with closing(sqlite3.connect(daemon.folder / "state" / "requests.db")) as db:
        return db.execute("SELECT count(*), count(DISTINCT rid) FROM requests").fetchone()


def one_round(daemon: Daemon, names: list[str], draw: random.Random, sent: int) -> tuple:
    pid, streams = daemon.pid, []

    def read(name: str) -> None:
        while True:
            streams.append(stream := Stream(daemon, name))
            stream.read()
            if sent == signal.SIGKILL or daemon.pid not in (pid, daemon.process.pid):
                return

    with ThreadPoolExecutor(len(names)) as pool:
        ends = [pool.submit(read, name) for name in names]
        daemon.wait_for(
            lambda: len(streams) >= len(names) and all(one.has_begun for one in streams)
        )
        time.sleep(draw.uniform(0, 0.2))
        killed_s = time.monotonic()
        os.kill(pid, sent)
        for end in ends:
            end.result()
    return streams, [p for one in streams if (p := one.pause_s(killed_s)) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true")
    args, options = parser.parse_known_args()
    draw, pauses, num_wrong, num_asked = random.Random(args.seed), [], 0, 0
    sent = signal.SIGUSR2 if args.restart else signal.SIGKILL
    with tempfile.TemporaryDirectory(prefix="deaths-") as folder, ExitStack() as stack:
        options = [each for each in options if each != "--"]
        daemon = Daemon(Path(folder) / "d", *options, model=args.model)
        stack.callback(daemon.stop)
        daemon.wait_ready()
        calm = {name: said(Stream(daemon, name).read().received) for name in BODIES}
        num_asked, first = len(BODIES), holdings(daemon)
        for number in range(args.kills):
            names = [list(BODIES)[(number + i) % len(BODIES)] for i in range(args.streams)]
            streams, found = one_round(daemon, names, draw, sent)
            num_asked += len(streams)
            pauses += [max(found)] if found else []
            for one in streams:
                if said(one.received) != calm[one.name]:
                    num_wrong += 1
                    print(f"round {number}: {one.name} differs", flush=True)
            daemon.wait_ready()
        daemon.wait_for(lambda: num_rows(daemon)[0] >= num_asked)
        rows, num_ids = num_rows(daemon)
        daemon.assert_all_free()
        print(f"{args.kills} rounds, {num_asked} replies, {num_wrong} wrong, {rows} rows")
        worst = max(pauses, default=0.0)
        print(f"pause: median {statistics.median(pauses or [0.0]):.2f} s, worst {worst:.2f} s")
        print(f"keeper, daemon: first {first}; last {holdings(daemon)}")
    sys.exit(num_wrong > 0 or not rows == num_ids == num_asked)


if __name__ == "__main__":
    main()
