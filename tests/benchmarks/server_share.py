"""What a server adds to the first token: TTFT through a socket, less the prompt's steps alone.

usage: python -m tests.benchmarks.server_share MODEL [--tokens 512] [--rounds 20] [--roles ROLES]

A daemon and a worker without one, both with all cores, take turns. Every prompt is new.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from appliance.bench.steps import StepCase, _Worker
from appliance.client import Client, ClientError
from appliance.configuration import config
from appliance.configuration.address import UnixAddress
from appliance.fleet.boot import make_plan

REST_S = 0.3
WARM_UP_ROUNDS = 2


def ttft_ms(client: Client, num_tokens: int) -> float:
    """Ask for one token after a prompt."""
    prompt = [random.randrange(5, 7000) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    started_s = time.perf_counter()
    with client.stream("/v1/completions", body | {"ignore_eos": True}) as events:
        next(iter(events))
        return (time.perf_counter() - started_s) * 1e3


async def compare(client: Client, options: argparse.Namespace) -> None:
    """Take turns; print both and the difference."""
    settings = config.load({"model": options.model, "roles": "colocated", "transport": "auto"})
    worker = _Worker(await asyncio.to_thread(make_plan, settings))
    case = StepCase(1, options.tokens)
    inside_ms, outside_ms = [], []
    try:
        await worker.start()
        for number in range(options.rounds + WARM_UP_ROUNDS):
            steps = await worker.run(case, 1)
            await asyncio.sleep(REST_S)
            asked_ms = await asyncio.to_thread(ttft_ms, client, options.tokens)
            await asyncio.sleep(REST_S)
            if number >= WARM_UP_ROUNDS:
                inside_ms.append(sum(ms for kind, ms in steps if kind.kind == "prefill"))
                outside_ms.append(asked_ms)
    finally:
        await worker.stop()
    added_ms = [outside - inside for inside, outside in zip(inside_ms, outside_ms, strict=True)]
    for name, values in ("steps", inside_ms), ("ttft", outside_ms), ("added", added_ms):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:6} {middle:7.1f} ms [{low:.1f}, {high:.1f}], least {min(values):.1f}")
    for name, of in ("medians", statistics.median), ("least", min):
        print(f"share of the {name}: {1 - of(inside_ms) / of(outside_ms):.1%}")


def main() -> None:
    """Start the daemon and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--roles", default="elastic")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        socket = Path(folder) / "p.sock"
        command = [sys.executable, "-m", "appliance.cli", "serve", "--model", options.model]
        command += ["--socket", str(socket), "--state-dir", folder, "--roles", options.roles]
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        client = Client(UnixAddress(socket), timeout_s=60)
        try:
            while True:
                try:
                    client.get("/ready")
                    break
                except ClientError:
                    time.sleep(0.1)
            asyncio.run(compare(client, options))
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
