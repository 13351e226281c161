"""What a token costs the daemon in CPU time: the real one between a fake worker and lean clients.

usage: python -m tests.benchmarks.control_plane [--model FOLDER] [--streams 200] [--steps 300]
       [--interval-ms 30] [--body JSON] [--profile FILE]

The worker computes nothing: it sends one token for each stream, every INTERVAL_MS. It waits until
each client has read the last one, so that on a busy machine steps come later but never two at once,
and what is counted stays the cost of one step. Counted is the CPU time of the daemon's process
alone. What the open streams cost each second while no token comes (frames, the look at every
connection) is measured first, and taken off; the share of a core is that and the tokens' at the
full rate.
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
from pathlib import Path

import psutil

from appliance.boot import STARTER_FOLDER
from appliance.cli import main as penstock
from engine.channel import WorkerChannel
from engine.errors import ChannelClosed
from engine.messages import (
    Admit,
    Go,
    Ready,
    Rehearse,
    Rehearsed,
    Release,
    SequenceStep,
    Setup,
    Stepped,
    WeightsLoaded,
)
from engine.tokenizer import Tokenizer

NUM_WARM_UP_STEPS = 10
POLL_S = 0.2
QUIET_S = 5.0
TEXT = "The penstock leads the water from the lake down to the turbine, and asks no questions. "
FOLDER_VARIABLE = "CONTROL_PLANE_FOLDER"
"""Where the run's parts find each other."""


class FakeWorker:
    """Speaks engine.messages; its output is TEXT, over and over."""

    def __init__(self, channel: WorkerChannel, folder: Path) -> None:
        self._channel = channel
        self._options = json.loads((folder / "options.json").read_text())
        self._rounds = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._rounds.bind(str(folder / "rounds"))
        self._running: dict[int, tuple[Admit, int]] = {}
        """The Admit, and how many output tokens there are."""

    def run(self) -> None:
        """Load nothing; step once all streams are there, and then as often as they have read."""
        (setup,) = self._channel.receive(wait=True)
        assert isinstance(setup, Setup)
        tokenizer = Tokenizer.from_folder(Path(setup.model_dir))
        self._output = tokenizer.encode(TEXT, add_special_tokens=False)
        self._channel.send(WeightsLoaded())
        assert self._channel.receive(wait=True) == [Go()]
        self._channel.send(Ready("none"))
        due = 0.0
        while True:
            has_all = len(self._running) == self._options["streams"]
            self._take(wait=not has_all)
            if has_all and select.select([self._rounds], [], [], POLL_S)[0]:
                self._rounds.recv(16)
                time.sleep(max(due - time.monotonic(), 0.0))
                due = time.monotonic() + self._options["interval_ms"] / 1e3
                self._step(list(self._running))

    def _take(self, *, wait: bool) -> None:
        """Take commands; a new sequence has its first token at once."""
        new = []
        for command in self._channel.receive(wait=wait):
            if isinstance(command, Admit):
                self._running[command.seq_id] = command, 0
                new.append(command.seq_id)
            elif isinstance(command, Rehearse):
                self._channel.send(Rehearsed(command.rehearsal_id, []))
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
            token_id = self._output[num_output % len(self._output)]
            entries.append(self._entry(admit, num_output, token_id))
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


class Rounds:
    """Counts what clients have read; a round is over when each has read something."""

    def __init__(self, folder: Path, options: dict, daemon: psutil.Process) -> None:
        self._options = options
        self._daemon = daemon
        self._worker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._worker.connect(str(folder / "rounds"))
        self._num_read = 0
        self._num_rounds = 0
        self._quiet_share = 0.0
        self.result: asyncio.Future[dict] = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        """One client has read its event of this step."""
        self._num_read += 1
        if self._num_read % self._options["streams"]:
            return
        self._num_rounds += 1
        if self._num_rounds == NUM_WARM_UP_STEPS:
            self._begin = self._now()
            asyncio.get_running_loop().call_later(QUIET_S, self._end_quiet)
        elif self._num_rounds == NUM_WARM_UP_STEPS + self._options["steps"]:
            self.result.set_result(self._cost())
        else:
            self._worker.send(b"next")

    def _end_quiet(self) -> None:
        cpu_s, wall_s = self._since_begin()
        self._quiet_share = cpu_s / wall_s
        self._begin = self._now()
        self._worker.send(b"next")

    def _since_begin(self) -> tuple[float, float]:
        (cpu_s, wall_s), now = self._begin, self._now()
        return now[0] - cpu_s, now[1] - wall_s

    def _now(self) -> tuple[float, float]:
        times = self._daemon.cpu_times()
        return times.user + times.system, time.monotonic()

    def _cost(self) -> dict:
        cpu_s, wall_s = self._since_begin()
        num_tokens = self._options["steps"] * self._options["streams"]
        token_us = (cpu_s - self._quiet_share * wall_s) * 1e6 / num_tokens
        tokens_per_s = self._options["streams"] * 1e3 / self._options["interval_ms"]
        return {
            "cpu_ms_per_1000_tokens": round(token_us, 1),
            "quiet_share_of_a_core": round(self._quiet_share, 3),
            "share_of_a_core": round(self._quiet_share + token_us * tokens_per_s / 1e6, 3),
            "at_tokens_per_s": round(tokens_per_s),
            "measured_at_tokens_per_s": round(num_tokens / wall_s),
        }


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

    def connection_lost(self, exc) -> None:
        if not self._rounds.result.done():
            self._rounds.result.set_exception(exc or ConnectionError("a stream has ended"))


async def read_streams(folder: Path, options: dict, daemon: psutil.Process) -> dict:
    """Open all streams, and read them until the cost is known."""
    num_steps = NUM_WARM_UP_STEPS + options["steps"]
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_steps + 10,
            "stream": True,
            **options["body"],
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    rounds = Rounds(folder, options, daemon)
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(options["streams"]):
        transport, _ = await loop.create_unix_connection(
            lambda: Client((head + body).encode(), rounds), str(folder / "p.sock")
        )
        transports.append(transport)
    try:
        return await rounds.result
    finally:
        for transport in transports:
            transport.abort()


def serve(folder: Path, profile: Path | None, model: Path) -> None:
    """`penstock serve`, whose workers are this file."""
    wrapper = folder / "python"
    wrapper.write_text(
        f'#!/bin/sh\nshift 3\nexec {sys.executable} -m tests.benchmarks.control_plane work "$@"\n'
    )
    wrapper.chmod(0o755)
    sys.executable = str(wrapper)
    sys.argv = ["penstock", "serve", "--roles", "colocated", "--model", str(model)]
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
            serve(folder, profile, Path(options["model"]))
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
    parser.add_argument("--interval-ms", type=float, default=30.0)
    parser.add_argument("--body", default="{}", help="fields beyond those of a plain chat")
    parser.add_argument("--profile", type=Path, help="of the daemon, for pstats")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
