"""Read memory on one core and do nothing else: what the shared memory bus alone costs others.

usage: python -m tests.benchmarks.bus_reader [--cpu 0] [--seconds 20] [--mib 512]

`penstock bench run` beside it shows how much longer a token takes that is decoded on another core;
what prompts on that core cost beyond this is not the bus.
"""

from __future__ import annotations

import argparse
import os
import time

import torch


def main() -> None:
    """Read for so long, and print the rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--mib", type=int, default=512)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.cpu})
    torch.set_num_threads(1)
    memory = torch.ones(options.mib << 17, dtype=torch.float64)
    num_bytes, started_s = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - started_s) < options.seconds:
        memory.max()
        num_bytes += memory.nbytes
    print(f"read {num_bytes / elapsed_s / 1e9:.1f} GB/s on core {options.cpu}")


if __name__ == "__main__":
    main()
