"""What every verb prints in every format, character for character, at fixed data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.hub.names import STARTER_FOLDER
from tests import golden
from tests.appliance.cli_data import (
    ENDED,
    EVENTS,
    FINISHED,
    FRAME,
    HOSTILE,
    REQUEST,
    ROW,
    USAGE,
    WHOAMI,
)
from tests.appliance.cli_process import penstock, user_environ
from tests.appliance.model_folder import make_model
from tests.worlds.fake_daemon import FakeDaemon

FORMATS = ("table", "wide", "json", "csv")
LINES = ("ps", "log", "show", "status")
"""Verbs whose `ndjson` is looked at: it is the rows of `json` by one piece of code."""
VERBS = {
    "status": ("status",),
    "status-check": ("status", "--check"),
    "ps": ("ps", "-a"),
    "show": ("show", "cmpl-1"),
    "show-live": ("show", "cmpl-2"),
    "whoami": ("whoami",),
    "log": ("log", "-n", "3"),
    "events": ("events",),
    "usage": ("usage",),
    "models-list": ("models", "list", "--dir", "models"),
    "models-show": ("models", "show", "models/tiny"),
    "models-verify": ("models", "verify", "models/tiny"),
}
CASES = [(verb, form) for verb in VERBS for form in FORMATS] + [(verb, "ndjson") for verb in LINES]
EVIL_REQUEST = {**REQUEST, "id": "cmpl-2", "user": HOSTILE, "worker": "@SUM(A1)"}
EVIL_ROW = {**ROW, "id": "cmpl-0", "user": HOSTILE, "ttft_ms": None, "error": HOSTILE}
REPLIES: dict[str, object] = {
    "GET /v1/penstock/state": FRAME,
    "GET /v1/requests": {"data": [REQUEST, EVIL_REQUEST, ENDED]},
    "GET /v1/requests/cmpl-1": FINISHED,
    "GET /v1/requests/cmpl-2": EVIL_REQUEST,
    "GET /v1/penstock/whoami": WHOAMI,
    "GET /v1/penstock/log?limit=3": {"data": [ROW, EVIL_ROW]},
    "GET /v1/penstock/events?limit=20": {"data": EVENTS},
    "GET /v1/penstock/usage?by=user": {"data": USAGE},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the verbs run: a daemon that knows everything above, and two models, one of no use."""
    folder = tmp_path_factory.mktemp("golden")
    make_model(folder / "models" / "tiny")
    (folder / "models" / "broken\x1b[1m").mkdir()
    (folder / "models" / "broken\x1b[1m" / "config.json").write_text("{")
    with FakeDaemon(folder / "p.sock") as daemon:
        daemon.script.replies = {line: (200, reply) for line, reply in REPLIES.items()}
        yield folder


def without_machine(shown: str) -> str:
    """What does not depend on the cores and the free memory of where the tests run."""
    shown = re.sub(r"this machine, \d+ cores", "this machine", shown.partition("\nWHERE ")[0])
    return re.sub(r"((?:memory_bytes|kv_tokens)(?:\": |,))\d+", r"\1MANY", shown)


@pytest.mark.parametrize(("verb", "form"), CASES)
def test_output(home: Path, verb: str, form: str) -> None:
    ended = penstock(user_environ(home), *VERBS[verb], "-o", form, cwd=home)
    assert ended.returncode == (8 if verb == "status-check" else 0)
    # the small model's tokenizer has more tokens than its weights, which is told
    assert bool(ended.stderr) == (verb == "models-show")
    shown = ended.stdout.replace(str(home), "HOME").replace(str(STARTER_FOLDER.parent), "HERE")
    assert all(char == "\n" or char.isprintable() for char in shown)
    if verb == "models-show":
        assert "this machine, " in shown
        shown = without_machine(shown)
    golden.check(golden.SENTENCES / f"cli-{verb}.{form}.txt", shown)
