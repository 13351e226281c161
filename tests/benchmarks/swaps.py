"""Two models under load, one served at a time: what a swap takes, and that no request is lost.

usage: python -m tests.benchmarks.swaps FIRST OTHER [--seconds 60] [--clients 8] [--min-stay 5]
       [--tokens 32] [--prompt 64] [--turns 7] [--keep-resident 2]

With --turns one client asks both models in turn with one prompt, over an SSD cache: each turn's
swap, the time of its request and how many tokens of the prompt were cached.

One daemon knows both folders. Each client asks one after the other, by turns for the first model
and for the other, so that somebody always waits for the one that is not served; each reply is
held to the model that was named and to the tokens that were asked for. At the end the daemon's own
books are compared with what the clients have counted. Times of swaps are from its events.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.daemons import Daemon


def ask(daemon: Daemon, names: list[str], until_s: float, options, counts: Counter) -> None:
    """One client; it ends with an answer."""
    transport = httpx.HTTPTransport(uds=str(daemon.socket))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=300) as client:
        number = 0
        while time.monotonic() < until_s:
            name = names[number % 2]
            number += 1
            prompt = [(number * 13 + i * 7) % 250 for i in range(options.prompt)]
            body = {"model": name, "prompt": prompt, "max_tokens": options.tokens}
            reply = client.post("/v1/completions", json={**body, "ignore_eos": True})
            is_right = (
                reply.status_code == 200
                and reply.json()["model"] == name
                and reply.json()["usage"]["completion_tokens"] == options.tokens
            )
            counts[name if is_right else f"lost: {reply.status_code} {reply.text[:200]}"] += 1


def run(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "penstock.toml"
        table = f'[models.other]\nmodel = "{options.other.resolve()}"\n'
        settings.write_text(f'min_stay = "{options.min_stay}s"\n{table}')
        daemon = Daemon(Path(folder) / "d", "--config", str(settings), model=options.first)
        daemon.wait_ready()
        first, counts = daemon.state()["model"], Counter()
        until_s = time.monotonic() + options.seconds
        names = [[first, "other"], ["other", first]]
        clients = [
            threading.Thread(target=ask, args=(daemon, names[i % 2], until_s, options, counts))
            for i in range(options.clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        found = re.findall(r"serving (\S+) in place of \S+, swapped in ([\d.]+) s", daemon.stderr)
        rows, totals = daemon.log_rows(), daemon.fresh_state()["totals"]
        daemon.assert_all_free()
        daemon.stop()
        lost = {name: count for name, count in counts.items() if name.startswith("lost")}
        assert totals["finished"] == counts[first] + counts["other"], (totals, counts)
        times = {name: [float(s) for to, s in found if to == name] for name in (first, "other")}
        waits = sorted(row["queue_ms"] for row in rows)
        return {
            "requests": {first: counts[first], "other": counts["other"]},
            "lost": lost,
            "swaps": len(found),
            "swap_s": {
                name: {"median": statistics.median(s), "min": min(s), "max": max(s)}
                for name, s in times.items()
                if s
            },
            "queue_ms": {"p50": round(statistics.median(waits)), "max": round(waits[-1])},
        }


def turns(options: argparse.Namespace) -> dict:
    """Ask both models in turn with one prompt: what each swap took, and what was cached."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "penstock.toml"
        table = f'[models.other]\nmodel = "{options.other.resolve()}"\n'
        resident = f'keep_resident = {options.keep_resident}\nkeep_alive = "forever"\n'
        settings.write_text(f"min_stay = 0\n{resident}{table}")
        more = ("--config", str(settings), "--ssd-cache", "1GiB")
        daemon = Daemon(Path(folder) / "d", *more, model=options.first).wait_ready()
        names = (daemon.state()["model"], "other")
        prompt, rows = [(i * 7 + i // 250) % 250 for i in range(options.prompt)], []
        for turn in range(options.turns):
            began_s = time.monotonic()
            usage = daemon.complete(prompt, model=names[turn % 2], max_tokens=1)["usage"]
            rows.append(
                {
                    "swap_ms": daemon.state()["swaps"]["last_swap_ms"],
                    "request_ms": round((time.monotonic() - began_s) * 1e3),
                    "cached": usage["prompt_tokens_details"]["cached_tokens"],
                }
            )
        daemon.stop()
        swaps = sorted(row["swap_ms"] for row in rows[2:])
        median = {"median": statistics.median(swaps), "min": swaps[0], "max": swaps[-1]}
        return {"keep_resident": options.keep_resident, "swap_ms": median, "turns": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--min-stay", type=float, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--keep-resident", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(turns(options) if options.turns else run(options), indent=1))


if __name__ == "__main__":
    main()
