"""What the prefix cache saves: first tokens of a conversation's turns, the cache on and off.

    python -m tests.benchmarks.prefix_cache --model FOLDER --arms alias,peer --rounds 3

Two daemons stand for each arm, one with the cache and one without; the same turns go to them in
alternation, while the other stands still. Prompts are token ids, and each turn is the turn before,
its answer and some new tokens, so that a client's template has no part in it. Then prompts that
have nothing in common: what hashing, finding and publishing cost where they gain nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.daemons import Daemon

ARMS = {
    "alias": ["--roles", "static", "--transport", "alias"],
    "peer": ["--roles", "static", "--transport", "peer"],
}


class Client:
    """One daemon and its streams."""

    def __init__(self, folder: Path, arm: str, model: Path, *args: str) -> None:
        self.daemon = Daemon(folder, *ARMS[arm], *args, model=model).wait_ready()

    def turn(self, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
        """Milliseconds to the first token, and the answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "temperature": 0}
        began_s, first_s, output = time.perf_counter(), 0.0, []
        with self.daemon.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    first_s = first_s or time.perf_counter()
                    output += choice["token_ids"]
        return 1e3 * (first_s - began_s), output

    def totals(self) -> dict[str, float]:
        """Counters since the start."""
        return self.daemon.fresh_state()["totals"]


def conversation(clients: list[Client], rng: random.Random, args: argparse.Namespace) -> list:
    """By turn, the milliseconds of each client."""
    prompt = [rng.randrange(1000, 40000) for _ in range(args.first)]
    rows = []
    for _ in range(args.turns):
        row, outputs = [], []
        for client in clients:
            ttft_ms, output = client.turn(prompt, args.output)
            row.append(ttft_ms)
            outputs.append(output)
        rows.append(row)
        more = [rng.randrange(1000, 40000) for _ in range(args.more)]
        prompt = [*prompt, *outputs[0], *more]
    return rows


def without_reuse(client: Client, rng: random.Random, args: argparse.Namespace) -> None:
    """What the cache costs where it gains nothing."""
    before, ttfts_ms, began_s = client.totals(), [], time.perf_counter()
    for _ in range(args.turns):
        prompt = [rng.randrange(1000, 40000) for _ in range(args.first // 4)]
        ttfts_ms.append(client.turn(prompt, args.output)[0])
    after, elapsed_s = client.totals(), time.perf_counter() - began_s
    spent_ms = 1e3 * (after["prefix_cache_s"] - before["prefix_cache_s"])
    print(
        f"  without reuse: {spent_ms / args.turns:.3f} ms of cache work a request, "
        f"{spent_ms / sum(ttfts_ms):.3%} of the first tokens' time, "
        f"{spent_ms / 1e3 / elapsed_s:.3%} of all"
    )


def main() -> None:
    """Print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arms", default="alias,peer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--first", type=int, default=2000)
    parser.add_argument("--more", type=int, default=60)
    parser.add_argument("--output", type=int, default=24)
    args = parser.parse_args()
    for arm in args.arms.split(","):
        with tempfile.TemporaryDirectory() as folder:
            on = Client(Path(folder, "on"), arm, args.model)
            off = Client(Path(folder, "off"), arm, args.model, "--prefix-cache", "off")
            rng = random.Random(1)
            rounds = [conversation([on, off], rng, args) for _ in range(args.rounds)]
            print(f"{arm}: ms to the first token, on / off, median of {args.rounds} conversations")
            ratios = []
            for turn in range(args.turns):
                with_ms = statistics.median(each[turn][0] for each in rounds)
                without_ms = statistics.median(each[turn][1] for each in rounds)
                print(f"  turn {turn + 1}: {with_ms:.0f} / {without_ms:.0f}")
                ratios += [each[turn][1] / each[turn][0] for each in rounds if turn]
            ratios.sort()
            print(
                f"  turns 2 to {args.turns}: off / on {statistics.median(ratios):.1f} "
                f"({ratios[0]:.1f} to {ratios[-1]:.1f})"
            )
            without_reuse(on, rng, args)
            on.daemon.stop()
            off.daemon.stop()


if __name__ == "__main__":
    main()
