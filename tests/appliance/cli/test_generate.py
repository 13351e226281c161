"""`penstock run`: the completion to the byte, and every way in which it can end early."""

from __future__ import annotations

import signal

import pytest

from tests.appliance.cli_data import REQUEST
from tests.appliance.cli_process import penstock, run_on_terminal, start
from tests.appliance.fake_daemon import RID, FakeDaemon, chat_event, text_event

DONE = b"data: [DONE]"


def test_run_prints_only_the_completion(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("Hel"), text_event("lo\x1b[2J ü", "length"), DONE]
    ended = penstock(environ, "run", "Say hello", "--max-tokens", "8", "--stop", "x", "--seed", "3")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Hello\x1b[2J ü\n"  # to the byte, and a newline, into a pipe
    assert daemon.script.asked_for("POST /v1/completions") == [
        {"prompt": "Say hello", "max_tokens": 8, "seed": 3, "stop": ["x"], "stream": True}
    ]


@pytest.mark.parametrize(
    ("replies", "at"),
    [
        ({f"GET /v1/requests/{RID}": (200, {**REQUEST, "output_tokens": 16})}, "16 tokens"),
        ({}, "the default length"),
    ],
)
def test_a_reply_cut_at_a_length_that_nobody_gave_is_noted(
    daemon: FakeDaemon, environ: dict[str, str], replies: dict[str, tuple[int, object]], at: str
) -> None:
    daemon.script.events = [text_event("Hello", "length"), DONE]
    daemon.script.replies = replies
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (0, "Hello\n")
    assert ended.stderr.startswith(f"penstock: cut at {at}; --max-tokens gives more")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_run_reads_a_piped_prompt(
    daemon: FakeDaemon, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    daemon.script.events = [text_event("", "stop"), DONE]
    ended = penstock(environ, "run", *arguments, stdin="zwei\nZeilen ü\n".encode())
    assert (ended.returncode, ended.stdout) == (0, "")
    assert daemon.script.asked[-1][1] == {"prompt": "zwei\nZeilen ü", "stream": True}


def test_run_asks_for_quotes_around_several_words(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    ended = penstock(environ, "run", "Hello", "world")
    assert (ended.returncode, ended.stdout, daemon.script.asked) == (2, "", [])
    assert "in quotes" in ended.stderr


def test_run_refuses_a_prompt_that_is_no_text(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    assert penstock(environ, "run", stdin=b"\xff\xfe").returncode == 2
    assert daemon.script.asked == []


def test_run_can_use_the_chat_template(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [chat_event("Hi"), chat_event("", "stop"), DONE]
    ended = penstock(environ, "run", "--chat", "Hello", "--temperature", "0")
    assert (ended.returncode, ended.stdout) == (0, "Hi\n")
    assert daemon.script.asked_for("POST /v1/chat/completions") == [
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0.0,
            "stream": True,
        }
    ]


def test_run_can_end_with_the_timings(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("a", "stop"), DONE]
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    ended = penstock(environ, "run", "p", "--stats")
    assert ended.stdout == "a\n"
    assert ended.stderr == (
        "in 12 out 3  ttft 231ms (tokenize 0.4ms queue 61ms prefill 170ms)"
        "  handoff 1.82ms  tpot 12ms  id cmpl-1\n"
    )


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([text_event("par"), {"error": {"message": "a worker\x1b[31m died"}}], "worker\\x1b[31m"),
        ([text_event("par"), text_event("", "abort"), DONE], "'abort'"),
        ([text_event("par")], "before the end"),
    ],
)
def test_run_says_that_a_reply_is_incomplete(
    daemon: FakeDaemon, environ: dict[str, str], events: list[object], words: str
) -> None:
    daemon.script.events = events
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (7, "par\n")
    assert ended.stderr.startswith("penstock: ")
    assert words in ended.stderr


def test_run_says_who_has_cancelled_a_reply(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("par"), text_event("", "abort"), DONE]
    frame = {**REQUEST, "cancelled_by": "root\x1b[31m", "output_tokens": 1}
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, frame)}
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (7, "par\n")
    told = "penstock: the reply was cancelled by root\\x1b[31m after 1 token\n"
    assert ended.stderr == told


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_on_the_server(
    daemon: FakeDaemon, environ: dict[str, str], number: int, exit_code: int
) -> None:
    daemon.script.events = [text_event("one"), text_event("two")]
    daemon.script.pause_after = 1
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    running = start(environ, "run", "p")
    assert running.stdout is not None
    assert running.stdout.read(3) == b"one"  # streamed: the daemon is still at it
    running.send_signal(number)
    rest, notes = running.communicate(timeout=30)
    assert (running.returncode, rest, notes) == (exit_code, b"\n", b"cancelled after 3 tok\n")
    assert daemon.script.asked_for(f"POST /v1/requests/{RID}/cancel") == [{}]
    assert daemon.script.told_reader.is_set()  # it was cancelled before it was hung up on


def test_a_reader_that_leaves_cancels_on_the_server(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event("x" * 1000) for _ in range(2000)]
    running = start(environ, "run", "p")
    assert running.stdout is not None
    assert running.stdout.read(1) == b"x"
    running.stdout.close()
    assert running.stderr is not None
    with running.stderr as notes:
        assert notes.read() == b""
    assert running.wait(30) == 141
    assert daemon.script.cancelled.is_set()


def test_a_terminal_gets_text_without_controls_and_a_newline(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event("a\x1b]0;evil\x07b\tc\x9b1m", "stop"), DONE]
    assert run_on_terminal(environ, "run", "p") == b"a]0;evilb\tc1m\r\n"


@pytest.mark.parametrize(
    ("status", "exit_code"), [(400, 2), (403, 4), (404, 5), (429, 6), (503, 6), (500, 7)]
)
def test_a_refusal_has_its_exit_code(
    daemon: FakeDaemon, environ: dict[str, str], status: int, exit_code: int
) -> None:
    refusal = {"error": {"message": "not now", "code": None}}
    daemon.script.replies = {"POST /v1/completions": (status, refusal)}
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (exit_code, "")
    assert ended.stderr.startswith("penstock: not now\n")
