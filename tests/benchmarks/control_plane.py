"""What a token costs the daemon in CPU time: the real one between a fake worker and lean clients.

usage: python -m tests.benchmarks.control_plane [--model FOLDER] [--streams 200] [--steps 300]
       [--workers 1] [--unread] [--interval-ms 30] [--body JSON] [--profile FILE]

The workers compute nothing: each sends one token for each of its streams, every INTERVAL_MS. They
wait until each client has read the last one, so that on a busy machine steps come later but never
two of a worker at once, and what is counted stays the cost of one step. Counted is the CPU time of
the daemon's process alone. What the open streams cost each second while no token comes (frames, the
look at every connection) is measured first, and taken off; the share of a core is that and the
tokens' at the full rate. Of several workers one prefills and each of the others decodes its share.

With --unread replies are not streamed, so that no client is written to, and workers step by the
clock; with an interval of 0 as soon as the daemon takes their messages: that is where it saturates.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from appliance.cli import main as penstock
from appliance.hub.names import STARTER_FOLDER
from engine.errors import ChannelClosed
from engine.text.tokenizer import Tokenizer
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    Admit,
    MeasureSteps,
    Ready,
    Release,
    SequenceStep,
    Setup,
    Stepped,
    StepsMeasured,
    WeightsComplete,
    WeightsLoaded,
)

NUM_WARM_UP_STEPS = 10
POLL_S = 0.02
SETTLE_S = 1.0
QUIET_S = 5.0
TEXT = "The penstock leads the water from the lake down to the turbine, and asks no questions. "
FOLDER_VARIABLE = "CONTROL_PLANE_FOLDER"
"""Where the run's parts find each other."""


class FakeWorker:
    """Speaks engine.wire.messages; its output is TEXT, over and over."""

    def __init__(self, channel: WorkerChannel, folder: Path) -> None:
        self._channel = channel
        self._folder = folder
        self._interval_s = json.loads((folder / "options.json").read_text())["interval_ms"] / 1e3
        self._rounds = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._running: dict[int, tuple[Admit, int]] = {}
        """The Admit, and how many output tokens there are."""

    def run(self) -> None:
        """Load nothing; make as many steps as it is told."""
        (setup,) = self._channel.receive(wait=True)
        assert isinstance(setup, Setup)
        tokenizer = Tokenizer.from_folder(Path(setup.model_dir))
        self._output = tokenizer.encode(TEXT, add_special_tokens=False)
        self._channel.send(WeightsLoaded())
        assert self._channel.receive(wait=True) == [WeightsComplete()]
        self._rounds.bind(str(self._folder / f"rounds-{setup.worker}"))
        self._channel.send(Ready("none"))
        due = 0.0
        while True:
            self._take()
            if not select.select([self._rounds], [], [], POLL_S)[0]:
                continue
            for _ in range(int(self._rounds.recv(16))):
                time.sleep(max(due - time.monotonic(), 0.0))
                due = time.monotonic() + self._interval_s
                self._take()
                self._step(list(self._running))

    def _take(self) -> None:
        """Take commands; a new sequence has its next token at once."""
        new = []
        for command in self._channel.receive(wait=False):
            if isinstance(command, Admit):
                num_output = len(command.token_ids) - command.num_prompt_tokens
                self._running[command.seq_id] = command, num_output
                new.append(command.seq_id)
            elif isinstance(command, MeasureSteps):
                self._channel.send(StepsMeasured(command.measurement_id, []))
            elif isinstance(command, Release) and command.seq_id in self._running:
                admit, num_output = self._running.pop(command.seq_id)
                self._send([self._entry(admit, num_output, released="ended")])
        if new:
            self._step(new)

    def _step(self, seq_ids: list[int]) -> None:
        entries = []
        for seq_id in seq_ids:
            admit, num_output = self._running[seq_id]
            self._running[seq_id] = admit, num_output + 1
            has_moved = num_output + 1 >= admit.until_output
            if has_moved:
                del self._running[seq_id]
            token_id = self._output[num_output % len(self._output)]
            released = "moved" if has_moved else None
            entries.append(self._entry(admit, num_output, token_id, released))
        if entries:
            self._send(entries)

    def _send(self, entries: list[SequenceStep]) -> None:
        now_ns = time.monotonic_ns()
        num_tokens = sum(entry.num_scheduled_tokens for entry in entries)
        self._channel.send(Stepped(now_ns, now_ns, 0, num_tokens, entries))

    def _entry(
        self,
        admit: Admit,
        num_output: int,
        token_id: int | None = None,
        released: str | None = None,
    ) -> SequenceStep:
        return SequenceStep(
            seq_id=admit.seq_id,
            generation=admit.generation,
            num_computed_tokens=admit.num_prompt_tokens + num_output,
            token_ids=[] if token_id is None else [token_id],
            logprobs=[],
            finish_reason=None,
            released=released,
            num_scheduled_tokens=int(token_id is not None),
            admitted_ns=0,
        )


class Clock:
    """CPU time of the daemon and wall time, since the last look."""

    def __init__(self, daemon: psutil.Process) -> None:
        self._daemon = daemon
        self.lap()

    def lap(self) -> tuple[float, float]:
        """Seconds of both since the last lap."""
        last, times = getattr(self, "_last", (0.0, 0.0)), self._daemon.cpu_times()
        self._last = times.user + times.system, time.monotonic()
        return self._last[0] - last[0], self._last[1] - last[1]


class Rounds:
    """Tells workers when to step, and knows what clients have read."""

    def __init__(self, folder: Path, options: dict) -> None:
        self._folder, self._options = folder, options
        paths = sorted(folder.glob("rounds-*"))
        self._paths = [p for p in paths if len(paths) == 1 or "prefill" not in p.name]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.num_read = 0
        self.over = asyncio.Event()

    def read(self) -> None:
        """A client has read an event; a round is over when each has."""
        self.num_read += 1
        if self.num_read == self._options["streams"]:
            self.over.set()

    async def steps(self, count: int) -> None:
        """Let every worker make so many steps, and wait until the daemon has passed them on."""
        if self._options["unread"]:
            state = await state_of(self._folder)
            expected = state["totals"]["output_tokens"] + count * self._options["streams"]
            self._tell(count)
            await until(self._folder, lambda state: state["totals"]["output_tokens"] >= expected)
            return
        for _ in range(count):
            self.num_read = 0
            self.over.clear()
            self._tell(1)
            await self.over.wait()

    def _tell(self, count: int) -> None:
        for path in self._paths:
            self._socket.sendto(str(count).encode(), str(path))

    def cost(self, quiet_share: float, cpu_s: float, wall_s: float) -> dict:
        """What a token costs, and how many there were."""
        streams, steps = self._options["streams"], self._options["steps"]
        token_us = (cpu_s - quiet_share * wall_s) * 1e6 / (steps * streams)
        result = {
            "cpu_us_per_token": round(token_us, 1),
            "quiet_share_of_a_core": round(quiet_share, 3),
            "measured_tokens_per_s": round(steps * streams / wall_s),
            "measured_steps_per_s": round(steps * len(self._paths) / wall_s),
            "measured_share_of_a_core": round(cpu_s / wall_s, 3),
        }
        if self._options["interval_ms"]:
            tokens_per_s = streams * 1e3 / self._options["interval_ms"]
            share = quiet_share + token_us * tokens_per_s / 1e6
            result |= {
                "share_of_a_core": round(share, 3),
                "at_tokens_per_s": round(tokens_per_s),
            }
        return result


class Client(asyncio.Protocol):
    """One stream, read and forgotten."""

    def __init__(self, request: bytes, rounds: Rounds) -> None:
        self._request = request
        self._rounds = rounds

    def connection_made(self, transport) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: " in data:
            self._rounds.read()
        elif data.startswith(b"HTTP/1.1 4"):
            raise SystemExit(data.decode())


async def state_of(folder: Path) -> dict:
    """What the daemon says of itself."""
    reader, writer = await asyncio.open_unix_connection(str(folder / "p.sock"))
    writer.write(b"GET /v1/penstock/state HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    reply = await reader.read()
    writer.close()
    return json.loads(reply.partition(b"\r\n\r\n")[2])


async def until(folder: Path, is_so: Callable[[dict], bool]) -> None:
    """Look twice a second."""
    while True:
        if is_so(await state_of(folder)):
            return
        await asyncio.sleep(0.5)


async def read_streams(folder: Path, options: dict, daemon: psutil.Process) -> dict:
    """Open all streams, and read them until the cost is known."""
    num_steps = NUM_WARM_UP_STEPS + options["steps"]
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_steps + 10,
            "stream": not options["unread"],
            **options["body"],
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    rounds = Rounds(folder, options)
    loop = asyncio.get_running_loop()
    transports = []

    for number in range(options["streams"]):
        transport, _ = await loop.create_unix_connection(
            lambda: Client((head + body).encode(), rounds), str(folder / "p.sock")
        )
        transports.append(transport)
        if number % 64 == 63:  # so that no listener's backlog is full
            most = number - 64
            await until(folder, lambda state, most=most: state["queue"]["decoding"] > most)
    try:
        await until(folder, lambda state: state["queue"]["decoding"] == options["streams"])
        await asyncio.sleep(SETTLE_S)  # for the tokens that came with the admission
        await rounds.steps(NUM_WARM_UP_STEPS)
        clock = Clock(daemon)
        await asyncio.sleep(QUIET_S)
        quiet_s, elapsed_s = clock.lap()
        await rounds.steps(options["steps"])
        return rounds.cost(quiet_s / elapsed_s, *clock.lap())
    finally:
        for transport in transports:
            transport.abort()


def serve(folder: Path, profile: Path | None, model: Path, num_workers: int) -> None:
    """`penstock serve`, whose workers are this file."""
    wrapper = folder / "python"
    wrapper.write_text(
        f'#!/bin/sh\nshift 3\nexec {sys.executable} -m tests.benchmarks.control_plane work "$@"\n'
    )
    wrapper.chmod(0o755)
    sys.executable = str(wrapper)
    sys.argv = ["penstock", "serve", "--model", str(model), "--max-queued", "1000"]
    apart = ["--roles", "static", "--transport", "alias", "--place", f"1x{num_workers} forced"]
    sys.argv += apart if num_workers > 1 else ["--roles", "colocated"]
    sys.argv += ["--socket", str(folder / "p.sock"), "--state-dir", str(folder / "state")]
    sys.argv += ["--kv-memory", "4GiB"]
    profiler = cProfile.Profile()
    if profile is not None:
        profiler.enable()
    try:
        penstock()
    finally:
        profiler.disable()
        if profile is not None:
            profiler.dump_stats(profile)


def measure(options: argparse.Namespace) -> dict:
    """One daemon's life."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), options.model or STARTER_FOLDER
        settings = vars(options) | {"model": str(model), "body": json.loads(options.body)}
        settings["profile"] = options.profile and str(options.profile)
        (folder / "options.json").write_text(json.dumps(settings))
        daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.control_plane", "serve"],
            env=os.environ | {FOLDER_VARIABLE: name},
            stderr=(folder / "stderr").open("wb"),
        )
        try:
            while b"ready on" not in (folder / "stderr").read_bytes():
                assert daemon.poll() is None, (folder / "stderr").read_text()
                time.sleep(0.1)
            process = psutil.Process(daemon.pid)
            return asyncio.run(asyncio.wait_for(read_streams(folder, settings, process), 600))
        finally:
            daemon.terminate()
            daemon.wait()


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["work"]):
        folder = Path(os.environ[FOLDER_VARIABLE])
        if sys.argv[1] == "serve":
            options = json.loads((folder / "options.json").read_text())
            profile = options["profile"] and Path(options["profile"])
            serve(folder, profile, Path(options["model"]), options["workers"])
            return
        channel_fd = int(sys.argv[sys.argv.index("--channel-fd") + 1])
        try:
            FakeWorker(WorkerChannel(socket.socket(fileno=channel_fd)), folder).run()
        except ChannelClosed:
            return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="only its tokenizer matters")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=1, help="that decode")
    parser.add_argument("--unread", action="store_true", help="no reply is streamed")
    parser.add_argument("--interval-ms", type=float, default=30.0)
    parser.add_argument("--body", default="{}", help="fields beyond those of a plain chat")
    parser.add_argument("--profile", type=Path, help="of the daemon, for pstats")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
