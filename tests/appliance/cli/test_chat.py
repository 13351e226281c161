"""`penstock chat`: turns, commands, interruptions; on a terminal and from a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli.conversation import Conversation, Refused
from appliance.cli.run import MAX_STDIN_BYTES
from tests.appliance.cli_data import FINISHED, REQUEST
from tests.appliance.cli_process import Typist, penstock, run_on_terminal, start, user_environ
from tests.worlds.fake_daemon import RID, FakeDaemon, chat_event, text_event


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        fake.script.events = [chat_event("Hel"), chat_event("lo", "stop"), DONE]
        fake.script.replies = {f"GET /v1/requests/{RID}": (200, FINISHED)}
        yield fake


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**user_environ(tmp_path), "TERM": "dumb"}


# `penstock run`: the completion to the byte, and every way in which it can end early.


DONE = b"data: [DONE]"
ASK, CONTINUE = "POST /v1/chat/completions", "POST /v1/completions"
SAMPLING = {"temperature": 0.6, "top_p": 0.9}
"""What run and chat take where neither the model nor the user says otherwise."""
DEFAULTS = {**SAMPLING, "max_tokens": -1}


def asked_text(daemon: FakeDaemon, line: str = ASK) -> list[object]:
    """What each request was about, without settings."""
    bodies = daemon.script.asked_for(line)
    return [(body or {}).get("prompt", (body or {}).get("messages")) for body in bodies]


def user_says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_run_prints_only_the_completion(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("Hel"), text_event("lo\x1b[2J ü", "stop"), DONE]
    options = ("--max-tokens", "8", "--stop", "x", "--seed", "3")
    ended = penstock(environ, "run", "--raw", "Say hello", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Hello\x1b[2J ü\n"  # to the byte, and a newline, into a pipe
    asked = {"prompt": "Say hello", "max_tokens": 8, "seed": 3, "stop": ["x"], "stream": True}
    assert daemon.script.asked_for(CONTINUE) == [{**SAMPLING, **asked}]


def test_run_uses_the_chat_template_with_room_and_a_lower_temperature(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    ended = penstock(environ, "run", "Hello")
    assert (ended.returncode, ended.stdout) == (0, "Hello\n")
    wanted = {**DEFAULTS, "messages": user_says("Hello"), "stream": True}
    assert daemon.script.asked_for(ASK) == [wanted]


def test_what_the_model_or_the_user_says_of_sampling_goes_before_the_commands_own(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    sampling = {
        "temperature": {"value": 0.2, "source": "model"},
        "top_p": {"value": 1.0, "source": "default"},
    }
    daemon.script.replies["GET /v1/models"] = (200, {"data": [{"id": "m", "sampling": sampling}]})
    assert penstock(environ, "run", "a").returncode == 0
    assert penstock(environ, "run", "a", "--top-p", "0.5", "--temperature", "1").returncode == 0
    first, second = daemon.script.asked_for(ASK)
    assert first is not None
    assert second is not None
    assert ("temperature" in first, first["top_p"]) == (False, 0.9)
    assert (second["temperature"], second["top_p"]) == (1.0, 0.5)


def test_a_model_without_a_chat_template_continues_the_text_and_says_so(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    refusal = {"error": {"message": "the model has no chat template", "code": "no_chat_template"}}
    daemon.script.replies[ASK] = (400, refusal)
    daemon.script.events = [text_event("time", "stop"), DONE]
    ended = penstock(environ, "run", "Once upon a")
    assert (ended.returncode, ended.stdout) == (0, "time\n")
    assert "no chat template" in ended.stderr
    assert asked_text(daemon, CONTINUE) == ["Once upon a"]
    assert penstock(environ, "run", "-s", "Be brief.", "Once upon a").returncode == 2


def test_what_a_model_thinks_is_not_its_reply(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    daemon.script.events = [thought, chat_event("Hello", "stop"), DONE]
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Hello\n", "")


def test_a_reply_that_is_cut_off_is_noted(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [chat_event("Hello", "length"), DONE]
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (0, "Hello\n")
    assert "context is full" in ended.stderr
    limited = penstock(environ, "run", "p", "--max-tokens", "7")
    assert limited.stdout == "Hello\n"
    assert "max_tokens is 7" in limited.stderr


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("Hello",), ("m", "Hello")),  # the served one, which need not be the daemon's first
        (("m", "Hello"), ("m", "Hello")),
        (("-m", "m", "m"), ("m", "m")),
        (("mine", "Hello"), ("o/other", "Hello")),
        (("o/other@main", "Hello"), ("o/other", "Hello")),
        (("file", "Hello"), ("tiny", "Hello")),
        (("-m", "also-m", "Hello"), ("also-m", "Hello")),
    ],
)
def test_a_first_word_is_the_model_if_it_names_one(
    daemon: FakeDaemon,
    environ: dict[str, str],
    tmp_path: Path,
    words: tuple[str, ...],
    asked: tuple[str | None, str],
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(f'[short_names]\nmine = "o/other"\nfile = "{tmp_path}/tiny.gguf"\n')
    models = [{"id": "m", "root": "/m"}, {"id": "o/other"}, {"id": "tiny"}]
    daemon.script.replies["GET /v1/models"] = (200, {"data": models})
    daemon.script.replies["GET /v1/models/also-m"] = (200, {"id": "also-m"})  # an alias
    (tmp_path / "tiny.gguf").touch()
    ended = penstock({**environ, "PENSTOCK_CONFIG": str(file)}, "run", *words)
    assert (ended.returncode, ended.stdout) == (0, "Hello\n"), ended.stderr
    (body,) = daemon.script.asked_for(ASK)
    assert body is not None
    assert (body.get("model"), body["messages"][-1]["content"]) == asked


@pytest.mark.parametrize(
    "words",
    [
        ("qwen3:0.6b", "hi"),
        ("llama99:7t",),
        ("qwen3:0.6",),
        ("owner/model", "hi"),
        ("./nothing", "hi"),
        ("Hello", "world"),
    ],
)
def test_a_model_that_the_daemon_does_not_serve_is_refused_before_anything_is_read(
    daemon: FakeDaemon, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    ended = penstock(environ, "run", *words)
    assert (ended.returncode, ended.stdout) == (5, "")
    assert words[0] in ended.stderr
    assert "hint: " in ended.stderr
    assert ("is qwen3:0.6b meant?" in ended.stderr) == (words[0] == "qwen3:0.6")
    assert [line for line, _ in daemon.script.asked if line.startswith("POST")] == []


@pytest.mark.parametrize(("asked", "is_here"), [("qwen3:0.6b", False), ("./my model.gguf", True)])
def test_a_model_that_the_daemon_does_not_serve_is_told_how_to_be_served(
    daemon: FakeDaemon, environ: dict[str, str], tmp_path: Path, asked: str, is_here: bool
) -> None:
    (tmp_path / "my model.gguf").touch()
    ended = penstock(environ, "run", "-m", asked, "Hello", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (5, "")
    assert f"`penstock serve --model {shlex.quote(asked)}`" in ended.stderr
    assert (f"`penstock pull {asked}`" in ended.stderr) == (not is_here)


def test_a_model_that_is_known_and_not_loaded_is_loaded_for_its_sampling(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    models = {"data": [{"id": "m"}, {"id": "small", "is_loaded": False}]}
    daemon.script.replies["GET /v1/models"] = (200, models)
    daemon.script.replies["GET /v1/models/small"] = (200, models["data"][1])
    ended = penstock(environ, "run", "small", "Hello")
    assert (ended.returncode, ended.stdout) == (0, "Hello\n")
    assert "loading small" in ended.stderr
    (loaded,) = daemon.script.asked_for("POST /api/generate")
    assert loaded == {"model": "small", "stream": True}, "no prompt: Ollama's way to load a model"
    assert [body and body["model"] for body in daemon.script.asked_for(ASK)] == ["small"]


def test_run_waits_while_the_model_loads(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    state = "GET /v1/penstock/state"
    refusal = {"error": {"message": "the model is still loading", "code": "model_loading"}}
    daemon.script.replies[ASK] = (503, refusal)
    daemon.script.replies[state] = (200, {"state": "loading", "state_reason": "model_loading"})
    running = start(environ, "run", "p")
    while not daemon.script.asked_for(state):
        time.sleep(0.01)
    del daemon.script.replies[ASK]
    daemon.script.replies[state] = (200, {"state": "ready"})
    shown, _ = running.communicate(timeout=120)
    assert (running.returncode, shown) == (0, b"Hello\n")


def test_run_waits_for_a_daemon_that_has_started_and_does_not_listen_yet(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"1 {tmp_path / 'p.sock'}\n")
        lock.flush()
        run = start(environ, "run", "Hello")
        time.sleep(1.0)
        with FakeDaemon(tmp_path / "p.sock") as daemon:
            daemon.script.events = [chat_event("Hello", "stop"), DONE]
            assert run.communicate(timeout=120)[0] == b"Hello\n"
    (tmp_path / "p.sock").unlink(missing_ok=True)
    assert penstock(environ, "run", "Hello").returncode == 3, "one that is dead is not waited for"


def test_run_without_a_prompt_opens_a_chat_at_a_terminal(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    with Typist(environ, "run", "m") as person:
        person.type("hi", shows="Hello")
        person.type("/bye")
    assert person.exit_code == 0
    assert asked_text(daemon) == [user_says("hi")]


def test_at_a_terminal_a_daemon_is_started_until_the_chat_ends_or_somebody_stops_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    socket = tmp_path / "p.sock"
    with Typist(environ, "run", "penstock-starter-1") as person:
        assert socket.exists()
        person.type("Who are you?", shows="\r\n")
        assert penstock(environ, "stop", "qwen3:0.6b").returncode == 5
        stopped = penstock(environ, "stop", "penstock-starter-1")
        assert (stopped.returncode, stopped.stdout) == (0, "stopped penstock-starter-1\n")
        assert not socket.exists()
        person.type("Hello?", shows="penstock serve")
        person.type("/bye")
    assert person.exit_code == 0
    assert "penstock-starter-1: temperature" in person.shown
    with Typist(environ, "run") as person:
        person.press(b"\x04")
    assert (person.exit_code, socket.exists()) == (0, False)


def test_where_nobody_reads_stderr_no_daemon_is_started(environ: dict[str, str]) -> None:
    for verb in ("run", "chat"):
        assert run_on_terminal(environ, verb, exit_code=3) == b"", "stdout alone is a terminal"


@pytest.mark.parametrize("arguments", [(), ("-",), ("m",), ("m", "-")])
def test_run_reads_a_piped_prompt(
    daemon: FakeDaemon, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    daemon.script.events = [chat_event("", "stop"), DONE]
    ended = penstock(environ, "run", *arguments, stdin="zwei\nZeilen ü\n".encode())
    assert (ended.returncode, ended.stdout) == (0, "")
    assert asked_text(daemon) == [user_says("zwei\nZeilen ü")]


def test_run_asks_for_quotes_around_several_words(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    for words in (("Hello", "my", "world"), ("-m", "m", "Hello", "world")):
        ended = penstock(environ, "run", *words)
        assert (ended.returncode, ended.stdout, daemon.script.asked) == (2, "", [])
        assert "in quotes" in ended.stderr


def test_run_refuses_a_prompt_that_is_no_text(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    assert penstock(environ, "run", stdin=b"\xff\xfe").returncode == 2
    assert penstock(environ, "run", stdin=bytes(MAX_STDIN_BYTES + 1)).returncode == 2
    assert daemon.script.asked == []


def test_run_can_end_with_the_timings(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("a", "stop"), DONE]
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    ended = penstock(environ, "run", "p", "--stats")
    assert ended.stdout == "a\n"
    words = ended.stderr.replace("(", "").replace(")", "").split()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "in": "12", "out": "3", "ttft": "231ms", "tokenize": "0.4ms", "queue": "61ms",
        "prefill": "170ms", "handoff": "1.82ms", "tpot": "12ms", "id": "cmpl-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([text_event("par"), {"error": {"message": "a worker\x1b[31m died"}}], "worker\\x1b[31m"),
        ([text_event("par"), text_event("", "abort"), DONE], "'abort'"),
        ([text_event("par")], "early"),
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
    rest, notes = running.communicate(timeout=120)
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
    assert running.wait(120) == 141
    assert daemon.script.cancelled.is_set()


def test_a_terminal_gets_text_without_controls_and_a_newline(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event("a\x1b]0;evil\x07b\tc\x9b1m", "stop"), DONE]
    assert run_on_terminal(environ, "run", "p") == b"a]0;evilb\tc1m\r\n"


BIDI = "a\u202eb\u2066c\u202a\u202b\u202c\u202d\u2067\u2068\u2069"
HEBREW = "\u05e9\u05dc\u05d5\u05dd\u200f\u200e \u0645\u06cc\u200c\u062e\u200d\u061c"


def test_a_terminal_gets_no_character_that_reorders_text_and_all_of_arabic_and_hebrew(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event(BIDI + HEBREW, "stop"), DONE]
    assert run_on_terminal(environ, "run", "p").decode() == f"abc{HEBREW}\r\n"
    assert penstock(environ, "run", "p").stdout == f"{BIDI}{HEBREW}\n", "a pipe gets every byte"


@pytest.mark.parametrize(
    ("status", "exit_code"), [(400, 2), (403, 4), (404, 5), (429, 6), (503, 6), (500, 7)]
)
def test_a_refusal_has_its_exit_code(
    daemon: FakeDaemon, environ: dict[str, str], status: int, exit_code: int
) -> None:
    refusal = {"error": {"message": "not now", "code": None}}
    daemon.script.replies = {ASK: (status, refusal)}
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (exit_code, "")
    assert ended.stderr.startswith("penstock: not now\n")


# --------------------------------------------------------------------------------------------------


def said(daemon: FakeDaemon) -> list[list[str]]:
    """What each request contained, message by message."""
    bodies = daemon.script.asked_for(ASK)
    return [[message["content"] for message in (body or {})["messages"]] for body in bodies]


def test_each_line_of_a_pipe_is_a_turn_that_remembers_those_before(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    ended = penstock(environ, "chat", "-s", "Be brief.", stdin="eins\n\n/etc ü\n".encode())
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Hello\nHello\n", "")
    assert said(daemon) == [
        ["Be brief.", "eins"],
        ["Be brief.", "eins", "Hello", "/etc ü"],
    ]


def test_a_pipe_ends_with_the_first_turn_that_fails(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    refusal = {"error": {"message": "no template", "code": "no_chat_template"}}
    daemon.script.replies = {ASK: (400, refusal)}
    ended = penstock(environ, "chat", stdin=b"a\nb\n")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(daemon.script.asked) == 1
    assert penstock(environ, "chat", stdin=b"\xff\n").returncode == 2


def test_settings_and_commands_shape_the_next_turn(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    with Typist(environ, "chat", "--seed", "3") as person:
        person.type("/set temperature 0.5", shows="temperature 0.5")
        person.type("/system Be kind.", shows="system message set")
        person.type("hi", shows="Hello")
        person.type("/set seed", shows="seed another for each reply")
        person.type("/retry", shows="Hello")
        person.type("/stats", shows="ttft 231ms")
        person.type("/reset", shows="forgotten")
        person.type('"""a\nb"""', shows="Hello")
        person.type("/nonsense", shows="/help")
        person.type("/exit")
    assert person.exit_code == 0
    assert said(daemon) == [["Be kind.", "hi"], ["Be kind.", "hi"], ["Be kind.", "a\nb"]]
    first, *_, last = daemon.script.asked_for(ASK)
    assert first is not None
    assert last is not None
    assert (first["temperature"], first["seed"]) == (0.5, 3)
    assert "seed" not in last


def test_the_sampling_in_force_is_shown_with_where_it_comes_from(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    sampling = {
        "temperature": {"value": 0.6, "source": "model"},
        "top_p": {"value": 1.0, "source": "default"},
    }
    models = {"object": "list", "data": [{"id": "m", "sampling": sampling}]}
    daemon.script.replies["GET /v1/models"] = (200, models)
    with Typist(environ, "chat") as person:
        person.type("/set", shows="stop none")
        person.type("/set temperature 0.2", shows="temperature 0.2 (set here)")
        person.type("/set temperature", shows="temperature 0.6 (model")
        person.type("/set temprature 1", shows="is temperature meant?")
        person.type("/set temperature 9", shows="must be from 0 to 2")
        person.type("/rest", shows="/reset is near")
        person.type("/exit")
    shown = person.shown
    assert shown.count("m: temperature 0.6 (model), top_p 0.9 (default)") == 1
    assert "max_tokens" in shown


def test_a_chat_goes_on_with_another_model(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    models = {"object": "list", "data": [{"id": "m"}, {"id": "other"}]}
    daemon.script.replies["GET /v1/models"] = (200, models)
    with Typist(environ, "chat") as person:
        person.type("/model", shows="* m")
        person.type("/model none", shows="no model")
        person.type("/model other", shows="other")
        person.type("hi", shows="Hello")
        person.type("/exit")
    assert "loading" not in person.shown
    (asked,) = daemon.script.asked_for(ASK)
    assert asked is not None
    assert asked["model"] == "other"


def test_a_model_that_is_not_loaded_is_loaded_when_a_chat_turns_to_it(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    sampling = {"temperature": {"value": 0.2, "source": "model"}}
    models = {"object": "list", "data": [{"id": "m"}, {"id": "other", "is_loaded": False}]}
    daemon.script.replies["GET /v1/models"] = (200, models)
    daemon.script.replies["GET /v1/models/other"] = (200, {"id": "other", "sampling": sampling})
    with Typist(environ, "chat") as person:
        person.type("/model other", shows="loading other in place of m ...")
        person.type("/set temperature", shows="temperature 0.2 (model)")
        person.type("/exit")
    assert daemon.script.asked_for("POST /api/generate") == [{"model": "other", "stream": True}]


@pytest.mark.parametrize("limit", [[], ["--max-tokens", "9000"]])
def test_a_reply_that_repeats_itself_ends_at_a_terminal(
    daemon: FakeDaemon, environ: dict[str, str], limit: list[str]
) -> None:
    daemon.script.events = [text_event("la ") for _ in range(900)]
    daemon.script.events += [text_event("end", "stop"), DONE]
    shown = run_on_terminal(environ, "run", "p", *limit)
    assert shown.endswith(b"end\r\n") == bool(limit)
    assert penstock(environ, "run", "p").stdout.endswith("end\n")


def test_help_says_what_each_word_does(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    with Typist(environ, "chat") as person:
        person.type("/help", shows="ends a reply or a line")
        person.type("/exit")
    for words in ("/retry", "/set [NAME [VALUE]]", "/save FILE"):
        line = next(line for line in person.shown.splitlines() if line.startswith(words))
        assert len(line.removeprefix(words).split()) >= 4


def test_ctrl_c_ends_the_reply_and_not_the_chat(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [chat_event("Once upon"), chat_event(" a time", "stop"), DONE]
    daemon.script.pause_after = 1
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    with Typist(environ, "chat") as person:
        person.press(b"a story\n", shows="Once upon")
        person.press(b"\x03", shows="cancelled after 3 tok")
        daemon.script.pause_after = None
        person.type("go on", shows="a time")
        person.interrupt(shows=">>> ")
        person.press(b"\x04")
    assert person.exit_code == 0
    assert daemon.script.asked_for(f"POST /v1/requests/{RID}/cancel") == [{}]
    assert said(daemon)[-1] == ["a story", "Once upon", "go on"]


def test_what_goes_wrong_is_said_and_the_chat_goes_on(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies[ASK] = (503, {"error": {"message": "draining\x1b[2J", "code": None}})
    with Typist(environ, "chat") as person:
        person.type("hi", shows="draining\\x1b[2J")
        del daemon.script.replies[ASK]
        person.type("hi again", shows="Hello")
        person.type("/load /nowhere", shows="cannot read it")
        person.press(b"\x04")
    assert person.exit_code == 0
    assert said(daemon)[-1] == ["hi again"]  # what was never answered is not said twice


def test_what_was_typed_is_remembered_for_its_owner_alone(
    daemon: FakeDaemon, environ: dict[str, str], tmp_path: Path
) -> None:
    with Typist(environ, "chat") as person:
        person.type("/help", shows="/retry")
        person.press(b"\x04", shows="\r\n")  # the shell's prompt gets a line of its own
    history = tmp_path / "state" / "chat_history"
    assert not (tmp_path / ".local").exists()
    assert "/help" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_what_was_typed_is_where_the_configuration_has_its_state(
    daemon: FakeDaemon, environ: dict[str, str], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'state_dir = "{tmp_path / "elsewhere"}"\n')
    environ = {**environ, "PENSTOCK_CONFIG": str(settings)}
    environ.pop("PENSTOCK_STATE_DIR", None)
    with Typist(environ, "chat") as person:
        person.type("/help", shows="/retry")
        person.press(b"\x04")
    assert "/help" in (tmp_path / "elsewhere" / "chat_history").read_text()


def test_the_words_of_other_chats_are_known(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    with Typist(environ, "chat") as person:
        person.type("/?", shows="/retry")
        person.type("/clear", shows="forgotten")
        person.type("/exit")


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_chat_is_left_by_the_word_that_people_know(
    daemon: FakeDaemon, environ: dict[str, str], word: str
) -> None:
    with Typist(environ, "chat") as person:
        person.type(word)
    assert person.exit_code == 0


def test_a_saved_chat_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    told = Conversation({"temperature": 0.5, "model": "m"}, "Be kind.")
    told.say("hi")
    told.answer("Hello")
    path = told.save(str(tmp_path / "chat.json"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Conversation({})
    again.load(str(path))
    assert (again.settings, again.messages) == ({"temperature": 0.5}, told.messages)


def test_only_a_file_of_the_same_chat_is_replaced(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "chat.json", tmp_path / "notes.txt"
    theirs.write_text("mine")
    chat = Conversation({})
    chat.save(str(mine))
    chat.say("hi")
    chat.answer("Hello")
    chat.save(str(mine))
    assert len(json.loads(mine.read_text())["messages"]) == 2
    with pytest.raises(Refused):
        chat.save(str(theirs))
    assert theirs.read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"settings": {}, "messages": [{"role": "assistant", "content": "I first"}]},
        {"settings": {}, "messages": [{"role": "user", "content": "unanswered"}]},
        {"settings": {}, "messages": [{"role": "user", "content": 1}] * 2},
        {"settings": [], "messages": []},
    ],
)
def test_a_file_that_is_no_chat_changes_nothing(tmp_path: Path, content: object) -> None:
    (tmp_path / "x").write_text(json.dumps(content))
    chat = Conversation({"seed": 1})
    with pytest.raises(Refused):
        chat.load(str(tmp_path / "x"))
    assert (chat.settings, chat.messages) == ({"seed": 1}, [])


def test_a_setting_that_is_none_or_no_number_is_refused() -> None:
    chat = Conversation({})
    for name, value in (("colour", "red"), ("temperature", "hot"), ("max_tokens", "1.5")):
        with pytest.raises(Refused):
            chat.set(name, value)
    assert chat.settings == {}


@pytest.mark.parametrize(
    ("name", "value", "span"),
    [
        ("temperature", "nan", "from 0 to 2"),
        ("top_p", "0", "above 0 and at most 1"),
        ("repetition_penalty", "0.0", "above 0 and at most 2"),
        ("max_tokens", "0", "at least 1"),
        ("seed", "9223372036854775808", "to 9,223,372,036,854,775,807"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_range(
    environ: dict[str, str], name: str, value: str, span: str
) -> None:
    chat = Conversation({})
    with pytest.raises(Refused, match=f"out of range: .* {span}"):
        chat.set(name, value)
    assert chat.settings == {}


def test_run_and_chat_take_the_same_ranges_as_options(environ: dict[str, str]) -> None:
    ended = penstock(environ, "run", "p", "--temperature", "nan")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'--temperature': nan" in ended.stderr


def test_a_reply_without_a_word_takes_the_question_back() -> None:
    chat = Conversation({})
    chat.say("hi")
    chat.answer("")
    assert chat.turns == []
    with pytest.raises(Refused):
        chat.retry()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        Conversation({}).save(str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(Refused):
        Conversation({}).save("a\0b")
    assert os.listdir(tmp_path) == []
