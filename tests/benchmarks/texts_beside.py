"""Texts that become vectors in a second, by a daemon and by another server that are asked in turn.

usage: python -m tests.benchmarks.texts_beside --embedder FOLDER --make
       python -m tests.benchmarks.texts_beside --embedder FOLDER URL --pid PID [--name NAME]
       [--tokens 64,512,2048] [--turn-tokens 32768] [--rounds 5] [-- OPTIONS of penstock serve]

The first makes a model of random values (--shape minilm or bge-small, --dtype) and ends, so that
the other server can be started with it; URL then answers URL/v1/embeddings, calls the model NAME,
and PID is its first process. Of both servers the one that is not asked is stopped with all its
processes. In a round each gets one body of the same texts, and the daemon a second one: the ratio
of its two turns is what the machine's noise makes. The order of a round is drawn. Printed are
medians of texts/s with the lowest and the highest, and medians of the rounds' ratios.

The daemon of its own computes with all cores (--roles colocated) unless OPTIONS say otherwise.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.benchmarks.embedder import add_options, embedder, texts
from tests.daemons import ALONE, Daemon

SETTLE_S = 0.2
MOST_TEXTS = 2048
_PENSTOCK, _AGAIN, _PEER = "penstock", "penstock again", "other"


@dataclass
class Arm:
    """A server: where it is asked, what it calls the model, its first process."""

    http: httpx.Client
    name: str
    pid: int

    def signal(self, number: int) -> None:
        """Signal all of its processes; what watches them is stopped first and resumed last."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            found = [first, *first.children(recursive=True)]
            for process in found if number == signal.SIGSTOP else reversed(found):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def ask(self, asked: list[str]) -> tuple[float, list[array[float]]]:
        """Texts in a second, and their vectors."""
        body = {"model": self.name, "input": asked, "encoding_format": "base64"}
        started_s = time.perf_counter()
        reply = self.http.post("/v1/embeddings", json=body)
        took_s = time.perf_counter() - started_s
        assert reply.status_code == 200, reply.text
        found = reply.json()["data"]
        assert [one["index"] for one in found] == list(range(len(asked)))
        return len(asked) / took_s, [array("f", base64.b64decode(o["embedding"])) for o in found]

    @contextmanager
    def alone(self, arms: dict[str, Arm]) -> Iterator[None]:
        """Stop the others for as long."""
        others = [arm for arm in arms.values() if arm.pid != self.pid]
        for arm in others:
            arm.signal(signal.SIGSTOP)
        try:
            time.sleep(SETTLE_S)
            yield
        finally:
            for arm in others:
                arm.signal(signal.SIGCONT)


def cosine(one: array[float], other: array[float]) -> float:
    """The cosine of the angle between two vectors."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5


def compare(arms: dict[str, Arm], num_tokens: int, options: argparse.Namespace) -> None:
    """Ask all in turn, and print what came of it."""
    draw = random.Random(num_tokens)
    count = min(max(options.turn_tokens // num_tokens, 1), MOST_TEXTS)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    lowest, order = 1.0, list(arms)
    for number in range(-1, options.rounds):  # the first warms up
        asked, vectors = texts(count, num_tokens, draw), {}
        draw.shuffle(order)
        for name in order:
            with arms[name].alone(arms):
                arms[name].ask(asked[:1])
                rate, vectors[name] = arms[name].ask(asked)
            if number >= 0:
                rates[name].append(rate)
        both = zip(vectors[_PENSTOCK], vectors[[*arms][-1]], strict=True)
        lowest = min([lowest, *(cosine(*each) for each in both)])
    print(f"{num_tokens} tokens, {count} texts a turn; load {os.getloadavg()[0]:.1f}; "
          f"least cosine {lowest:.5f}")  # fmt: skip
    for name, found in rates.items():
        ratios = sorted(a / b for a, b in zip(rates[_PENSTOCK], found, strict=True))
        middle = statistics.median(found)
        print(f"  {name:15}{middle:9.1f} texts/s [{min(found):.1f}, {max(found):.1f}] "
              f"{middle * num_tokens:9,.0f} tok/s; penstock is x{statistics.median(ratios):.3f} "
              f"of it [{ratios[0]:.3f}, {ratios[-1]:.3f}]", flush=True)  # fmt: skip


def main() -> None:
    """Start the daemon, ask both, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url", nargs="?")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--name", default="m")
    parser.add_argument("--tokens", default="64,512,2048")
    parser.add_argument("--turn-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--make", action="store_true")
    add_options(parser)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, serving = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        folder = embedder(options, Path(scratch))
        if options.make:
            print(folder)
            return
        if (options.url is None) != (options.pid is None):
            parser.error("URL needs --pid, and --pid URL")
        daemon = Daemon(Path(scratch) / "d", *ALONE, "--embedding-model", str(folder), *serving)
        own = Arm(daemon.wait_ready().http, folder.name, daemon.process.pid)
        arms = {_PENSTOCK: own, _AGAIN: own}
        if options.url is not None:
            base = options.url.rstrip("/").removesuffix("/v1")
            arms[_PEER] = Arm(httpx.Client(base_url=base, timeout=120), options.name, options.pid)
        try:
            for num_tokens in map(int, options.tokens.split(",")):
                compare(arms, num_tokens, options)
        finally:
            assert daemon.stop() == 0


if __name__ == "__main__":
    main()
