"""What fresh starts choose, when they are ready, and how their first tokens compare.

usage: python -m tests.benchmarks.profile_starts MODEL TREE... [--starts 10] [--asks 3] [--busy]
       [--tokens 128,512,1500] [--options "--roles colocated"]

A TREE is a checkout with an environment in .venv; trees take turns. Each daemon has an empty state
folder of its own. With --busy a process beside them uses a core all the time. Of each
start the median of its asks counts; what is printed is the middle of the starts, the extremes, and
the largest over the smallest.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.benchmarks.elastic_promises import daemon
from tests.benchmarks.lone_prompts import ask


def say(what: str, found: list[float], unit: str) -> None:
    middle, spread = statistics.median(found), max(found) / min(found)
    print(f"{what}: {middle:.4g} {unit} [{min(found):.4g}, {max(found):.4g}], {spread:.2f}x")


def main() -> None:
    """Start the daemons, ask them, print what they chose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--asks", type=int, default=3)
    parser.add_argument("--tokens", default="128,512,1500")
    parser.add_argument("--options", default="")
    parser.add_argument("--busy", action="store_true")
    how = parser.parse_args()
    lengths = [int(each) for each in how.tokens.split(",")]
    arguments = ["--model", how.model, *how.options.split()]
    found: dict[tuple[Path, str], list[float]] = defaultdict(list)
    choices: Counter[tuple[Path, str]] = Counter()
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) if how.busy else nullcontext() as neighbour:
        for _ in range(how.starts):
            for tree in how.trees:
                with daemon(tree, arguments, None) as (client, start_s):
                    found[tree, "ready, s"].append(start_s)
                    for count in lengths:
                        times = [ask(str(client.address.path), count) for _ in range(how.asks)]
                        found[tree, f"TTFT of {count}, ms"].append(statistics.median(times))
                    frame: Any = client.get("/v1/penstock/state")
                    choices.update((tree, each) for each in frame["trials"])
        if neighbour is not None:
            neighbour.terminate()
    for (tree, what), each in found.items():
        name, _, unit = what.rpartition(", ")
        say(f"{tree.name}: {name}", each, unit)
    for (tree, text), count in sorted(choices.items(), key=str):
        print(f"{tree.name}, {count} of {how.starts}: {text}")


if __name__ == "__main__":
    main()
