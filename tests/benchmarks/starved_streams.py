"""The gaps of streams beside long prompts, while other programs hold the cores.

usage: python -m tests.benchmarks.starved_streams [--loops 10] [--seconds 120] [--streams 6]
       [--roles static]... [--tree NAME=FOLDER]... [--model FOLDER] [--held 6] [--rounds 3]

Busy loops share the cores with a daemon of its own, first beside streams alone, then beside prompts
of some 3,600 tokens, one every few seconds; then, where this user may make groups of processes, the
prefill worker is held back too: a thousandth of a core for `--held` seconds, then a second of what
there is. For each phase: the streams' longest gap, the prompts by route and reason, and the events.
The phases take turns in rounds, as the machine's load changes; `--seconds` is a phase's time in all
rounds. Several trees (each with its own `.venv`) and roles take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.client.calls import Client, ClientError
from tests.benchmarks.elastic_promises import _SAMPLE, Streams, daemon

PROMPT_SHARE = 0.87
"""Of the runbook's text: some 3,600 tokens of the starter model."""
EVERY_S, MOST_PROMPTS = 3.5, 4
"""Seconds between prompts, and open ones at most."""
FREE_S = 1.0
_GROUPS = Path("/sys/fs/cgroup")


def a_story(number: int, turn: int) -> tuple[str, dict[str, object]]:
    """A request for a long text, drawn: a model of random values may repeat a token without one."""
    body = {"prompt": f"{number} {turn} Tell a long story.", "max_tokens": 1024, "seed": number}
    return "/v1/completions", body | {"stream": True, "ignore_eos": True}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Other programs that want the cores."""
    code = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(code) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def held_back(client: Client, worker: str, seconds: float) -> Iterator[None]:
    """Give a worker a thousandth of a core for so long, and all it can get for a second."""
    group = (_GROUPS / "cpu" if (_GROUPS / "cpu").is_dir() else _GROUPS) / f"starved-{os.getpid()}"
    is_v1 = group.parent.name == "cpu"
    quota = group / ("cpu.cfs_quota_us" if is_v1 else "cpu.max")
    group.mkdir()
    is_over = threading.Event()

    def hold() -> None:
        if is_v1:
            (group / "cpu.cfs_period_us").write_text("1000000")
        while not is_over.is_set():
            with suppress(ClientError, OSError, StopIteration):
                workers = client.get("/v1/penstock/state")["workers"]
                pid = next(w["pid"] for w in workers if w["name"] == worker and w["pid"])
                (group / "cgroup.procs").write_text(str(pid))
                quota.write_text("1000" if is_v1 else "1000 1000000")
                is_over.wait(seconds)
            with suppress(OSError):
                quota.write_text("-1" if is_v1 else "max 1000000")
            is_over.wait(FREE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def ask(client: Client, until_s: float, number: Iterator[int]) -> list[str]:
    """Send a long prompt every few seconds unless many are open; return the requests' ids."""
    text = (_SAMPLE / "runbook.txt").read_text("utf-8").strip()
    text = text[: int(PROMPT_SHARE * len(text))]
    found: list[str] = []

    def send() -> None:
        body = {"prompt": f"Report {next(number)}.\n\n{text}", "max_tokens": 8, "stream": True}
        with suppress(ClientError), client.stream("/v1/completions", body) as events:
            found.append(str(events.request_id))
            for _ in events:
                pass

    threads: list[threading.Thread] = []
    while (now_s := time.perf_counter()) < until_s:
        threads = [thread for thread in threads if thread.is_alive()]
        if len(threads) < MOST_PROMPTS:
            threads.append(threading.Thread(target=send))
            threads[-1].start()
        time.sleep(min(EVERY_S, until_s - now_s))
    for request_id in found:
        with suppress(ClientError):
            client.cancel(request_id)
    for thread in threads:
        thread.join()
    return found


def phase(
    name: str, client: Client, streams: Streams, seconds: float, number: Iterator[int] | None
) -> float:
    """Let it go on for so long, and print what came of it; return the longest gap."""
    began_s, began_at = time.perf_counter(), time.time()
    found: list[str] = []
    if number is None:
        time.sleep(seconds)
    else:
        found = ask(client, began_s + seconds, number)
    now_s = time.perf_counter()
    gaps_ms = streams.between(began_s, now_s) + streams.open_gaps(now_s)
    gaps = sorted(gap_ms / 1e3 for gap_ms in gaps_ms)
    load = os.getloadavg()[0]
    middle = gaps[len(gaps) // 2] if gaps else 0.0
    print(
        f"  {name} ({load:.1f}): {len(gaps)} gaps, median {middle:.3f} s, longest {gaps[-1]:.2f} s",
        flush=True,
    )
    routes = Counter()
    for request_id in found:
        with suppress(ClientError):
            row = client.request(request_id)
            routes[f"{row['route']}: {(row['route_reason'] or '')[:110]}"] += 1
    for route, count in routes.most_common(8):
        print(f"    {count} x {route}")
    events = client.get("/v1/penstock/events", {"limit": "500"})
    rows = events.get("events") or events.get("data") or []
    told = Counter(
        f"{e['code']}: {e['message'][:100]}"
        for e in rows
        if _time(e) >= began_at and e["severity"] != "info"
    )
    for about, count in told.most_common(12):
        print(f"    {count} x {about}")
    return gaps[-1]


def _time(event: dict) -> float:
    from datetime import datetime

    return datetime.fromisoformat(event["at"]).timestamp()


def main() -> None:
    """Run the arms in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--held", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roles", action="append", choices=("static", "elastic"))
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER")
    parser.add_argument("--model")
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    trees = options.tree or [f"this={Path(__file__).parents[2]}"]
    for tree, roles in itertools.product(trees, options.roles or ("static", "elastic")):
        name, _, folder = tree.partition("=")
        print(f"{name}, {roles} roles, {options.loops} busy loops", flush=True)
        number = itertools.count()
        with (
            daemon(Path(folder), [*model, "--roles", roles], None) as (client, _),
            busy_loops(options.loops),
        ):
            streams = Streams(client, options.streams, a_story)
            streams.wait()
            alone_s = beside_s = held_s = 0.0
            seconds = options.seconds / options.rounds
            try:
                for _ in range(options.rounds):
                    alone_s = max(alone_s, phase("streams alone", client, streams, seconds, None))
                    gap_s = phase("beside prompts", client, streams, seconds, number)
                    beside_s = max(beside_s, gap_s)
                    with held_back(client, "prefill", options.held):
                        gap_s = phase("prefill held back", client, streams, seconds, number)
                    held_s = max(held_s, gap_s)
            finally:
                streams.end()
        over, held_over = beside_s / alone_s, held_s / alone_s
        print(f"  longest gap over that of streams alone: {over:.1f}, held back {held_over:.1f}")


if __name__ == "__main__":
    main()
