"""`penstock chat`: turns, commands, interruptions; on a terminal and from a pipe."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli.chat import Conversation, Refused
from tests.appliance.cli_data import FINISHED, REQUEST
from tests.appliance.cli_process import Typist, penstock, user_environ
from tests.appliance.fake_daemon import RID, FakeDaemon, chat_event

DONE = b"data: [DONE]"
ASK = "POST /v1/chat/completions"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        fake.script.events = [chat_event("Hel"), chat_event("lo", "stop"), DONE]
        fake.script.replies = {f"GET /v1/requests/{RID}": (200, FINISHED)}
        yield fake


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**user_environ(tmp_path), "TERM": "dumb"}


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
        person.type("/set temperature", shows="temperature 0.6 (of")
        person.type("/set temprature 1", shows="is temperature meant?")
        person.type("/set temperature 9", shows="it is from 0 to 2")
        person.type("/rest", shows="/reset is near")
        person.type("/exit")
    shown = person.shown
    greeting = "temperature 0.6 (of the model's generation_config.json), top_p 1 (the default)"
    assert shown.count(greeting) == 1
    assert "max_tokens 2048 at most" in shown


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
        person.press(b"\x04")
    history = tmp_path / "state" / "chat_history"
    assert not (tmp_path / ".local").exists()
    assert "/help" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_what_was_typed_is_where_the_configuration_has_its_state(
    environ: dict[str, str], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'state_dir = "{tmp_path / "elsewhere"}"\n')
    environ = {**environ, "PENSTOCK_CONFIG": str(settings)}
    environ.pop("PENSTOCK_STATE_DIR", None)
    with Typist(environ, "chat") as person:
        person.type("/help", shows="/retry")
        person.press(b"\x04")
    assert "/help" in (tmp_path / "elsewhere" / "chat_history").read_text()


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_chat_is_left_by_the_word_that_people_know(environ: dict[str, str], word: str) -> None:
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
    assert again.body == told.body


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
    assert chat.body == {"seed": 1, "messages": []}


def test_a_setting_that_is_none_or_no_number_is_refused() -> None:
    chat = Conversation({})
    for name, value in (("colour", "red"), ("temperature", "hot"), ("max_tokens", "1.5")):
        with pytest.raises(Refused):
            chat.set(name, value)
    assert chat.settings == {}


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
