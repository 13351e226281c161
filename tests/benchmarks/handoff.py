"""The gap between token 1 and token 2 while the prefill worker is kept busy, by transport.

usage: python -m tests.benchmarks.handoff [--model FOLDER] [--rounds 3] [--requests 30]
       [--arms alias,peer,colocated,alias] [--prompt 512] [--busy 1500]

Each round starts a daemon for each arm in turn: colocated, or static roles with that transport. One
client sends long prompts all the time, one after the other, so that the prefill worker is never
idle; another streams short replies and takes the time between their first two tokens, which is the
handoff and a decode step.
The bytes of each handoff are held to the blocks of its prompt. What memmove copies a block in, on
one core of this machine, stands beside what the workers have found when they tried the way.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from tests.daemons import Daemon


def memmove_bytes_per_s(num_bytes: int, count: int = 200) -> float:
    """Of blocks, one after the other, through 64 MiB of each side."""
    num_blocks = max((64 << 20) // num_bytes, 1)
    source, target = (ctypes.create_string_buffer(num_blocks * num_bytes) for _ in range(2))
    at, to = ctypes.addressof(source), ctypes.addressof(target)
    for _ in range(2):  # the first time the pages are made
        started_ns = time.monotonic_ns()
        for i in range(count):
            offset = i % num_blocks * num_bytes
            ctypes.memmove(to + offset, at + offset, num_bytes)
        elapsed_ns = time.monotonic_ns() - started_ns
    return 2 * count * num_bytes / elapsed_ns * 1e9  # read and written, as the workers' try counts


def gap_ms(daemon: Daemon, prompt: list[int]) -> float:
    """Between the first two tokens of a stream."""
    times = [
        time.monotonic()
        for event in daemon.stream(prompt, max_tokens=6, ignore_eos=True)
        if any(choice["token_ids"] for choice in event["choices"])
    ]
    return (times[1] - times[0]) * 1e3


def keep_busy(daemon: Daemon, length: int, is_over: threading.Event) -> None:
    number = 0
    while not is_over.is_set():
        number += 1
        prompt = [(number * 13 + i * 7) % 250 for i in range(length)]
        daemon.complete(prompt, max_tokens=1, ignore_eos=True)


def run_arm(arm: str, options: argparse.Namespace) -> dict:
    """One daemon's gaps."""
    with tempfile.TemporaryDirectory() as name:
        args = ["--roles", "static", "--transport", arm]
        if arm == "colocated":
            args = ["--roles", arm]
        daemon = Daemon(Path(name), *args, model=options.model).wait_ready()
        is_over = threading.Event()
        busy = threading.Thread(target=keep_busy, args=(daemon, options.busy, is_over))
        busy.start()
        try:
            prompts = [
                [(n + i) % 250 for i in range(options.prompt)] for n in range(options.requests)
            ]
            gaps = [gap_ms(daemon, prompt) for prompt in prompts][2:]
        finally:
            is_over.set()
            busy.join()
        state = daemon.fresh_state()
        block = state["pools"][0]
        num_blocks = -(-options.prompt // block["block_size"])
        moved = {r["handoff_bytes"] for r in daemon.log_rows() if r["completion_tokens"] == 6}
        is_copied = arm not in ("alias", "colocated")
        assert moved == {num_blocks * block["block_bytes"] if is_copied else 0}, moved
        probed = state["handoff"] and state["handoff"]["probe_bytes_per_s"]
        copied = [link["copy_bytes_per_s"] for link in state["links"] if link["copy_bytes_per_s"]]
        daemon.stop()
        return {
            "arm": arm,
            "gap_ms_p50": round(statistics.median(gaps), 2),
            "gap_ms_p95": round(sorted(gaps)[int(0.95 * len(gaps))], 2),
            "bytes_per_handoff": moved.pop(),
            "gaps_ms": [round(gap, 1) for gap in sorted(gaps)],
            "probe_GB_per_s": probed and round(probed / 1e9, 1),
            "copy_GB_per_s": copied and round(min(copied) / 1e9, 2),
            "memmove_GB_per_s": round(memmove_bytes_per_s(block["block_bytes"]) / 1e9, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--arms", default="alias,peer,colocated,alias")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--busy", type=int, default=1500)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for arm in options.arms.split(","):
            print(json.dumps(run_arm(arm, options)), flush=True)


if __name__ == "__main__":
    main()
