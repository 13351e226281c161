"""All that a report of a problem needs, in one file: stacks too, but no prompt, no reply, no key.

Owns: the file in the state folder that every process of a daemon writes its stacks to; what goes
into it, and what is taken out of that.
Invariant: what cannot be had is said in its place; nothing else is missing for it. Only numbers,
names and times of requests are in it, from columns that are named here.
Never: asks the daemon to change anything; needs it to answer, or to run.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import platform
import re
import signal
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from appliance.client import Client
from appliance.configuration import config
from appliance.doctor.gpu_checks import Finding
from appliance.http.access import KEY_PREFIX
from appliance.log.query import EventQuery, RowQuery, Span, log_time, read_events, read_rows
from appliance.log.writer import write_recording
from engine.errors import FileError, PenstockError

# Where the daemon and its workers stand, also when they hang: stacks, written when a signal asks.
# Invariant: only a process that waits for the signal is sent it; what does not answer is shown as
# the kernel sees it. A stack names functions and lines, never a value.
# Never: ends a process, or asks one of another daemon.


SIGNAL = signal.SIGUSR1
FILE_NAME = "stacks"
PATIENCE_S = 2.0
"""For an answer, which takes milliseconds if it comes."""
_SETTLED_S = 0.1
_POLL_S = 0.02


def wait_for_signal(state_dir: Path) -> int:
    """Write this process's stacks to the file whenever SIGNAL comes; the open file, for workers."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(state_dir / FILE_NAME, flags, 0o600)
    faulthandler.register(SIGNAL, fd, all_threads=True)
    return fd


def daemon_pid(state_dir: Path) -> int | None:
    """The pid of the daemon that has the folder; None if none has."""
    try:
        # what is no file is not waited for
        fd = os.open(state_dir / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as lock:
            pid = int(lock.read(20).split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return pid if _field(pid, "Name") is not None else None


def stacks(state_dir: Path) -> str:
    """Stacks of the daemon and of its workers, each beneath its process's name.

    Raises:
        PenstockError: no daemon runs, or its processes are another user's.
    """
    daemon = daemon_pid(state_dir)
    if daemon is None:
        raise PenstockError("no daemon runs on this state folder", where=str(state_dir))
    parts = []
    for pid in [daemon, *_children(daemon)]:
        state = _field(pid, "State") or "gone"
        parts.append(f"== {_field(pid, 'Name')}, pid {pid}, {state}\n{_stacks_of(pid, state_dir)}")
    return "\n".join(parts)


def _stacks_of(pid: int, state_dir: Path) -> str:
    path = state_dir / FILE_NAME
    caught = int(_field(pid, "SigCgt") or "0", 16)
    if not caught >> (SIGNAL - 1) & 1:
        return f"it does not wait for {SIGNAL.name}\n{_threads(pid)}"
    before = path.stat().st_size
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return "it is gone\n"
    except PermissionError as error:
        hint = "run it as the user of the daemon, or as root"
        raise PenstockError("may not ask for its stacks", where=f"pid {pid}", hint=hint) from error
    said = _answer(path, before)
    return said or f"no answer within {PATIENCE_S:g} s\n{_threads(pid)}"


def _answer(path: Path, before: int) -> str:
    """What is written behind `before`, once nothing more comes."""
    now = time.monotonic()
    deadline, settled_at, size = now + PATIENCE_S, now + PATIENCE_S, before
    while (now := time.monotonic()) < min(deadline, settled_at):
        time.sleep(_POLL_S)
        if (grown := path.stat().st_size) != size:
            size, settled_at = grown, now + _SETTLED_S
    with path.open("rb") as file:
        file.seek(before)
        return file.read(size - before).decode(errors="replace")


def _threads(pid: int) -> str:
    """What the kernel says of each thread: its name, its state, and where in the kernel it is."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text()
        except OSError:
            continue
        lines.append(f"  thread {task.name} {name}: state {state}, in {where or '-'}\n")
    return "".join(lines)


def _children(pid: int) -> list[int]:
    processes = (int(each.name) for each in Path("/proc").glob("[0-9]*"))
    return sorted(each for each in processes if _field(each, "PPid") == str(pid))


def _field(pid: int, name: str) -> str | None:
    """A line of /proc/PID/status; None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.partition(":\t")[::2] for line in text.splitlines())
    return fields.get(name)


# --------------------------------------------------------------------------------------------------


NUM_EVENTS = 1000
NUM_REQUESTS = 200
RECORDED_S = 600
"""Of the last frames that were recorded."""
FOLDER = "penstock-report"
_LEFT_OUT = ("client_rid", "peer_pid")
"""Of a row: what a client has written itself, and what helps nobody."""
_KEYS = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{20,}}")
_SECRETS = ("PENSTOCK_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def write_bundle(
    path: Path,
    settings: dict[str, str | None],
    findings: Iterable[Finding],
    client: Callable[[], Client],
) -> list[str]:
    """Write the report, for its owner alone; what is in it, and what could not be had.

    Args:
        path: a new file, a gzipped tar.
        settings: as the flags of serve.
        findings: doctor's.
        client: of the daemon that the command would ask.

    Raises:
        PenstockError: the file is there already, or cannot be written.
    """
    parts: dict[str, Callable[[], object]] = {
        "versions.json": _versions,
        "findings.json": lambda: [asdict(each) for each in findings],
        "settings.json": lambda: _settings(settings),
        "state.json": lambda: client().get("/v1/penstock/state"),
        "events.json": lambda: read_events(_log(settings), EventQuery(limit=NUM_EVENTS)),
        "requests.json": lambda: _requests(settings),
        "recording.penstock": lambda: _recording(settings),
        "stacks.txt": lambda: stacks(config.load_asked(settings).state_dir),
    }
    said = []
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, make in parts.items():
                data, problem = _made(make)
                info = tarfile.TarInfo(f"{FOLDER}/{name}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(data))
                said.append(f"{name}: {problem}" if problem else name)
    except OSError as error:
        hint = "name a file that is not there yet, in a folder of yours"
        raise FileError("cannot write", error, where=str(path), hint=hint) from error
    return said


def _made(make: Callable[[], object]) -> tuple[bytes, str | None]:
    """A part; where it could not be had, why."""
    try:
        made = make()
    except (PenstockError, OSError) as error:
        text = _without_secrets(str(error), os.environ)
        return f"{text}\n".encode(), f"not there: {text}"
    if isinstance(made, bytes):
        return made, None
    text = made if isinstance(made, str) else json.dumps(made, indent=1)
    return _without_secrets(text, os.environ).encode(), None


def _without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Nothing here quotes a key; an error message or a path still might."""
    for name in _SECRETS:
        if value := environ.get(name):
            text = text.replace(value, f"[{name}]")
    return _KEYS.sub("[key]", text)


def _log(settings: dict[str, str | None]) -> Path:
    return config.load_asked(settings).log_path


def _versions() -> dict[str, Any]:
    names = sorted({each.name for each in metadata.distributions() if each.name})
    uname = platform.uname()
    return {
        "made_at": log_time(datetime.now(UTC)),
        "python": platform.python_version(),
        "kernel": f"{uname.system} {uname.release} {uname.machine}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu(),
        "packages": {name: metadata.version(name) for name in names},
    }


def _cpu() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), None)


def _settings(settings: dict[str, str | None]) -> list[dict[str, object]]:
    found = config.explain(settings)
    return [{"name": f.name, "value": str(f.value), "origin": f.origin} for f in found]


def _requests(settings: dict[str, str | None]) -> list[dict[str, object]]:
    rows = read_rows(_log(settings), RowQuery(limit=NUM_REQUESTS))
    return [{k: v for k, v in row.items() if k not in _LEFT_OUT} for row in rows]


def _recording(settings: dict[str, str | None]) -> bytes:
    """The last frames, with their requests and events, as `penstock top --replay` shows them."""
    since = log_time(datetime.now(UTC) - timedelta(seconds=RECORDED_S))
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "recording"
        path.touch(0o600)
        write_recording(_log(settings), path, Span(since=since))
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            left_out = ", ".join(f"{name} = NULL" for name in _LEFT_OUT)
            db.execute(f"UPDATE requests SET {left_out}")
            db.execute("VACUUM")  # so that they are not in a free page either
        return path.read_bytes()
