"""What NVIDIA Dynamo in front of appliances costs and brings.

python -m tests.benchmarks.scale_out PART

Parts, each in a network namespace of its own (root; tests.dynamo_cluster says which Python has the
wheels):
  cost   time to the first token and per token, direct and through the frontend, interleaved
  kill   an appliance, or its adapter, killed under four streams, with probes beside them
  trace  what of agents' prompts is found cached over two appliances, by how the router chooses
  idle   memory of each process, and the CPU time that it takes while nobody asks
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.dynamo_cluster import ROOT, Cluster, cluster, own_network, wait_for

ALIKE = ("--roles", "colocated")
AGENTS = (
    *("--workload", "agent", "--count", "4", "--prompt-text"),
    *("--length-scale", "0.2", "--speed", "20"),
)
DOCUMENT = (ROOT / "engine/starter/sample/runbook.txt").read_text()


class Read:
    """A streamed reply: when each token came, and the text."""

    def __init__(self, client: httpx.Client, body: dict, since: float | None = None) -> None:
        self.text, self.times, self.error = "", [], None
        began = time.perf_counter() if since is None else since
        try:
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                for line in reply.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        self.error = line
                        continue
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.times.append(time.perf_counter() - began)
                if reply.status_code != 200:
                    self.error = f"status {reply.status_code}"
        except httpx.HTTPError as error:
            self.error = repr(error)

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def on_socket(made: Cluster, number: int = 0) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(made.appliances[number].daemon.socket))
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=120)


def cost(folder: Path, rounds: int) -> None:
    """One appliance; its socket, the frontend, and its socket again, in turns."""
    with cluster(folder, None, *ALIKE, num_appliances=1) as made:
        direct, again, model = on_socket(made), on_socket(made), made.model
        arms = {"direct": direct, "frontend": made.http, "direct again": again}
        for name, num_chars, streams in (
            ("short", 40, 1),
            ("2,000 characters", 2000, 1),
            ("8 streams", 40, 8),
        ):
            ttft: dict[str, list[float]] = {arm: [] for arm in arms}
            gap: dict[str, list[float]] = {arm: [] for arm in arms}
            for turn in range(rounds + 2):
                for arm, client in arms.items():
                    start = (turn * 137) % 3000
                    prompt = f"{turn} {arm} {DOCUMENT[start : start + num_chars]}"
                    body = {"model": model, "prompt": prompt, "max_tokens": 128, "temperature": 0}
                    body["min_tokens"] = 128  # an end of text has no chunk, here or there
                    with ThreadPoolExecutor(streams) as pool:
                        replies = list(
                            pool.map(lambda _, c=client, b=body: Read(c, b), range(streams))
                        )
                    if turn < 2:
                        continue  # warm
                    for reply in replies:
                        assert reply.error is None, reply.error
                        assert len(reply.times) > 10
                        ttft[arm].append(1000 * reply.times[0])
                        gap[arm].append(1000 * (reply.times[-1] - reply.times[0]) / 127)
            for arm in arms:
                first, each = quartiles(ttft[arm]), quartiles(gap[arm])
                print(f"{name:18} {arm:13} ttft ms {first}  per token ms {each}", flush=True)


def kill(folder: Path, rounds: int) -> None:
    """Two appliances, four streams, one death; compared with an undisturbed run."""
    with cluster(folder, None, *ALIKE, router=("--router-mode", "round-robin")) as made:
        model, reference = made.model, on_socket(made, 1)
        for what in ("daemon", "adapter"):
            for sampling in ({"temperature": 0}, {"temperature": 1.5, "frequency_penalty": 0.5}):
                pauses, num_same, num_failed, probes = [], 0, 0, []
                for turn in range(rounds):
                    bodies = [
                        {"model": model, "prompt": f"{turn} {i} {DOCUMENT[i * 100: i * 100 + 300]}",
                         "max_tokens": 500, "ignore_eos": True, "seed": 100 * turn + i, **sampling}
                        for i in range(4)
                    ]  # fmt: skip
                    wanted = [Read(reference, body).text for body in bodies]
                    is_over = threading.Event()

                    def probe(is_over=is_over, probes=probes) -> None:
                        while not is_over.is_set():
                            body = {"model": model, "prompt": "probe", "max_tokens": 1}
                            probes.append(made.http.post("/v1/completions", json=body).status_code)
                            time.sleep(0.05)

                    victim = made.appliances[0]
                    with ThreadPoolExecutor(5) as pool:
                        probing = pool.submit(probe)
                        replies = [pool.submit(Read, made.http, body) for body in bodies]
                        time.sleep(0.3)
                        process = victim.daemon.process if what == "daemon" else victim.adapter
                        num_joined = victim.told.count("the router may choose")
                        process.send_signal(signal.SIGKILL)
                        told = [one.result() for one in replies]
                        is_over.set()
                        probing.result()
                    process.wait()
                    num_same += sum(
                        one.text == text for one, text in zip(told, wanted, strict=True)
                    )
                    num_failed += sum(one.error is not None for one in told)
                    pauses += [one.longest_pause_s for one in told]
                    (victim.start_daemon if what == "daemon" else victim.start_adapter)()
                    wait_for(lambda v=victim, n=num_joined: v.has_joined(n + 1))
                    time.sleep(1.5)
                how = "greedy" if sampling["temperature"] == 0 else "drawn, with a penalty"
                num_bad = sum(code != 200 for code in probes)
                print(
                    f"kill -9 of the {what}, {how}: {4 * rounds} streams, {num_failed} failed, "
                    f"{num_same} with the text of an undisturbed run; longest pause "
                    f"{max(pauses):.2f} s, median {statistics.median(pauses):.2f}; "
                    f"{len(probes)} probes, {num_bad} failed",
                    flush=True,
                )


def trace(folder: Path, rounds: int) -> None:
    """Agents' loops; each way in turn with daemons of its own."""
    ways = {
        "kv, events": ("--router-mode", "kv"),
        "kv, no events": ("--router-mode", "kv", "--no-router-kv-events"),
        "round-robin": ("--router-mode", "round-robin"),
    }
    for turn in range(rounds):
        for name, router in ways.items():
            args = (*ALIKE, "--kv-memory", "128MiB")
            with cluster(folder / f"{turn}{name}", None, *args, router=router) as made:
                saved = folder / "samples.json"
                command = [sys.executable, "-m", "appliance.cli", "bench", "turns", f"x={made.url}"]
                command += [*AGENTS, "--seed", str(turn), "--save", str(saved), "-o", "json"]
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, check=False
                )
                print(f"{name}, seed {turn}:")
                wanted = ("hit_ratio", "infinite_hit_ratio", "ttft_p50_ms", "failed")
                try:
                    for row in json.loads(done.stdout)["data"]:
                        if row["metric"] in wanted:
                            print("   ", row["arm"], row["metric"], row["median"], flush=True)
                except ValueError:
                    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
                counts = [one.num_requests() for one in made.appliances]
                pools = [one.daemon.fresh_state()["pools"][0] for one in made.appliances]
                evicted = [pool["evicted"] for pool in pools]
                print(f"    requests by appliance {counts}, evicted {evicted}", flush=True)


def idle(folder: Path, rounds: int) -> None:
    """Two appliances, nobody asks."""
    with cluster(folder, None, *ALIKE) as made:
        processes = {"frontend": made.frontend.pid}
        for number, appliance in enumerate(made.appliances):
            processes[f"adapter {number}"] = appliance.adapter.pid
            processes[f"daemon {number}"] = appliance.daemon.pid
        time.sleep(5)
        found = {name: psutil.Process(pid) for name, pid in processes.items()}
        before = {name: process.cpu_times() for name, process in found.items()}
        limit_s = 10 * rounds
        time.sleep(limit_s)
        for name, process in found.items():
            used = process.cpu_times()
            used_s = used.user + used.system - before[name].user - before[name].system
            memory = process.memory_full_info()
            print(
                f"{name:10} {memory.rss / 2**20:6.0f} MiB resident, {memory.uss / 2**20:6.0f} its "
                f"own; idle {100 * used_s / limit_s:.2f} % of a core, "
                f"{process.num_threads()} threads",
                flush=True,
            )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["cost", "kill", "trace", "idle"])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dyn-") as folder, own_network():
        globals()[asked.part](Path(folder), asked.rounds)


if __name__ == "__main__":
    main()
