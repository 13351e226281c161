"""Whatever answers at the daemon's address, a verb prints sense or one error, never a traceback."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.main import main
from tests.appliance.cli_data import EVENTS, FINISHED, FRAME, REQUEST, ROW, USAGE, WHOAMI
from tests.appliance.cli_process import penstock
from tests.worlds.fake_daemon import FakeDaemon, chat_event

STATE = "GET /v1/penstock/state"
MODEL = {
    "id": "m",
    "root": "/m",
    "sampling": {"temperature": {"value": 1, "source": "model"}},
}
ASKS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "status": (("status",), STATE, FRAME),
    "status --check": (("status", "--check"), STATE, FRAME),
    "roles": (("roles",), STATE, FRAME),
    "roles static": (("roles", "static"), "POST /v1/penstock/roles", {"roles": "static"}),
    "ps": (("ps", "-a"), "GET /v1/requests", {"data": [REQUEST]}),
    "show": (("show", "cmpl-1"), "GET /v1/requests/cmpl-1", FINISHED),
    "show last": (("show",), "GET /v1/requests", {"data": [FINISHED]}),
    "whoami": (("whoami",), "GET /v1/penstock/whoami", WHOAMI),
    "log": (("log",), "GET /v1/penstock/log?limit=20", {"data": [ROW]}),
    "events": (("events",), "GET /v1/penstock/events?limit=20", {"data": EVENTS}),
    "usage": (("usage",), "GET /v1/penstock/usage?by=user", {"data": USAGE[:1]}),
    "cancel": (("cancel", "a"), "POST /v1/requests/a/cancel", {"status": "cancelled"}),
    "cancel --user": (("cancel", "-u", "ann"), "GET /v1/requests", {"data": [REQUEST]}),
    "drain": (("drain",), "POST /v1/penstock/drain", {"status": "draining"}),
    "drain --wait": (("drain", "--timeout", "0"), STATE, {"num_requests": 0}),
    "resume": (("resume",), "POST /v1/penstock/resume", {"status": "resumed"}),
    "restart": (("restart",), STATE, {"state": "ready", "pid": 1, "events": []}),
    "stop": (("stop", "m"), STATE, {"state": "ready", "model": "n", "swaps": {"resident": []}}),
    "run": (("run", "--model", "m", "hi"), "GET /v1/models", {"data": [MODEL]}),
    "embed": (
        ("embed", "lines"),
        "POST /v1/embeddings",
        {"data": [{"embedding": "AACAPwAAAEA="}]},
    ),
    "rerank": (
        ("rerank", "q", "lines"),
        "POST /v1/rerank",
        {"results": [{"index": 0, "relevance_score": 0.5}]},
    ),
    "profile measure": (
        ("profile", "measure", "--timeout", "0"),
        "POST /v1/penstock/measure",
        {"num_unknown": 0, "is_going_on": False, "num_facts": 3},
    ),
    "top --once": (("top", "--once"), STATE, FRAME),
}
HEADS = (["penstock"], ["penstock", "hint"])
OTHERS: dict[str, tuple[int, object]] = {
    "GET /v1/requests/cmpl-1": (200, FINISHED),
    "POST /v1/penstock/drain": (200, {"status": "draining"}),
    "POST /v1/requests/cmpl-1/cancel": (200, {"status": "cancelled"}),
}
WRONG = ({}, [], 5, "x", None, [5], {"x": []}, 1e999)
MISSING = object()


def places(answer: object, *, way: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the way to each value of an answer, but for the answer itself."""
    keys: Any = answer if isinstance(answer, dict) else ()
    keys = range(len(answer)) if isinstance(answer, list) else keys
    for key in keys:
        yield (*way, key)
        yield from places(answer[key], way=(*way, key))  # type: ignore[index]


def changed(answer: dict[str, Any], way: tuple[object, ...], value: object) -> dict[str, Any]:
    whole: Any = copy.deepcopy(answer)
    inner = whole
    for key in way[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[way[-1]]
    else:
        inner[way[-1]] = value
    return whole  # type: ignore[no-any-return]


def script(daemon: FakeDaemon, environ: dict[str, str], verb: str, answer: object) -> None:
    Path(environ["HOME"], "lines").write_text("a line\n")
    daemon.script.replies = {**OTHERS, ASKS[verb][1]: (200, answer)}
    daemon.script.events = [chat_event("hi", "stop"), b"data: [DONE]"]


@pytest.mark.parametrize("verb", ASKS)
def test_an_object_without_any_field_is_not_an_answer(
    daemon: FakeDaemon, environ: dict[str, str], verb: str
) -> None:
    script(daemon, environ, verb, {})
    ended = penstock(environ, *ASKS[verb][0], cwd=Path(environ["HOME"]))
    assert (ended.returncode, ended.stdout) == (3, "")
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] in HEADS


@pytest.fixture
def in_process(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let main() run here thousands of times: as this user, with the signals put back."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(environ["HOME"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("verb", [verb for verb in ASKS if verb != "top --once"])  # it execs
def test_a_field_of_another_type_ends_in_one_error_or_none(
    daemon: FakeDaemon,
    environ: dict[str, str],
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, _, answer = ASKS[verb]
    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    for number, way in enumerate(places(answer)):
        for value in (*WRONG[number % 4 :: 4], MISSING):
            script(daemon, environ, verb, changed(answer, way, value))
            with pytest.raises(SystemExit) as ended:
                main()
            shown = capsys.readouterr()
            heads = [line.partition(":")[0] for line in shown.err.splitlines()]
            is_problem = verb == "status --check" and ended.value.code == 8
            assert is_problem or not ended.value.code or heads in HEADS, (way, value, shown.err)
            assert shown.out or shown.err, (way, value)
