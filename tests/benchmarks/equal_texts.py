"""The share of drawn texts that are equal when computed cold, cached, in a batch and after a kill.

usage: python -m tests.benchmarks.equal_texts MODEL [--dtype bfloat16] [--weights stored]
    [--texts 12] [--tokens 64] [--prompt-tokens 96] [--kills 12]

One daemon, static roles. Every prompt is a list of token ids drawn once; each text has a seed and
temperature 1, and top_p 1, 0.95 or 0.9 by turns. Each is computed cold, then with its prompt
cached, then with all others at once, then cold again while the worker that computes it is killed
after an eighth of its tokens. Prints how many texts equal the cold one, where the first
differing token of the others stands, and how many sequences were recovered from a killed worker.
"""

import argparse
import json
import os
import random
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.daemons import Daemon

TOP_P = (1.0, 0.95, 0.9)


class Texts:
    """The texts of one run, each with its prompt and seed."""

    def __init__(self, daemon, num_texts, num_tokens, prompt_tokens):
        self.daemon, self.num_tokens = daemon, num_tokens
        text = "The quick brown fox jumps over the lazy dog; 0123456789 boxes were packed."
        body = {"prompt": text, "add_special_tokens": False}
        ids = daemon.http.post("/tokenize", json=body).json()["tokens"]
        rng = random.Random(0)
        self.prompts = [rng.choices(ids, k=prompt_tokens) for _ in range(num_texts)]

    def body(self, number, salt):
        return {
            "prompt": self.prompts[number],
            "max_tokens": self.num_tokens,
            "temperature": 1,
            "top_p": TOP_P[number % len(TOP_P)],
            "seed": 1000 + number,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }

    def text(self, number, salt):
        reply = self.daemon.http.post("/v1/completions", json=self.body(number, salt), timeout=300)
        reply.raise_for_status()
        return reply.json()["choices"][0]["token_ids"]

    def ready_decode_worker(self):
        """The process of the decode worker; None while it is not ready."""
        workers = self.daemon.fresh_state()["workers"]
        return next(
            (w["pid"] for w in workers if w["name"] == "decode" and w["state"] == "ready"), None
        )

    def killed(self, number):
        """The same text, whose decode worker is killed in the middle of it."""
        tokens, is_killed = [], False
        pid = self.daemon.wait_for(self.ready_decode_worker, timeout_s=300)
        body = self.body(number, f"killed {number}") | {"stream": True}
        with self.daemon.http.stream("POST", "/v1/completions", json=body, timeout=300) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
                if not is_killed and len(tokens) >= self.num_tokens // 8:
                    os.kill(pid, signal.SIGKILL)
                    is_killed = True
        assert is_killed
        return tokens


def told(way, cold, found):
    """One line: how many are equal, and where the others part."""
    pairs = [(a, b) for a, b in zip(cold, found, strict=True) if a != b]
    parts = [next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) for a, b in pairs]
    where = f"; the others part at token {sorted(parts)}" if parts else ""
    return f"{way}: {len(cold) - len(parts)} of {len(cold)} equal{where}"


def compare(texts, asked):
    numbers = range(asked.texts)
    cold = [texts.text(n, "alone") for n in numbers]
    assert len({tuple(each) for each in cold}) == asked.texts
    print(f"{asked.model.name}, {asked.dtype}, weights {asked.weights}", flush=True)
    print(told("cached", cold, [texts.text(n, "alone") for n in numbers]), flush=True)
    with ThreadPoolExecutor(asked.texts) as pool:
        batch = list(pool.map(lambda n: texts.text(n, "batch"), numbers))
    print(told("at once", cold, batch), flush=True)
    killed = [texts.killed(n) for n in numbers[: asked.kills]]
    recovered = texts.daemon.fresh_state()["totals"]["recovered_sequences"]
    print(told("killed", cold[: asked.kills], killed), f"({recovered} recovered)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="stored")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--kills", type=int, default=12)
    asked = parser.parse_args()
    options = ["--roles", "static", "--dtype", asked.dtype, "--weights", asked.weights]
    options += ["--max-model-len", "1024", "--kv-memory", "256MiB"]
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(Path(folder), *options, model=asked.model).wait_ready()
        try:
            compare(Texts(daemon, asked.texts, asked.tokens, asked.prompt_tokens), asked)
        finally:
            daemon.stop()


if __name__ == "__main__":
    main()
