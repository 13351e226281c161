"""The command as a process of its own, for tests."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
        timeout=60,
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


def run_on_terminal(environ: dict[str, str], *arguments: str) -> bytes:
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
    assert running.returncode == 0
    return shown
