"""One user's flood against another's cached conversation: her next turn's first token.

    python -m tests.benchmarks.flood --model FOLDER

A pool holds some six conversations. She has one; he floods with prompts that have nothing in
common, by a key of his own, several pools' worth of them. She asks her next turn before the flood,
in it and after it; and, for comparison, how a turn goes that finds nothing is asked as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx

from appliance.fleet.placement import BLOCK_SIZE
from engine.checkpoint.checkpoint import Checkpoint
from tests.daemons import Daemon, make_keys


class User:
    """With a key."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120)

    def turn(self, prompt: list[int], max_tokens: int) -> tuple[float, int, list[int]]:
        """Milliseconds to the first token, how many were cached, and the answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        began_s, first_s, cached, output = time.perf_counter(), 0.0, 0, []
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:  # the queue is full for him
                return 0.0, 0, []
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        first_s = first_s or time.perf_counter()
                        output += choice["token_ids"]
                    if usage := chunk.get("usage"):
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return 1e3 * (first_s - began_s), cached, output


def main() -> None:
    """Print her turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    rng = random.Random(1)

    def draw(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    block_bytes = Checkpoint.open(args.model).config.kv_block_bytes(BLOCK_SIZE, "bfloat16")
    num_blocks = 6 * (args.length // BLOCK_SIZE + 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, keys = make_keys(folder, her="user", him="user")
        options = ["--listen", "127.0.0.1:0", "--api-keys", str(path), "--max-model-len", "4096"]
        options += ["--kv-memory", str(num_blocks * block_bytes), "--transport", "alias"]
        daemon = Daemon(folder, *options, model=args.model).wait_ready()
        her = User(daemon.tcp_url, keys["her"])
        prompt = draw(args.length)
        _, _, answer = her.turn(prompt, 16)

        def ask(when: str) -> None:
            found = [her.turn([*prompt, *answer, *draw(20)], 4)[:2] for _ in range(5)]
            ttft_ms = statistics.median(ms for ms, _ in found)
            most = max(ms for ms, _ in found)
            least = min(cached for _, cached in found)
            print(f"{when}: {ttft_ms:.0f} ms, at most {most:.0f}, at least {least} tokens cached")

        ask("alone")
        fresh_ms = statistics.median(her.turn(draw(args.length + 36), 4)[0] for _ in range(3))
        print(f"a prompt of that length that finds nothing, alone: {fresh_ms:.0f} ms")
        is_over, num_sent = threading.Event(), [0]
        prompts = [draw(args.length) for _ in range(2000)]

        def flood() -> None:
            him = User(daemon.tcp_url, keys["him"])
            while not is_over.is_set():
                num_sent[0] += 1
                him.turn(prompts[num_sent[0]], 8)

        threads = [threading.Thread(target=flood) for _ in range(args.at_once)]
        for thread in threads:
            thread.start()
        began_s = time.monotonic()
        while time.monotonic() < began_s + args.seconds:
            ask(f"{time.monotonic() - began_s:.0f} s into the flood")
            time.sleep(args.seconds / 6)
        is_over.set()
        for thread in threads:
            thread.join()
        ask("after it")
        (pool,) = daemon.fresh_state()["pools"]
        sent = num_sent[0] * args.length // BLOCK_SIZE
        print(f"he sent {sent} blocks' worth into a pool of {pool['num_blocks']}; "
              f"{pool['evicted']} blocks were evicted")  # fmt: skip
        daemon.kill()


if __name__ == "__main__":
    main()
