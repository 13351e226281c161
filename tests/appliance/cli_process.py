"""The command as a process of its own, for tests."""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

from tests.daemons import QUICK_TORCH

ROOT = Path(__file__).parents[2]
PYTHON_PATH = f"{ROOT}:{QUICK_TORCH}"
PROMPT = ">>> "
TIMEOUT_S = 180


def user_environ(home: Path) -> dict[str, str]:
    """A user with nothing configured but the socket."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PENSTOCK_SOCKET": str(home / "p.sock"),
        "PENSTOCK_STATE_DIR": str(home / "state"),
        "PYTHONPATH": PYTHON_PATH,
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "appliance.cli", *arguments]


def penstock(
    environ: dict[str, str], *arguments: str, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; in a fork, unless its interpreter needs settings of its own."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin)
        given.seek(0)
        if _has_own_interpreter(environ):
            streams = {"stdin": given, "stdout": out, "stderr": err}
            code = subprocess.run(
                command(*arguments), env=environ, cwd=cwd, timeout=TIMEOUT_S, check=False, **streams
            ).returncode
        else:
            fds = [given.fileno(), out.fileno(), err.fileno()]
            code = fork({"arguments": arguments, "environ": environ, "cwd": cwd}, fds)
        out.seek(0)
        err.seek(0)
        said = (out.read().decode(), err.read().decode())
    return subprocess.CompletedProcess(command(*arguments), code, *said)


def _has_own_interpreter(environ: dict[str, str]) -> bool:
    """Whether Python itself reads settings here that the forking process has not."""
    others = environ.keys() - {"PYTHONPATH"}
    is_usual = environ.get("PYTHONPATH") == PYTHON_PATH
    return not is_usual or any(name.startswith(("PYTHON", "LANG", "LC_")) for name in others)


def fork(asked: dict[str, Any], fds: list[int]) -> int:
    """Have the command forked; return its exit code."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            packet = json.dumps(asked, default=str).encode()
            socket.send_fds(_zygote(os.getpid()), [packet], [*fds, theirs.fileno()])
        ours.settimeout(TIMEOUT_S)
        pid = int(ours.recv(16))
        try:
            return int(ours.recv(16))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise


@functools.cache
def _zygote(_pid: int) -> socket.socket:
    """Start the process that forks, once per process of tests; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.appliance.cli_zygote", str(theirs.fileno())],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": PYTHON_PATH},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(_end, ours, process)
    return ours


def _end(zygote: socket.socket, process: subprocess.Popen[bytes]) -> None:
    zygote.close()
    process.wait()


def start(environ: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


class Typist:
    """A person at a terminal, who waits for what she has asked for before she goes on."""

    def __init__(self, environ: dict[str, str], *arguments: str, prompt: str = PROMPT) -> None:
        self._prompt = prompt
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command(*arguments),
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._seen = ""
        self.shown = ""
        """All that has come, from the first prompt on."""
        self.exit_code: int | None = None

    def __enter__(self) -> Typist:
        self._wait_for(self._prompt)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._process.kill()
        self.exit_code = self._process.wait(120)
        os.close(self._ours)

    def type(self, text: str, *, shows: str = "") -> None:
        """Type lines; wait for something in the answer, and for the prompt after it."""
        self.press(text.encode() + b"\n", shows=shows)
        if shows:
            self._seen = self._seen.partition(shows)[2]
            self._wait_for(self._prompt)

    def press(self, keys: bytes, *, shows: str = "") -> None:
        """Press keys; wait for what they bring."""
        self._seen = ""
        os.write(self._ours, keys)
        if shows:
            self._wait_for(shows)

    def interrupt(self, *, shows: str) -> None:
        """Press Ctrl-C, and again if it was not heard.

        Between the prompt that it writes and the wait for a key, Python's readline loses a signal.
        """
        for _ in range(10):
            self.press(b"\x03")
            if select.select([self._ours], [], [], 3)[0]:
                break
        self._wait_for(shows)

    def _wait_for(self, text: str) -> None:
        while text not in self._seen:
            ready, _, _ = select.select([self._ours], [], [], 120)
            assert ready, f"{text!r} did not come; there is {self._seen!r}"
            new = os.read(self._ours, 4096).decode(errors="replace")
            self._seen += new
            self.shown += new


def run_on_terminal(environ: dict[str, str], *arguments: str, exit_code: int = 0) -> bytes:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(*arguments), env=environ, stdin=theirs, stdout=theirs) as running:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how Linux says that the last writer is gone
                break
            shown += part
    os.close(ours)
    assert running.returncode == exit_code
    return shown
