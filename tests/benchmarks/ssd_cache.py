"""What the SSD cache gains after a restart, and what it costs those who decode meanwhile.

usage: python -m tests.benchmarks.ssd_cache restart [--model FOLDER] [--rounds 4]
       [--lengths 2000,6000] [--roles elastic]
       python -m tests.benchmarks.ssd_cache gaps [--model FOLDER] [--rounds 4]

restart: in each round a daemon computes fresh prompts and is asked for them again, so that they are
stored. It is killed with SIGKILL, and its successor on the same folder is asked for them: the time
to the first token from the disk, then from the pool, and of prompts of the same length that nobody
has asked before. All three in one daemon, in turn. The disk is read by O_DIRECT: no page cache.

gaps: a client streams tokens while another asks for fresh prompts, each twice, so that their blocks
are stored all the time. Daemons without the cache, with it, and without it again take turns; the
last two without it are the band within which nothing is shown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

from tests.daemons import Daemon

CACHE = ("--ssd-cache", "8GiB")


def fresh(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * 31 + i * i % 97) % 20_000 + 10 for i in range(length)]


def ttft_ms(daemon: Daemon, prompt: list[int]) -> float:
    began_s = time.monotonic()
    for event in daemon.stream(prompt, max_tokens=4, ignore_eos=True):
        if any(choice["token_ids"] for choice in event["choices"]):
            return (time.monotonic() - began_s) * 1e3
    raise AssertionError("no token")


def ssd(daemon: Daemon) -> dict:
    return daemon.state()["ssd"]


def wait_on(daemon: Daemon) -> None:
    daemon.wait_ready()
    daemon.wait_for(lambda: ssd(daemon)["state"] == "on")


def wait_stored(daemon: Daemon, count: int) -> None:
    daemon.wait_for(lambda: ssd(daemon)["stored_blocks"] >= count, 60)


def restart(options: argparse.Namespace) -> None:
    lengths = [int(length) for length in options.lengths.split(",")]
    found: dict[tuple[int, str], list[float]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            start = lambda: Daemon(  # noqa: E731
                Path(folder), *CACHE, "--roles", options.roles, model=options.model
            )
            daemon = start()
            wait_on(daemon)
            asked = {n: fresh(n, 100 * number + i) for i, n in enumerate(lengths)}
            for prompt in asked.values():
                daemon.complete(prompt, max_tokens=2, ignore_eos=True)
                daemon.complete(prompt, max_tokens=2, ignore_eos=True)
            wanted = sum((n - 1) // 64 for n in lengths)
            wait_stored(daemon, wanted)
            daemon.kill()
            daemon = start()
            wait_on(daemon)
            daemon.complete(fresh(300, 5000 + number), max_tokens=4, ignore_eos=True)
            for index, (length, prompt) in enumerate(asked.items()):
                for way, what in (
                    ("computed", fresh(length, 9000 + 100 * number + index)),
                    ("SSD", prompt),
                    ("pool", prompt),
                ):
                    found.setdefault((length, way), []).append(ttft_ms(daemon, what))
            state = ssd(daemon)
            print(f"round {number}: {state}", flush=True)
            daemon.kill()
    for length in lengths:
        computed = found[length, "computed"]
        for way in ("computed", "SSD", "pool"):
            values = found[length, way]
            ratios = [a / b for a, b in zip(values, computed, strict=True)]
            print(
                f"{length} tokens, {way:>8}: {statistics.median(values):8.1f} ms "
                f"({min(values):.1f} to {max(values):.1f}); of computing "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )


def gaps_of(daemon: Daemon, seed: int, num_tokens: int) -> list[float]:
    """Between tokens of a stream while prompts are asked for, each twice."""
    is_over = threading.Event()

    def ask() -> None:
        number = seed
        while not is_over.is_set():
            number += 1
            for _ in range(2):
                daemon.complete(fresh(1000, number), max_tokens=1, ignore_eos=True)

    asking = threading.Thread(target=ask)
    asking.start()
    times = [
        time.monotonic()
        for event in daemon.stream(fresh(64, seed), max_tokens=num_tokens, ignore_eos=True)
        if any(choice["token_ids"] for choice in event["choices"])
    ]
    is_over.set()
    asking.join()
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


def gaps(options: argparse.Namespace) -> None:
    arms = {"off": ("--ssd-cache", "off"), "on": CACHE, "off again": ("--ssd-cache", "off")}
    p50s: dict[str, list[float]] = {arm: [] for arm in arms}
    p99s: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        for arm, settings in arms.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                daemon = Daemon(
                    Path(folder), *settings, "--roles", options.roles, model=options.model
                )
                if arm == "on":
                    wait_on(daemon)
                daemon.wait_ready()
                gaps_of(daemon, 1, 30)
                ranked = sorted(gaps_of(daemon, 1000 * (number + 1), options.tokens))
                p50s[arm].append(ranked[len(ranked) // 2])
                p99s[arm].append(ranked[int(len(ranked) * 0.99)])
                stored = ssd(daemon)["stored_blocks"] if arm == "on" else 0
                print(f"round {number}, {arm}: {p50s[arm][-1]:.2f} {p99s[arm][-1]:.2f} {stored}")
                daemon.kill()
    for name, values in (("p50", p50s), ("p99", p99s)):
        for arm in ("on", "off again"):
            ratios = [a / b for a, b in zip(values[arm], values["off"], strict=True)]
            print(
                f"{name} {arm:>9}: {statistics.median(values[arm]):.2f} ms; of off "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["restart", "gaps"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="of the caches; on a disk, not in memory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--lengths", default="2000,6000")
    parser.add_argument("--roles", default="elastic")
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    (restart if options.what == "restart" else gaps)(options)


if __name__ == "__main__":
    main()
