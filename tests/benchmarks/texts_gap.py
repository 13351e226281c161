"""The gaps of two chats while ten thousand texts become vectors, over those of quiet times.

usage: python -m tests.benchmarks.texts_gap [--texts 10000] [--tokens 64] [--rounds 5]
       [--senders 2] [--quiet 8] [--control] [--nice -10] [--model FOLDER]
       [--embedder FOLDER | --shape --dtype] [-- OPTIONS of penstock serve]

A daemon of its own has static roles, so that the texts are the prefill worker's. Two chats ask one
question after the other all the while. A round is a quiet time, a share of the texts, and a quiet
time again; texts are sent by so many processes of `penstock embed`. Printed are the gaps of all
rounds: the texts' over all quiet ones, and the second quiet times' over the first ones', which is
what the machine's noise makes. With --control each round has one more quiet time's length, in which
a loop that yields to everything (SCHED_IDLE) holds prefill's cores in place of texts: what chats
lose merely by that is in the texts' gaps, too. --nice is the daemon's priority; the service's unit
has -10. The chats' model is the starter model unless --model
names another; the embedding model is of random values in the shape of MiniLM or bge-small unless
one is named.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.client.address import UnixAddress
from appliance.client.calls import Client
from appliance.observe.frame.latency import quantile
from tests.benchmarks.elastic_promises import chats
from tests.benchmarks.embedder import add_options, embedder, texts
from tests.daemons import ARMS, Daemon

_BEFORE, _TEXTS, _AFTER, _CONTROL = "quiet, before", "texts", "quiet, after", "control"
_LOOP = """import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while True: pass"""


def send(daemon: Daemon, files: list[Path]) -> None:
    """Have the lines of each file computed by a process of its own; return when all are."""
    environ = {**daemon.env, "PENSTOCK_HOST": str(daemon.socket)}
    command = [sys.executable, "-m", "appliance.cli", "embed"]
    processes = [
        subprocess.Popen([*command, str(f), "-o", str(f.with_suffix(".npy"))], env=environ)
        for f in files
    ]
    for process in processes:
        assert process.wait() == 0


@contextmanager
def idle_loops(cpus: list[int]) -> Iterator[None]:
    """Hold these cores, but yield to everything."""
    command = [sys.executable, "-c", _LOOP]
    loops = [subprocess.Popen([*command, str(cpu)], stdout=subprocess.PIPE) for cpu in cpus]
    try:
        for loop in loops:
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def run(options: argparse.Namespace, daemon: Daemon, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of the chats' gaps in each kind of time."""
    times = (_BEFORE, _TEXTS, _AFTER, *[_CONTROL] * options.control)
    draw, gaps = random.Random(0), {name: [] for name in times}
    workers = daemon.state()["workers"]
    cpus = [cpu for each in workers if each["name"].startswith("prefill") for cpu in each["cpus"]]
    share, took_s = options.texts // options.rounds // options.senders, 0.0
    talks = chats(Client(UnixAddress(daemon.socket), timeout_s=600))
    try:
        time.sleep(2.0)
        for number in range(options.rounds):
            files = [folder / f"{number}-{sender}.txt" for sender in range(options.senders)]
            for file in files:
                file.write_text("\n".join(texts(share, options.tokens, draw)))
            for name in gaps:
                with idle_loops(cpus if name == _CONTROL else []):
                    began_s = time.perf_counter()
                    if name == _TEXTS:
                        send(daemon, files)
                        took_s += time.perf_counter() - began_s
                    else:
                        time.sleep(options.quiet)
                    gaps[name] += talks.between(began_s, time.perf_counter())
    finally:
        talks.end()
    count = share * options.senders * options.rounds
    print(f"{count:,} texts of {options.tokens} tokens in {took_s:.1f} s, "
          f"{count / took_s:.0f} texts/s with the senders' starts")  # fmt: skip
    return gaps


def main() -> None:
    """Start the daemon, let it run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds of a quiet time")
    parser.add_argument("--control", action="store_true", help="hold prefill's cores, too")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--model", type=Path)
    add_options(parser)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, serving = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        folder = Path(scratch)
        model = "--embedding-model", str(embedder(options, folder))
        command = [*ARMS["alias"], *model, *serving]
        raised = functools.partial(os.nice, options.nice)
        daemon = Daemon(folder / "d", *command, model=options.model, preexec_fn=raised)
        try:
            gaps = run(options, daemon.wait_ready(), folder)
        finally:
            assert daemon.stop() == 0
    for name, found in gaps.items():
        p50, p95, p99 = (quantile(found, share) for share in (0.5, 0.95, 0.99))
        print(f"  {name:14}{len(found):7,} gaps, p50 {p50:6.2f} ms, p95 {p95:6.2f} ms, "
              f"p99 {p99:6.2f} ms, longest {max(found):7.2f} ms")  # fmt: skip
    usual_ms = quantile(gaps[_BEFORE] + gaps[_AFTER], 0.99)
    over = quantile(gaps[_TEXTS], 0.99) / usual_ms
    noise = quantile(gaps[_AFTER], 0.99) / quantile(gaps[_BEFORE], 0.99)
    control = ""
    if options.control:
        control = f"of control over quiet x{quantile(gaps[_CONTROL], 0.99) / usual_ms:.3f}, "
    print(f"p99 of texts over quiet x{over:.3f}, {control}of quiet over quiet x{noise:.3f}; "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
