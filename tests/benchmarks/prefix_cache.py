"""What the prefix cache saves: first tokens of a conversation's turns, beside no cache and others.

    python -m tests.benchmarks.prefix_cache --model FOLDER --arms alias,peer --rounds 3
        [--beside http://127.0.0.1:8000 | --beside 'COMMAND that serves there']

For each arm a daemon stands with the cache and one without, and for the first arm a second one with
it, which shows what the same differs by when it is measured twice. The same turns go to all of them
in alternation, while the others stand still. Prompts are token ids, and each turn is the turn
before, its answer and some new tokens, so that a client's template has no part in it. Without the
cache only some turns are asked, for there they do not depend on each other. Then prompts that have
nothing in common: what hashing, finding and publishing cost where they gain nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import httpx

from tests.daemons import Daemon

PEER_URL = "http://127.0.0.1:8199"
PEER_READY_S = 240.0
FIRST, AGAIN, BESIDE = "cache", "the same again", "beside"


class Client:
    """A server, and what turns took."""

    def __init__(self, name: str, http: httpx.Client) -> None:
        self.name, self.http = name, http
        self.ttfts_ms: dict[int, list[float]] = {}

    def turn(self, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
        """Milliseconds to the first token, and the answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "temperature": 0}
        began_s, first_s, output = time.perf_counter(), 0.0, []
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    first_s = first_s or time.perf_counter()
                    output += choice.get("token_ids") or []
        return 1e3 * (first_s - began_s), output


def serve(folder: Path, arm: str, args: argparse.Namespace, *more: str) -> Daemon:
    """A daemon that is starting."""
    options = ["--roles", args.roles, "--transport", arm, *more]
    return Daemon(folder, *options, model=args.model)


def conversation(clients: list[Client], rng: random.Random, args: argparse.Namespace) -> None:
    """Have one with all; without a cache some turns are enough."""
    prompt = [rng.randrange(1000, 40000) for _ in range(args.first)]
    for turn in range(1, args.turns + 1):
        answer: list[int] = []
        for client in rng.sample(clients, len(clients)):
            if client.name.endswith("off") and turn not in (1, 2, args.turns // 2, args.turns):
                continue
            ttft_ms, output = client.turn(prompt, args.output)
            client.ttfts_ms.setdefault(turn, []).append(ttft_ms)
            if client is clients[0]:
                answer = output
        more = [rng.randrange(1000, 40000) for _ in range(args.more)]
        prompt = [*prompt, *answer, *more]


def tell(clients: list[Client]) -> None:
    """Medians by turn, and each over the first, turn by turn."""
    base = clients[0]
    for client in clients:
        medians = {turn: statistics.median(each) for turn, each in client.ttfts_ms.items()}
        print(f"{client.name}: " + ", ".join(f"{t}: {ms:.0f}" for t, ms in medians.items()))
        if client is base:
            continue
        ratios = sorted(
            ms / of
            for turn, each in client.ttfts_ms.items()
            if turn > 1
            for ms, of in zip(each, base.ttfts_ms[turn], strict=True)
        )
        print(
            f"    turns from 2 on, over {base.name}: {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def without_reuse(daemon: Daemon, client: Client, args: argparse.Namespace) -> None:
    """What the cache costs where it gains nothing."""
    rng, ttfts_ms = random.Random(2), []
    before, began_s = daemon.fresh_state()["totals"], time.perf_counter()
    for _ in range(args.turns):
        prompt = [rng.randrange(1000, 40000) for _ in range(args.first // 4)]
        ttfts_ms.append(client.turn(prompt, args.output)[0])
    elapsed_s, after = time.perf_counter() - began_s, daemon.fresh_state()["totals"]
    spent_ms = 1e3 * (after["prefix_cache_s"] - before["prefix_cache_s"])
    steps = args.turns * (args.output + args.first // 4 // 512)
    print(
        f"{client.name}, without reuse: {spent_ms / args.turns:.3f} ms of cache work a request, "
        f"{spent_ms / sum(ttfts_ms):.3%} of the first tokens' time, "
        f"{spent_ms / 1e3 / elapsed_s:.3%} of all, {spent_ms / steps:.4f} ms a step"
    )


def main() -> None:
    """Print what turns took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arms", default="alias,peer")
    parser.add_argument("--roles", default="static")
    parser.add_argument("--beside", help="a command that serves at " + PEER_URL + ", or a URL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--first", type=int, default=2000)
    parser.add_argument("--more", type=int, default=60)
    parser.add_argument("--output", type=int, default=24)
    args = parser.parse_args()
    peer, url = None, args.beside
    if args.beside and not args.beside.startswith("http"):
        peer, url = subprocess.Popen(shlex.split(args.beside), stderr=subprocess.DEVNULL), PEER_URL
    with tempfile.TemporaryDirectory() as folder:
        daemons: dict[str, Daemon] = {}
        for number, arm in enumerate(args.arms.split(",")):
            names = [FIRST, AGAIN, "off"] if number == 0 else [FIRST, "off"]
            for name in names:
                more = ["--prefix-cache", "off"] if name == "off" else []
                daemons[f"{arm}, {name}"] = serve(Path(folder, arm + name), arm, args, *more)
        clients = [Client(name, daemon.http) for name, daemon in daemons.items()]
        try:
            for daemon in daemons.values():
                daemon.wait_ready()
            if url is not None:
                http = httpx.Client(base_url=url, timeout=120)
                wait_for(http)
                clients.append(Client(BESIDE, http))
            rng = random.Random(1)
            for client in clients:  # what only the first of all requests takes
                client.turn([rng.randrange(1000, 40000) for _ in range(700)], 4)
            for _ in range(args.rounds):
                conversation(clients, rng, args)
            tell(clients)
            for (name, daemon), client in zip(daemons.items(), clients, strict=False):
                if name.endswith(FIRST):
                    without_reuse(daemon, client, args)
                    fetched = daemon.fresh_state()["totals"]["prefix_cache_fetches"]
                    print(f"{name}: {fetched} tokens copied between pools")
        finally:
            for daemon in daemons.values():
                daemon.kill()
            if peer is not None:
                peer.terminate()


def wait_for(http: httpx.Client) -> None:
    """Until the other server answers."""
    deadline = time.monotonic() + PEER_READY_S
    while time.monotonic() < deadline:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError("the other server does not answer")


if __name__ == "__main__":
    main()
