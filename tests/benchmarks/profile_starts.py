"""What starts choose, with a profile and without, and what measuring while idle costs a request.

usage: python -m tests.benchmarks.profile_starts MODEL FILE [--starts 10] [--asks 16] [--busy]
       [--fresh]

If there is no FILE, a first daemon has no profile: it measures while idle, and prompts of 16 tokens
come in the middle of that, and as many when it is over; its profile is kept as FILE. Then daemons
start with a copy of FILE, and prompts of 16 to 600 tokens follow at once; with --busy a process
beside them uses a core all the time. With --fresh none has a profile, and FILE is not used. Printed
are the times, and how often each choice and each reason of a route came.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from appliance.client import Client
from appliance.measuring import SAVE_INTERVAL_S
from engine.schedule.measurer import MAX_WORK_MS
from tests.benchmarks.elastic_promises import daemon
from tests.benchmarks.lone_prompts import ask

ROOT = Path(__file__).parents[2]
LENGTHS = (16, 40, 128, 300, 600)
_WAIT_S = 4 * MAX_WORK_MS / 1e3


def say(what: str, times: list[float], unit: str) -> None:
    if times:
        middle = statistics.median(times)
        print(f"{what}: {middle:.4g} {unit} [{min(times):.4g}, {max(times):.4g}], {len(times)}")


def first(client: Client, socket: Path, num_asks: int) -> None:
    """Ask in the middle of measuring and after it; wait until the profile is written."""
    during: list[float] = []
    until_s, measured_ms = time.monotonic() + _WAIT_S, 0.0
    while time.monotonic() < until_s:
        state: Any = client.get("/v1/penstock/measure")
        if not state["is_going_on"]:
            break
        if state["work_ms"] > measured_ms and len(during) < num_asks:  # a slice has just ended
            time.sleep(random.uniform(0, 0.2))
            during.append(ask(str(socket), 16))
        measured_ms = state["work_ms"]
        time.sleep(0.05)
    print(f"measured for {state['work_ms'] / 1e3:.1f} s: {state['num_facts']} facts, "
          f"{state['num_unknown']} unknown")  # fmt: skip
    after = []
    for _ in range(num_asks):
        time.sleep(0.5)
        after.append(ask(str(socket), 16))
    say("16 tokens, in the middle of measuring", during, "ms")
    say("16 tokens, nothing is measured", after, "ms")
    time.sleep(SAVE_INTERVAL_S + 1)


def main() -> None:
    """Start the daemons, ask them, print what they chose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--asks", type=int, default=16)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    arguments = ["--model", options.model]
    if not (options.fresh or options.file.exists()):
        with daemon(ROOT, arguments, None) as (client, start_s):
            print(f"first start: ready after {start_s:.2f} s")
            socket = Path(client.address.path)
            first(client, socket, options.asks)
            shutil.copy(socket.parent / "state" / "profile.db", options.file)
    spin = [sys.executable, "-c", "while True: pass"]
    starts: list[float] = []
    choices: Counter[str] = Counter()
    routes: Counter[str] = Counter()
    with subprocess.Popen(spin) if options.busy else nullcontext() as neighbour:
        for _ in range(options.starts):
            with daemon(ROOT, arguments, None if options.fresh else options.file) as (
                client,
                start_s,
            ):
                starts.append(start_s)
                for num_tokens in LENGTHS:
                    ask(str(client.address.path), num_tokens)
                frame: Any = client.get("/v1/penstock/state")
                choices.update(text.partition(" Timed: ")[0] for text in frame["trials"])
                routes.update(frame["totals"]["routes"])
        if neighbour is not None:
            neighbour.terminate()
    say("ready", starts, "s")
    for about, found in (("choice", choices), ("route", routes)):
        for text, count in found.most_common():
            print(f"{about}, {count}: {text}")


if __name__ == "__main__":
    main()
