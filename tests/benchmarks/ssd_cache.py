"""Time a long prompt computed, from the pool, from DRAM, from SSD, and from SSD after a kill.

usage: python -m tests.benchmarks.ssd_cache [--model FOLDER] [--folder FOLDER] [--rounds 3]
       [--length 4000] [--roles static]

A pool holds little more than two prompts. One is computed, asked for again (from the pool, and
stored), pushed out of the pool by two others, asked for (from the disk); then the daemon is killed
with SIGKILL, and its successor is asked (from the disk, after a restart). A daemon that has a DRAM
cache alone is asked in the same order. The disk is read by O_DIRECT: no page cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint
from tests.daemons import Daemon

BLOCK_SIZE = 64
CACHE = ("--ssd-cache", "8GiB")
OFF = ("--ssd-cache", "off")


def fresh(length: int, seed: int, vocab: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, vocab) for _ in range(length)]


def kv_memory(options: argparse.Namespace, num_tokens: int) -> tuple[str, ...]:
    """Settings for a pool of so many tokens."""
    config = Checkpoint.open(options.model or STARTER_FOLDER).config
    blocks = -(-num_tokens // BLOCK_SIZE) + 1
    dtype = "float32" if options.model is None else "bfloat16"
    return "--kv-memory", str(blocks * config.kv_block_bytes(BLOCK_SIZE, dtype)), "--dtype", dtype


def ttft_ms(daemon: Daemon, prompt: list[int]) -> float:
    began_s, first_s = time.monotonic(), None
    for event in daemon.stream(prompt, max_tokens=4, ignore_eos=True):
        if first_s is None and any(choice["token_ids"] for choice in event["choices"]):
            first_s = time.monotonic()
    assert first_s is not None, "no token"
    return (first_s - began_s) * 1e3


def ssd(daemon: Daemon) -> dict:
    return daemon.state()["ssd"]


def wait_on(daemon: Daemon) -> Daemon:
    daemon.wait_ready()
    daemon.wait_for(lambda: ssd(daemon)["state"] != "opening")
    return daemon


def wait_settled(daemon: Daemon) -> None:
    """Until nothing is stored any more."""
    last, count = None, 0
    while count < 5:
        now = ssd(daemon)["stored_blocks"]
        last, count = now, count + 1 if now == last else 0
        time.sleep(0.2)


def ratios(found: dict[str, list[float]], of: str, unit: str = "ms") -> None:
    for kind, values in found.items():
        shares = [a / b for a, b in zip(values, found[of], strict=True)]
        print(
            f"{kind:>24}: {statistics.median(values):9.2f} {unit} "
            f"({min(values):.2f} to {max(values):.2f}); of {of} "
            f"{statistics.median(shares):.4f} ({min(shares):.4f} to {max(shares):.4f})",
            flush=True,
        )


def measure(options: argparse.Namespace) -> None:
    length, found = options.length, {}
    memory = kv_memory(options, 2 * length + 640)
    settings = (*CACHE, *memory, "--roles", options.roles, "--max-model-len", str(length + 64))
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            daemon = wait_on(Daemon(Path(folder), *settings, model=options.model))
            asked = fresh(length, number)
            for seed in range(3):
                daemon.complete(fresh(300, 500 + seed), max_tokens=4, ignore_eos=True)
            row = {"computed": ttft_ms(daemon, asked), "pool": ttft_ms(daemon, asked)}
            wait_settled(daemon)
            for seed, name in enumerate(("the next computed", "and one more")):
                row[name] = ttft_ms(daemon, fresh(length, 900 + 10 * number + seed))
            row["SSD"] = ttft_ms(daemon, asked)
            before = daemon.wait_for(lambda d=daemon: d.log_rows()[0])
            daemon.kill()
            daemon = wait_on(Daemon(Path(folder), *settings, model=options.model))
            daemon.complete(fresh(300, 700), max_tokens=4, ignore_eos=True)
            row["SSD after kill -9"] = ttft_ms(daemon, asked)
            rows = [before, daemon.log_rows()[0]]
            daemon.kill()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arena = (*OFF, "--dram-cache", "4GiB")
            daemon = Daemon(Path(folder), *arena, *settings[2:], model=options.model).wait_ready()
            for _ in range(2):
                daemon.complete(asked, max_tokens=4, ignore_eos=True)
            for seed in range(2):
                daemon.complete(fresh(length, 900 + 10 * number + seed), max_tokens=1)
            row["DRAM"] = ttft_ms(daemon, asked)
            for logged in (*rows, daemon.log_rows()[0]):
                names = ("prompt_tokens", "cached_tokens", "restored_tokens", "restore_reason")
                print({name: logged[name] for name in names}, flush=True)
            daemon.kill()
            for kind, value in row.items():
                found.setdefault(kind, []).append(value)
    ratios(found, "computed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="of the caches; on a disk, not in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--roles", default="static")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
