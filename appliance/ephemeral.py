"""A daemon of one's own for a while: on a socket in a temporary folder, gone afterwards.

Owns: its process and its folder.
Invariant: what was started is stopped when the `with` ends, however it ends; the user's own daemon,
configuration and log are not touched.
Never: listens on TCP.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.client import Client, ClientError
from appliance.configuration import config
from appliance.configuration.address import UnixAddress
from appliance.configuration.settings import SETTINGS
from engine.errors import PenstockError

READY_S = 300.0
STOP_S = 30.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def daemon(*options: str) -> Iterator[UnixAddress]:
    """A ready daemon with these options of `serve`; settings come from them and nowhere else.

    Raises:
        PenstockError: it ended before it was ready; what it said last is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        settings = folder / "penstock.toml"
        settings.touch()
        where = UnixAddress(folder / "p.sock")
        command = [sys.executable, "-m", "appliance.cli", "serve", "--config", str(settings)]
        command += ["--socket", str(where.path), "--state-dir", str(folder / "state"), *options]
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=_environ(),
                preexec_fn=_end_with_parent,
            )
        try:
            _wait_ready(process, Client(where), folder / "stderr")
            yield where
        finally:
            _stop(process)


def _end_with_parent() -> None:
    """In the daemon's process: be told to stop when this one is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environ() -> dict[str, str]:
    left_out = {config.variable(name) for name in SETTINGS} | {"PENSTOCK_API_KEY"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _wait_ready(process: subprocess.Popen[bytes], client: Client, stderr: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise _not_started(stderr.read_text(errors="replace"), process.returncode)
        try:
            client.get("/ready")
        except ClientError:  # not listening yet, or still loading
            time.sleep(_POLL_S)
        else:
            return
    raise PenstockError(
        f"the daemon was not ready within {READY_S:.0f} s",
        hint="is the machine busy? `penstock serve` in a terminal shows how far it comes",
    )


def _not_started(said: str, code: int) -> PenstockError:
    """The daemon's own last words, which end with a hint if it has one."""
    lines = said.strip().splitlines() or [f"exit code {code}"]
    hint = lines.pop().removeprefix("hint: ") if lines[-1].startswith("hint: ") else ""
    problem = lines[-1].removeprefix("penstock: ") if lines else f"exit code {code}"
    return PenstockError(f"the daemon did not start: {problem}", hint=hint)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
