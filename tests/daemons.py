"""A real daemon in a process of its own, with its own socket and state, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil

from appliance.http.api_keys import new_key

ARMS = {
    "alias": ["--roles", "static", "--transport", "alias"],
    "shm": ["--roles", "static", "--transport", "shm"],
    "colocated": ["--roles", "colocated"],
    "elastic": ["--roles", "elastic"],
}
ALONE = ARMS["colocated"]
"""For tests to which roles do not matter: each worker less is a second and a half less."""
MANY = {
    "1x1": ["--roles", "static", "--transport", "peer"],
    "2x1": ["--roles", "static", "--transport", "peer", "--place", "2x1 forced"],
    "1x2": ["--roles", "elastic", "--transport", "shm", "--place", "1x2 forced"],
    "2x2": ["--roles", "elastic", "--transport", "peer", "--place", "2x2 forced"],
}
"""Pools of the workers' own, and several workers of a role, who may have to share cores."""
DOORS = ("socket", "tcp")
LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1}
"""A reply that takes its time: drawn, since speculation shortens repetition."""
STEP_BY_STEP = ["--speculate", "off"]
"""For tests that need replies of equal length to last equally long, or a short one to last."""
READY_S = 180.0
QUICK_TORCH = str(Path(__file__).parent / "quick_torch")
"""A folder for PYTHONPATH: interpreters there import torch in four fifths of the time."""
LOADING_POLL_S = 0.1
"""Asking takes both sides a few milliseconds, which loading needs more."""


class Daemon:
    """`penstock serve` as an operator would start it."""

    program = ("-m", "appliance.cli")
    python_path = ""
    ready_s = READY_S

    def __init__(
        self, folder: Path, *args: str, model: Path | None = None, env=None, preexec_fn=None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.socket = folder / "p.sock"
        self.stderr_path = folder / "stderr.txt"
        command = [sys.executable, *self.program, "serve"]
        own = {"--socket": self.socket, "--state-dir": folder / "state", "--ssd-cache": "off"}
        for flag, value in own.items():
            command += [] if flag in args else [flag, str(value)]  # but where it is what is tested
        if model is not None:
            command += ["--model", str(model)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        names = ("CACHE_HOME", "CONFIG_HOME", "RUNTIME_DIR")
        dirs = {f"XDG_{name}": str(folder / name.lower()) for name in names}
        inherited |= {"PYTHONPATH": self.python_path} if self.python_path else {}
        self.env = {**inherited, **dirs, "PENSTOCK_MEASURE": "0", **(env or {})}
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, *args],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=self.env,
                preexec_fn=preexec_fn,
            )
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket), verify=False),
            base_url="http://localhost",
            timeout=120,
        )

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait_ready(self) -> Daemon:
        self.wait_for(self.is_listening, self.ready_s, LOADING_POLL_S)
        self.wait_for(self.is_ready, self.ready_s, LOADING_POLL_S)
        return self

    def is_ready(self) -> bool:
        try:
            return self.get_status("/ready") == 200
        except httpx.TransportError:  # it has ended, perhaps just now: the waiter says why
            return False

    @property
    def tcp_url(self) -> str:
        """Where it listens on TCP, as it says when it is ready."""
        pattern = r"ready on .*(http://127\.0\.0\.1:\d+)"
        return self.wait_for(lambda: re.search(pattern, self.stderr)).group(1)

    def official_client(self, key: str | None = None) -> openai.OpenAI:
        """OpenAI's own client: on the socket, or on TCP if it has a key."""
        transport = httpx.HTTPTransport(uds=str(self.socket) if key is None else None)
        return openai.OpenAI(
            base_url=f"{'http://localhost' if key is None else self.tcp_url}/v1",
            api_key=key or "-",
            max_retries=0,
            http_client=httpx.Client(transport=transport, timeout=120),
        )

    def is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def get_status(self, path: str) -> int:
        return self.http.get(path).status_code

    def wait_for(self, condition, timeout_s: float = 120.0, poll_s: float = 0.02):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"the daemon ended:\n{self.stderr}"
            assert time.monotonic() < deadline, f"not in {timeout_s} s:\n{self.stderr}"
            time.sleep(poll_s)
        return value

    def state(self) -> dict:
        return self.http.get("/v1/penstock/state").json()

    def fresh_state(self) -> dict:
        """A frame made after this call."""
        seq = self.state()["seq"]
        return self.wait_for(lambda: (s := self.state())["seq"] > seq and s)

    def worker_pid(self, name: str) -> int:
        """A worker's process, once it has one."""

        def pid() -> int | None:
            return {w["name"]: w["pid"] for w in self.state()["workers"]}[name]

        return self.wait_for(pid)

    def complete(self, prompt, **fields) -> dict:
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, prompt, **fields):
        """Yield the data of each event of a streamed completion."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "return_token_ids": True}
        with self.http.stream("POST", "/v1/completions", json={**body, **fields}) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def assert_all_free(self) -> None:
        """Nobody uses a block, but for what is cached, and the books add up."""

        def is_free() -> bool:
            pools = self.state()["pools"]
            return all(pool["num_blocks"] == pool["free"] + pool["cached"] for pool in pools)

        self.wait_for(is_free)
        self.fresh_state()
        # a worker that was killed may still be loading: ready is what comes next, never a violation
        self.wait_for(lambda: self.get_status("/ready") == 200)
        assert "invariant.violated" not in self.stderr

    def requests(self) -> list[dict]:
        """Live ones, then those that have ended lately."""
        return self.http.get("/v1/requests").json()["data"]

    def num_live(self) -> int:
        return sum(row["phase"] != "finished" for row in self.requests())

    def wait_live(self, count: int = 1) -> None:
        self.wait_for(lambda: self.num_live() >= count)

    def log_rows(self, limit: int = 1000) -> list[dict]:
        return self.http.get(f"/v1/penstock/log?limit={limit}").json()["data"]

    def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"did not stop:\n{self.stderr}") from None
        self.http.close()
        return self.process.returncode

    @property
    def pid(self) -> int:
        """The daemon itself; `process` is its keeper, unless NOTIFY_SOCKET names another one."""
        for one in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "serve" in one.cmdline():
                    return one.pid
        return self.process.pid

    def kill(self) -> None:
        """End everything by SIGKILL, and wait: the daemon ends a moment after its keeper."""
        is_over = self.process.poll() is not None
        left = [] if is_over else psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(left, READY_S)
        self.http.close()


def make_keys(folder: Path, **role_by_name: str) -> tuple[Path, dict[str, str]]:
    """A file of fresh keys, and the keys by name."""
    keys, lines = {}, []
    for name, role in role_by_name.items():
        keys[name], line = new_key(name, role)
        lines.append(line)
    path = folder / "api-keys"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path, keys


@contextlib.contextmanager
def open_by_both_doors(
    folder: Path, model: Path
) -> Iterator[tuple[Daemon, dict[str, openai.OpenAI]]]:
    """A daemon, and clients on the socket and on TCP; all must be free when they are done."""
    path, keys = make_keys(folder, laptop="user", wall="viewer")
    daemon = Daemon(folder, "--listen", "127.0.0.1:0", "--api-keys", str(path), model=model)
    daemon.wait_ready()
    daemon.keys = keys
    with daemon.official_client() as on_socket, daemon.official_client(keys["laptop"]) as on_tcp:
        yield daemon, dict(zip(DOORS, (on_socket, on_tcp), strict=True))
    daemon.assert_all_free()
    assert daemon.stop() == 0


def is_alive(pid: int) -> bool:
    """False once the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
