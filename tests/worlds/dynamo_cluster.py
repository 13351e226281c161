"""Appliances behind NVIDIA Dynamo's frontend, each process real, in a network namespace of its own.

Some of Dynamo's ports listen on all interfaces, so nothing of it runs where others could reach it.
`PENSTOCK_DYNAMO_PYTHON` names a Python that has ai-dynamo and ai-dynamo-runtime, and what Penstock
needs; without it, the one that runs the tests is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PENSTOCK_DYNAMO_PYTHON", sys.executable)
READY_S = 180.0
PATIENCE_S = 120.0
_CLONE_NEWNET = 0x40000000


def lacking() -> str | None:
    """Why Dynamo cannot be run here; None: it can."""
    script = (
        "import importlib.metadata as m, dynamo.frontend, dynamo.llm;"
        "print(m.version('ai-dynamo'), m.version('ai-dynamo-runtime'))"
    )
    found = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=False)
    if found.stdout.split() != ["1.6.1", "1.6.1"]:
        return "needs the wheels ai-dynamo and ai-dynamo-runtime 1.6.1; see PENSTOCK_DYNAMO_PYTHON"
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return "needs a network namespace of its own, which only root may make"
    return None


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """This process, and what it starts, alone with a loopback device."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        libc.setns(before, _CLONE_NEWNET)
        os.close(before)


class Appliance:
    """A daemon and its adapter."""

    def __init__(self, folder: Path, env: dict[str, str], model: Path, *args: str) -> None:
        self.folder = folder
        self._env, self._model, self._args = env, model, args
        self.start_daemon()
        self.start_adapter()

    def start_daemon(self) -> None:
        if hasattr(self, "daemon"):
            self.daemon.http.close()
        self.daemon = Daemon(self.folder, *self._args, model=self._model)

    def start_adapter(self) -> None:
        command = [PYTHON, "-m", "appliance.cli", "worker", "--dynamo"]
        command += ["--host", str(self.folder / "p.sock")]
        command += ["--discovery", f"file:{self._env['DYN_FILE_KV']}"]
        with (self.folder / "adapter.txt").open("ab") as output:
            self.adapter = subprocess.Popen(
                command, cwd=ROOT, env=self._env, stdout=output, stderr=output
            )

    @property
    def told(self) -> str:
        """What the adapter has said."""
        return (self.folder / "adapter.txt").read_text(errors="replace")

    def has_joined(self, times: int = 1) -> bool:
        assert self.adapter.poll() is None, f"the adapter has ended:\n{self.told}"
        return self.told.count("the router may choose this appliance") >= times

    def num_requests(self) -> int:
        """Those that it has taken since its start."""
        return int(self.daemon.fresh_state()["totals"]["accepted"])

    def stop(self) -> None:
        for process in (self.adapter, self.daemon.process):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemon.http.close()


class Cluster:
    """Two appliances behind one frontend; `args` are the daemons' options."""

    def __init__(self, folder: Path, model: Path, *args: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "DYN_"))}
        own = {"DYN_FILE_KV": str(folder / "found"), "DYN_LOG": "warn", "PYTHONPATH": str(ROOT)}
        self.env = {**inherited, **own, "DYN_SELF_HOST_METADATA": "0", "PYTHONUNBUFFERED": "1"}
        self.folder = folder
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self.appliances = [
            Appliance(folder / f"a{number}", self.env, model, *args) for number in range(2)
        ]
        self.start_frontend()

    def start_frontend(self) -> None:
        command = [PYTHON, "-m", "dynamo.frontend", "--discovery-backend", "file"]
        command += ["--request-plane", "tcp", "--event-plane", "zmq", "--migration-limit", "3"]
        command += [
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(self.port),
            "--router-mode",
            "kv",
        ]
        with (self.folder / "frontend.txt").open("ab") as output:
            self.frontend = subprocess.Popen(
                command, cwd=self.folder, env=self.env, stdout=output, stderr=output
            )

    def wait_ready(self) -> Cluster:
        for appliance in self.appliances:
            wait_for(appliance.has_joined)
        wait_for(self.is_serving)
        return self

    def is_serving(self) -> bool:
        """Whether a request would find an appliance."""
        with contextlib.suppress(httpx.TransportError):
            if not self.http.get("/v1/models").json()["data"]:
                return False
            body = {"model": self.model, "prompt": "a", "max_tokens": 1}
            return self.http.post("/v1/completions", json=body).status_code == 200
        return False

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def stop(self) -> None:
        self.http.close()
        for appliance in self.appliances:
            appliance.stop()
        self.frontend.kill()
        self.frontend.wait()


@contextlib.contextmanager
def cluster(folder: Path, model: Path, *args: str) -> Iterator[Cluster]:
    """One that is ready, and gone afterwards."""
    made = Cluster(folder, model, *args)
    try:
        yield made.wait_ready()
    finally:
        made.stop()


def wait_for(condition, limit_s: float = READY_S):
    """What it is once it is true."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} is not true after {limit_s} s")
        time.sleep(0.05)
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
