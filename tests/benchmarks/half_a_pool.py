"""Throughput where KV blocks are for half of what all could use, beside another version of it.

usage: python -m tests.benchmarks.half_a_pool MODEL --base CHECKOUT [--clients 8] [--rounds 3]
       [--prompt-tokens 128] [--max-tokens 256] [--seconds 20] [--roles static] [--dtype bfloat16]

CHECKOUT is a checkout of another commit with an environment of its own (.venv). Both daemons run
all the time, on the same cores, and take turns, round by round. Each has KV memory for half of
clients x (prompt + max_tokens). The clients are a closed loop and ask for max_tokens. In the first
part each reads an output of a random length, a quarter of that in the mean, and hangs up; in the
second it reads all. Tokens count that come within a round; what is under way then is cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from appliance.fleet.placement import BLOCK_SIZE
from appliance.frame.latency import quantile
from engine.checkpoint.checkpoint import Checkpoint

START_S = 90.0


class Arm:
    """A daemon of one checkout, and what was counted of it."""

    def __init__(self, name: str, checkout: Path, options: argparse.Namespace) -> None:
        self.name = name
        folder = Path(tempfile.mkdtemp(prefix="half-a-pool-"))
        self.socket, self.stderr = folder / "p.sock", folder / "stderr"
        length = options.prompt_tokens + options.max_tokens
        config = Checkpoint.open(Path(options.model)).config
        blocks = options.clients * -(-length // BLOCK_SIZE) // 2 + 1
        num_bytes = blocks * config.kv_block_bytes(BLOCK_SIZE, options.dtype)
        python = checkout / ".venv" / "bin" / "python"
        command = [str(python), "-m", "appliance.cli", "serve", "--socket", str(self.socket)]
        command += ["--state-dir", str(folder / "state"), "--model", options.model]
        command += ["--kv-memory", str(num_bytes), "--max-model-len", str(length)]
        command += ["--roles", options.roles, "--dtype", options.dtype]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        env |= {"XDG_CONFIG_HOME": str(folder), "PYTHONPATH": str(checkout)}
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(command, cwd=checkout, stderr=stderr, env=env)

    async def ready(self) -> None:
        deadline = time.monotonic() + START_S
        while await self._status() != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(self.stderr.read_text())
            await asyncio.sleep(0.2)

    async def _status(self) -> int:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.socket))
        except OSError:
            return 0
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return int(line.split()[1]) if line else 0


class Counts:
    """Of one part and one daemon, in one round."""

    def __init__(self) -> None:
        self.num_tokens = self.num_errors = 0
        self.itls_ms: list[float] = []
        self.ttfts_ms: list[float] = []


async def one(
    arm: Arm, prompt: list[int], max_tokens: int, read: int, counts: Counts, end_ns: int
) -> None:
    """Ask for max_tokens, take so many, hang up; no later than at the end."""
    asked_ns = time.monotonic_ns()
    reader, writer = await asyncio.open_unix_connection(str(arm.socket))
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,  # else tokens without a text of their own send nothing
            "temperature": 0,
            "ignore_eos": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    num, last_ns = 0, 0
    is_ok = b" 200 " in await reader.readline()
    while is_ok and num < read:
        line = await reader.readline()
        if not line or line.startswith(b"data: [DONE]") or b'"error"' in line:
            break
        if line.startswith(b"data: "):
            now_ns = time.monotonic_ns()
            if now_ns > end_ns:
                read = num
                break
            since_ns, kind = (last_ns, counts.itls_ms) if num else (asked_ns, counts.ttfts_ms)
            kind.append((now_ns - since_ns) / 1e6)
            choices = json.loads(line[6:])["choices"]
            num += sum(len(choice["token_ids"]) for choice in choices)
            last_ns = now_ns
    counts.num_tokens += num
    counts.num_errors += num < read
    writer.close()


async def part(arm: Arm, options: argparse.Namespace, *, is_short: bool, seed: int) -> Counts:
    """A closed loop for so many seconds; only what comes within them counts."""
    rng, counts, most = random.Random(seed), Counts(), options.max_tokens
    end_ns = time.monotonic_ns() + round(options.seconds * 1e9)

    async def client() -> None:
        while time.monotonic_ns() < end_ns:
            prompt = [rng.randrange(100, 10_000) for _ in range(options.prompt_tokens)]
            length = min(max(round(rng.expovariate(4 / most)), 1), most) if is_short else most
            await one(arm, prompt, most, length, counts, end_ns)

    await asyncio.gather(*(client() for _ in range(options.clients)))
    counts.num_tokens = round(counts.num_tokens / options.seconds)  # a second
    await asyncio.sleep(0.5)  # the last of them have hung up
    return counts


async def main(options: argparse.Namespace) -> None:
    here = Path(__file__).parents[2]
    arms = [Arm("base", Path(options.base), options), Arm("here", here, options)]
    try:
        for arm in arms:
            await arm.ready()
            await part(arm, argparse.Namespace(**{**vars(options), "seconds": 2}), is_short=True,
                       seed=0)  # fmt: skip
        for is_short in (True, False):
            found: dict[str, list[Counts]] = {arm.name: [] for arm in arms}
            for seed in range(1, options.rounds + 1):
                for arm in arms if seed % 2 else arms[::-1]:
                    found[arm.name].append(await part(arm, options, is_short=is_short, seed=seed))
            print("outputs with a mean of a quarter" if is_short else "outputs at max_tokens")
            for name, each in found.items():
                gaps = list(itertools.chain.from_iterable(c.itls_ms for c in each))
                rates = [c.num_tokens for c in each]
                print(
                    f"  {name}: {statistics.median(rates)} tok/s ({min(rates)} to {max(rates)}), "
                    f"gap p50 {quantile(gaps, 0.5):.1f} ms, p99 {quantile(gaps, 0.99):.1f} ms, "
                    f"longest {max(gaps):.0f} ms, first token p50 "
                    f"{quantile([t for c in each for t in c.ttfts_ms], 0.5):.0f} ms, "
                    f"{sum(c.num_errors for c in each)} errors; each round {rates}"
                )
            base, ours = ([c.num_tokens for c in found[name]] for name in ("base", "here"))
            ratios = [b / a for a, b in zip(base, ours, strict=True)]
            print(
                f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    finally:
        for arm in arms:
            arm.process.kill()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--base", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--roles", default="static")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parse()))
