"""Prefill and decode through the daemon against transformers, on one checkpoint, interleaved.

usage: python -m tests.benchmarks.against_transformers MODEL [--dtype float32] [--rounds 3]

Both use the same cores with as many threads. The daemon runs colocated and is measured through
its socket, with HTTP, scheduling and text included; transformers is called in a process of its
own. Only one of them computes at a time. Figures are medians over the rounds; in brackets their
range.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.daemons import Daemon

CASES = ((1, 512), (1, 2048), (8, 128))
NUM_STEPS = 24


def serve_transformers(model: str, dtype: str) -> None:
    """Answer `batch length` lines with `prefill_s step_s` lines."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    print("ready", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            batch, length = map(int, line.split())
            ids = torch.randint(5, 8000, (batch, length))
            start = time.perf_counter()
            out = oracle(ids, use_cache=True, logits_to_keep=1)
            prefill_s = time.perf_counter() - start
            next_ids = out.logits[:, -1:].argmax(-1)
            gaps = []
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                out = oracle(next_ids, past_key_values=out.past_key_values, use_cache=True)
                next_ids = out.logits[:, -1:].argmax(-1)
                gaps.append(time.perf_counter() - start)
            print(prefill_s, statistics.median(gaps), flush=True)


def measure_penstock(daemon: Daemon, batch: int, length: int) -> tuple[float, float]:
    """One request with `batch` prompts: until all have token 1, and the gaps from then on."""
    prompts = [[random.randrange(5, 8000) for _ in range(length)] for _ in range(batch)]
    times: dict[int, list[float]] = {index: [] for index in range(batch)}
    start = time.perf_counter()
    for event in daemon.stream(prompts, max_tokens=NUM_STEPS + 8, ignore_eos=True):
        now = time.perf_counter()
        for choice in event["choices"]:
            times[choice["index"]] += [now] * len(choice["token_ids"])
    all_begun = max(tokens[0] for tokens in times.values())
    gaps = [b - a for tokens in times.values() for a, b in pairwise(tokens) if a >= all_begun]
    return all_begun - start, statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transformers:
        serve_transformers(options.model, options.dtype)
        return
    command = [sys.executable, "-m", "tests.benchmarks.against_transformers", options.model]
    peer = subprocess.Popen(
        [*command, "--dtype", options.dtype, "--transformers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = ["--roles", "colocated", "--dtype", options.dtype]
        daemon = Daemon(Path(folder), *args, model=Path(options.model)).wait_ready()
        assert peer.stdout.readline() == "ready\n"
        results: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {
            case: {"penstock": [], "transformers": []} for case in CASES
        }
        for _ in range(options.rounds + 1):  # the first round warms up
            for batch, length in CASES:
                ours = measure_penstock(daemon, batch, length)
                peer.stdin.write(f"{batch} {length}\n")
                peer.stdin.flush()
                theirs = tuple(map(float, peer.stdout.readline().split()))
                results[batch, length]["penstock"].append(ours)
                results[batch, length]["transformers"].append(theirs)
        daemon.stop()
        peer.stdin.close()
        peer.wait()
        report(results)


def report(results) -> None:
    def figures(values):
        return f"{statistics.median(values):8.1f} [{min(values):.1f}, {max(values):.1f}]"

    summary = []
    for (batch, length), arms in results.items():
        prefill = {a: [batch * length / r[0] for r in runs[1:]] for a, runs in arms.items()}
        step_ms = {a: [r[1] * 1e3 for r in runs[1:]] for a, runs in arms.items()}
        ratios = [
            [p / t for p, t in zip(prefill["penstock"], prefill["transformers"], strict=True)],
            [t / p for p, t in zip(step_ms["penstock"], step_ms["transformers"], strict=True)],
        ]
        print(f"batch {batch}, {length} tokens")
        for arm in arms:
            print(
                f"  {arm:13s} prefill tok/s {figures(prefill[arm])}"
                f"   decode ms/step {figures(step_ms[arm])}"
            )
        print(f"  faster by     prefill x {figures(ratios[0])}   decode x {figures(ratios[1])}")
        summary.append({"batch": batch, "length": length, "prefill": prefill, "step_ms": step_ms})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
