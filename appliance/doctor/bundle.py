"""Collect a problem report in one file, without prompts, replies or keys.

Invariant: an unavailable part is replaced by the reason, and the others are complete. Requests
contribute only numbers, names and times, from columns that are named here.
Never: asks the daemon to change anything; needs it to answer, or to run.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
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

from appliance.client.calls import Client
from appliance.configuration import client_settings
from appliance.daemon.process.stacks import stacks
from appliance.doctor.finding import Finding
from appliance.http.api_keys import KEY_PREFIX
from appliance.observe.log.query import EventQuery, RowQuery, Span, log_time
from appliance.observe.log.reader import read_events, read_rows
from appliance.observe.log.recording_copy import write_recording
from engine.errors import PenstockError

NUM_EVENTS = 1000
NUM_REQUESTS = 200
RECORDED_S = 600
"""Seconds of recorded frames to include."""
FOLDER = "penstock-report"
_LEFT_OUT = ("client_rid", "peer_pid")
"""Columns left out: the client's own text, and a useless one."""
_KEYS = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{20,}}")
_SECRETS = ("PENSTOCK_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def write_bundle(
    path: Path,
    settings: dict[str, str | None],
    findings: Iterable[Finding],
    client: Callable[[], Client],
) -> list[str]:
    """Write the report; return its parts and the missing ones.

    Args:
        path: a private file, which becomes a gzipped tar.
        settings: as the flags of serve.
        client: of the daemon that the command would ask.

    Raises:
        OSError: the file cannot be written.
    """
    parts: dict[str, Callable[[], object]] = {
        "versions.json": _versions,
        "findings.json": lambda: [asdict(each) for each in findings],
        "settings.json": lambda: _settings(settings),
        "state.json": lambda: client().get("/v1/penstock/state"),
        "events.json": lambda: read_events(_log(settings), EventQuery(limit=NUM_EVENTS)),
        "requests.json": lambda: _requests(settings),
        "recording.penstock": lambda: _recording(settings),
        "stacks.txt": lambda: stacks(client_settings.load_asked(settings).state_dir),
    }
    said = []
    with tarfile.open(path, mode="w:gz") as archive:
        for name, make in parts.items():
            data, problem = _made(make)
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
            archive.addfile(info, io.BytesIO(data))
            said.append(f"{name}: {problem}" if problem else name)
    return said


def _made(make: Callable[[], object]) -> tuple[bytes, str | None]:
    """Make a part, or explain why it is unavailable."""
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
    """Remove keys that an error message or a path might quote."""
    for name in _SECRETS:
        if value := environ.get(name):
            text = text.replace(value, f"[{name}]")
    return _KEYS.sub("[key]", text)


def _log(settings: dict[str, str | None]) -> Path:
    return client_settings.load_asked(settings).log_path


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
    found = client_settings.explain(settings)
    return [{"name": f.name, "value": str(f.value), "origin": f.origin} for f in found]


def _requests(settings: dict[str, str | None]) -> list[dict[str, object]]:
    rows = read_rows(_log(settings), RowQuery(limit=NUM_REQUESTS))
    return [{k: v for k, v in row.items() if k not in _LEFT_OUT} for row in rows]


def _recording(settings: dict[str, str | None]) -> bytes:
    """Record the last frames, with their requests and events, for `penstock top --replay`."""
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
