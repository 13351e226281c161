"""What a long prompt does to everybody else's tokens, in each arm, interleaved.

usage: python -m tests.benchmarks.interference MODEL [--length 1500] [--rounds 3] [--seconds 20]

Two streams decode all the time. In the loaded half of a round prompts of LENGTH tokens arrive one
after the other, each asking for a single token. Printed: the gaps between tokens, quiet and loaded,
the ratio p99 loaded / p50 quiet, and the long prompts' time to first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

from tests.daemons import ARMS, Daemon

NUM_STREAMS = 2


def quantile(values, q):
    ranked = sorted(values)
    return ranked[min(int(q * len(ranked)), len(ranked) - 1)]


def measure(daemon: Daemon, length: int, seconds: float) -> tuple[list[float], list[float]]:
    """Gaps in ms of the streams, and TTFTs in ms of the prompts (none if length is 0)."""
    gaps: list[float] = []
    ttfts: list[float] = []
    end = time.perf_counter() + seconds

    def decode(seed: int) -> None:
        prompt = [random.Random(seed).randrange(5, 8000) for _ in range(32)]
        while time.perf_counter() < end:
            times = []
            for _ in daemon.stream(prompt, max_tokens=400, ignore_eos=True):
                times.append(time.perf_counter())
                if times[-1] > end:
                    break
            gaps.extend((b - a) * 1e3 for a, b in pairwise(times))

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    while length and time.perf_counter() < end:
        prompt = [random.randrange(5, 8000) for _ in range(length)]
        start = time.perf_counter()
        daemon.complete(prompt, max_tokens=1)
        ttfts.append((time.perf_counter() - start) * 1e3)
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    return gaps, ttfts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            arm: Daemon(Path(folder) / arm, *ARMS[arm], model=options.model).wait_ready()
            for arm in ("alias", "colocated")
        }
        ratios: dict[str, list[float]] = {arm: [] for arm in arms}
        for round_ in range(options.rounds):
            for arm, daemon in arms.items():
                quiet, _ = measure(daemon, 0, options.seconds / 2)
                loaded, ttfts = measure(daemon, options.length, options.seconds)
                ratios[arm].append(quantile(loaded, 0.99) / quantile(quiet, 0.5))
                print(
                    f"round {round_} {arm:10s} gap ms: quiet p50 {quantile(quiet, 0.5):.1f}"
                    f" p99 {quantile(quiet, 0.99):.1f}, loaded p50 {quantile(loaded, 0.5):.1f}"
                    f" p99 {quantile(loaded, 0.99):.1f} max {max(loaded):.1f};"
                    f" ratio {ratios[arm][-1]:.1f}; prompts {len(ttfts)},"
                    f" ttft p50 {statistics.median(ttfts):.0f} ms",
                    flush=True,
                )
        for arm, daemon in arms.items():
            print(f"{arm:10s} p99 loaded / p50 quiet: {[round(r, 1) for r in ratios[arm]]}")
            daemon.stop()


if __name__ == "__main__":
    main()
