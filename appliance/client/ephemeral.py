"""Run a temporary daemon on a socket in a temporary folder.

Invariant: what was started is stopped when the `with` ends, however it ends; it hears no Ctrl-C.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.client.address import UnixAddress
from appliance.client.calls import Client, ClientError, ReplyError
from appliance.configuration import sources
from appliance.configuration.settings import SETTINGS
from appliance.hub.names import HubName
from engine.errors import AlreadyRunning, PenstockError
from engine.system.python_child import python_command

READY_S = 300.0
STOP_S = 30.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def daemon(*options: str) -> Iterator[UnixAddress]:
    """Run a daemon with these options of `serve`, apart from the user's settings, socket and log.

    Raises:
        PenstockError: it ended before it was ready; what it said last is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        settings = folder / "penstock.toml"
        settings.touch()
        where = UnixAddress(folder / "p.sock")
        own = ["--config", str(settings), "--state-dir", str(folder / "state")]
        said = folder / "stderr"
        with _running(where, [*own, *options], said, _environ()) as process:
            _wait_ready(process, Client(where), said, READY_S)
            yield where


@contextmanager
def users_daemon(
    where: UnixAddress, model: Path | HubName | None, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Run the daemon that `penstock serve` would be, on the socket where clients look.

    Args:
        model: None: the one of the settings.
        on_wait: told again and again why it is not ready yet; empty: it does not answer.

    Raises:
        AlreadyRunning: another daemon was faster.
        PenstockError: it ended before it was ready; what it said last is in the message.
    """
    options = [] if model is None else ["--model", str(model)]
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        said = Path(name) / "stderr"
        with _running(where, options, said, dict(os.environ)) as process:
            _wait_ready(process, Client(where), said, math.inf, on_wait)
            yield


@contextmanager
def _running(
    where: UnixAddress, options: list[str], said: Path, environ: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `penstock serve`, which writes to the file `said`, and stop it in the end."""
    command = python_command("-m", "appliance.cli", "serve", "--socket", str(where.path))
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environ,
            preexec_fn=_end_with_parent,
            start_new_session=True,  # Ctrl-C is the command's, which then stops it
        )
    try:
        yield process
    finally:
        _stop(process)


def _end_with_parent() -> None:
    """Ask the kernel to stop this process when its parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environ() -> dict[str, str]:
    left_out = {sources.variable(name) for name in SETTINGS} | {"PENSTOCK_API_KEY"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _wait_ready(
    process: subprocess.Popen[bytes],
    client: Client,
    stderr: Path,
    ready_s: float,
    on_wait: Callable[[str], None] = lambda _: None,
) -> None:
    end_s = time.monotonic() + ready_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise _not_started(stderr.read_text(errors="replace"), process.returncode)
        try:
            client.get("/ready")
        except ClientError as error:  # not listening yet, or still loading
            on_wait(error.what if isinstance(error, ReplyError) else "")
            time.sleep(_POLL_S)
        else:
            return
    raise PenstockError(
        f"the daemon was not ready within {ready_s:.0f} s",
        hint="is the machine busy? `penstock serve` in a terminal shows its progress",
    )


def _not_started(said: str, code: int) -> PenstockError:
    """Make an error of the daemon's last output, which may end with a hint."""
    lines = said.strip().splitlines() or [f"exit code {code}"]
    hint = lines.pop().removeprefix("hint: ") if lines[-1].startswith("hint: ") else ""
    problem = lines[-1].removeprefix("penstock: ") if lines else f"exit code {code}"
    kind = AlreadyRunning if code == AlreadyRunning.exit_code else PenstockError
    error = kind(f"the daemon did not start: {problem}", hint=hint)
    error.exit_code = code if code > 0 else PenstockError.exit_code
    return error


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
