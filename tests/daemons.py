"""A real daemon in a process of its own, with its own socket and state, for end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ARMS = {
    "alias": ["--roles", "static", "--transport", "alias"],
    "shm": ["--roles", "static", "--transport", "shm"],
    "colocated": ["--roles", "colocated"],
}
READY_S = 60.0


class Daemon:
    """`penstock serve` as an operator would start it."""

    def __init__(self, folder: Path, *args: str, model: Path | None = None, env=None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.socket = folder / "p.sock"
        self.stderr_path = folder / "stderr.txt"
        command = [sys.executable, "-m", "appliance.cli", "serve", "--socket", str(self.socket)]
        command += ["--state-dir", str(folder / "state")]
        if model is not None:
            command += ["--model", str(model)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
        self.env = {**inherited, **own, **(env or {})}
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, *args], stdin=subprocess.DEVNULL, stderr=stderr, env=self.env
            )
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)),
            base_url="http://localhost",
            timeout=120,
        )

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait_ready(self) -> Daemon:
        self.wait_for(self.is_listening, READY_S)
        self.wait_for(lambda: self.get_status("/ready") == 200, READY_S)
        return self

    def is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def get_status(self, path: str) -> int:
        return self.http.get(path).status_code

    def wait_for(self, condition, timeout_s: float = 30.0):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"the daemon ended:\n{self.stderr}"
            assert time.monotonic() < deadline, f"not in {timeout_s} s:\n{self.stderr}"
            time.sleep(0.02)
        return value

    def state(self) -> dict:
        return self.http.get("/v1/penstock/state").json()

    def fresh_state(self) -> dict:
        """A frame made after this call."""
        seq = self.state()["seq"]
        return self.wait_for(lambda: (s := self.state())["seq"] > seq and s)

    def worker_pid(self, name: str) -> int:
        workers = {w["name"]: w["pid"] for w in self.fresh_state()["workers"]}
        return workers[name]

    def complete(self, prompt, **fields) -> dict:
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, prompt, **fields):
        """Yield the data of each event of a streamed completion."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "return_token_ids": True}
        with self.http.stream("POST", "/v1/completions", json={**body, **fields}) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def assert_all_free(self) -> None:
        """The pools are entirely free (granted ring slots aside) and the books add up."""

        def is_free() -> bool:
            pools = self.state()["pools"]
            return all(
                p["num_blocks"] == p["free"] + (p["reserved"] if p["name"] == "ring" else 0)
                for p in pools
            )

        self.wait_for(is_free, 20)
        self.fresh_state()
        assert self.http.get("/ready").json().get("reason") is None
        assert self.get_status("/ready") == 200
        assert "invariant.violated" not in self.stderr

    def log_rows(self, limit: int = 1000) -> list[dict]:
        return self.http.get(f"/v1/penstock/log?limit={limit}").json()["data"]

    def stop(self, timeout_s: float = 30.0) -> int:
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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()


def is_alive(pid: int) -> bool:
    """False once the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
