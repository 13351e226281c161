"""The command as a process of its own, for tests."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMPT = ">>> "


def user_environ(home: Path) -> dict[str, str]:
    """A user with nothing configured but the socket."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PENSTOCK_SOCKET": str(home / "p.sock"),
        "PENSTOCK_STATE_DIR": str(home / "state"),
        "PYTHONPATH": str(ROOT),
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "appliance.cli", *arguments]


def penstock(
    environ: dict[str, str], *arguments: str, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        command(*arguments),
        env=environ,
        input=stdin,
        capture_output=True,
        timeout=180,
        check=False,
        cwd=cwd,
    )
    return subprocess.CompletedProcess(
        ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode()
    )


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
