"""Load and deaths over several workers of a role: each answer is held to the undisturbed one.

usage: python -m tests.benchmarks.kills [--model FOLDER] [--arms "2x1 peer,1x2 shm,2x2 peer"]
       [--roles elastic] [--seconds 40] [--clients 6] [--every 4] [--questions 10] [--dtype float32]

Each arm is a daemon with so many workers of a role, which may have to share cores. Questions about
documents are asked one by one; then clients stream them all the time, as many at once, while a
worker, drawn anew each time, gets SIGKILL every few seconds, but for those under which a request
would see so many deaths that it is taken for their cause. Any token that differs from the first
answer's is told, and any request that failed. At the end all blocks must be free.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.schedule.recovery import MAX_SUSPICIONS
from tests.daemons import Daemon
from tests.starter.lessons import Writer

MAX_TOKENS = 64
FACTS = (10, 60)
"""Of a document, at least and at most."""


def questions(count: int) -> list[tuple[str, str]]:
    """Prompts, and the answers that are right."""
    rng = random.Random(5)
    writer, asked = Writer(rng, held_out=True), []
    for _ in range(count):
        document = writer.document(rng.randint(*FACTS))
        turn = writer.lookup(document)
        asked.append((f"{document.text}\n\n{turn.question}", turn.answer))
    return asked


def answer(daemon: Daemon, prompt: str) -> str:
    """What the model says, and goes on with after its end."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    text, reason = "", None
    with daemon.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    assert reason == "length", reason
    return text


def kill_sometimes(
    daemon: Daemon, options: argparse.Namespace, is_over: threading.Event
) -> list[str]:
    """Kill workers that are ready, one every few seconds; which they were."""
    rng, killed, deaths = random.Random(7), [], Counter()
    while not is_over.wait(options.every):
        live = [r["id"] for r in daemon.requests() if r["finish_reason"] is None]
        ready = [w for w in daemon.state()["workers"] if w["state"] == "ready"]
        if ready and all(deaths[request_id] < MAX_SUSPICIONS for request_id in live):
            victim = rng.choice(ready)
            os.kill(victim["pid"], signal.SIGKILL)
            killed.append(victim["name"])
            deaths.update(live)
    return killed


def run_arm(arm: str, options: argparse.Namespace) -> dict:
    """One daemon under load and deaths."""
    place, transport = arm.split()
    args = ["--roles", options.roles, "--transport", transport, "--place", f"{place} forced"]
    asked = questions(options.questions)
    with tempfile.TemporaryDirectory() as name:
        args += ["--dtype", options.dtype]
        daemon = Daemon(Path(name), *args, model=options.model).wait_ready()
        try:
            expected = [answer(daemon, prompt) for prompt, _ in asked]
            is_over, order, wrong = threading.Event(), itertools.count(), []
            ends_s = time.monotonic() + options.seconds

            def load() -> int:
                count = 0
                while time.monotonic() < ends_s:
                    place = next(order) % len(asked)
                    given = answer(daemon, asked[place][0])
                    count += 1
                    if given != expected[place]:
                        wrong.append((expected[place], given))
                return count

            with ThreadPoolExecutor(options.clients + 1) as pool:
                killer = pool.submit(kill_sometimes, daemon, options, is_over)
                loads = [pool.submit(load) for _ in range(options.clients)]
                try:
                    num_answers = sum(one.result() for one in loads)
                finally:
                    is_over.set()
            daemon.assert_all_free()
            rows = daemon.log_rows()
            totals = daemon.fresh_state()["totals"]
        finally:
            daemon.stop()
    for was, given in wrong:
        print(f"different: {was!r} became {given!r}", file=sys.stderr)
    killed = killer.result()
    return {
        "arm": arm,
        "roles": options.roles,
        "right_undisturbed": sum(
            text.startswith(right) for text, (_, right) in zip(expected, asked, strict=True)
        ),
        "questions": len(asked),
        "answers_under_load": num_answers,
        "different": len(wrong),
        "kills": {name: killed.count(name) for name in sorted(set(killed))},
        "requests_recovered": sum(row["recoveries"] > 0 for row in rows),
        "routes": totals["routes"],
        "errors": sum(row["finish_reason"] not in ("length", "stop") for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--arms", default="2x1 peer,1x2 shm,2x2 peer")
    parser.add_argument("--roles", default="elastic")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=4)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    results = [run_arm(arm.strip(), options) for arm in options.arms.split(",")]
    for result in results:
        print(json.dumps(result), flush=True)
    return int(any(result["different"] or result["errors"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
