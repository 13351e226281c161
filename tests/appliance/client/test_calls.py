"""Replies as dictionaries, streams as they come, and every failure with its words and exit code."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.client.address import UnixAddress
from appliance.client.calls import (
    Client,
    ClientError,
    DaemonUnreachable,
    GenerationFailed,
    PermissionRefused,
    ReplyError,
)
from tests.worlds.fake_daemon import RID, FakeDaemon, text_event


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon) -> Client:
    return Client(UnixAddress(daemon.socket_path))


def test_get_and_post_speak_json(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.replies = {"GET /a": (200, {"x": 1}), "POST /b": (200, {"y": 2})}
    assert client.get("/a") == {"x": 1}
    assert client.post("/b", {"z": 3}) == {"y": 2}
    assert daemon.script.asked == [("GET /a", None), ("POST /b", {"z": 3})]


def test_what_is_no_json_comes_as_text(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.replies = {"GET /a": (200, b"x 1\n"), "GET /b": (503, {"error": "later"})}
    assert client.text("/a") == "x 1\n"
    with pytest.raises(ReplyError) as refused:
        client.text("/b")
    assert refused.value.exit_code == 6


def test_a_stream_that_nobody_answers_is_told_of_and_waited_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent.sock"))
        listener.listen()
        said = list[str]()

        def give_up() -> None:
            said.append("no answer yet")
            listener.close()

        silent = UnixAddress(tmp_path / "silent.sock")
        with pytest.raises(DaemonUnreachable):
            Client(silent, timeout_s=0.01, on_silence=give_up).stream("/x", {})
    assert said == ["no answer yet"]


def test_a_reply_that_begins_late_is_told_of_once_and_read(tmp_path: Path) -> None:
    late = FakeDaemon(tmp_path / "late.sock")  # it takes connections, and answers in the `with`
    late.script.replies = {"GET /a": (200, {"x": 1})}
    said = list[str]()
    with ExitStack() as stack:
        restart = threading.Timer(0.2, lambda: stack.enter_context(late))
        stack.callback(restart.cancel)

        def begin() -> None:
            said.append("no answer yet")
            restart.start()

        client = Client(UnixAddress(late.socket_path), timeout_s=0.01, on_silence=begin)
        assert client.awaited("/a") == {"x": 1}
    assert said == ["no answer yet"]


def test_a_stream_without_a_body_is_only_read(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.content_type = "application/x-ndjson"
    daemon.script.events = [b'{"seq": 1}', b'{"seq": 2}']
    with client.stream("/a/stream") as frames:
        assert [frame["seq"] for frame in frames] == [1, 2]
    daemon.script.replies = {"GET /a/stream": (403, {"error": {"message": "no", "code": "x"}})}
    with pytest.raises(ReplyError), client.stream("/a/stream"):
        pass
    assert daemon.script.asked == [("GET /a/stream", None)] * 2


def test_cancel_names_the_request_in_the_path(daemon: FakeDaemon, client: Client) -> None:
    client.cancel("cmpl-1/../x")
    assert daemon.script.asked == [("POST /v1/requests/cmpl-1%2F..%2Fx/cancel", {})]


def test_a_stream_yields_events_until_done(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.events = [
        b": keep-alive",
        text_event("a"),
        text_event("b", "stop"),
        b"data: [DONE]",
    ]
    with client.stream("/v1/completions", {"stream": True}) as reply:
        assert reply.request_id == RID
        assert [event["choices"][0]["text"] for event in reply] == ["a", "b"]


def test_a_stream_is_read_as_it_comes(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.events = [text_event("a"), text_event("b"), b"data: [DONE]"]
    daemon.script.pause_after = 1
    with client.stream("/v1/completions", {"stream": True}) as reply:
        assert next(iter(reply))["choices"][0]["text"] == "a"  # the daemon is still waiting
        assert not daemon.script.cancelled.is_set()


def test_lines_of_json_end_with_the_reply(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.content_type = "application/x-ndjson"
    daemon.script.events = [b'{"seq": 1}', b'{"seq": 2}']
    with client.stream("/frames", {"stream": True}) as reply:
        assert [frame["seq"] for frame in reply] == [1, 2]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"error": {"message": "worker died", "code": "engine_dead"}}, "worker died"),
        (b"data: {half", "not JSON"),
        (b": and then nothing", "closed the connection"),
    ],
)
def test_a_stream_that_breaks_says_so(
    daemon: FakeDaemon, client: Client, last: object, words: str
) -> None:
    daemon.script.events = [text_event("a"), last]
    with (
        client.stream("/v1/completions", {"stream": True}) as reply,
        pytest.raises(GenerationFailed, match=words) as caught,
    ):
        assert [event["choices"] for event in reply]
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(400, 2), (401, 4), (403, 4), (404, 5), (405, 1), (413, 2), (429, 6), (500, 1), (503, 6)],
)
def test_an_error_reply_carries_the_message_and_an_exit_code(
    daemon: FakeDaemon, client: Client, status: int, exit_code: int
) -> None:
    error = {"error": {"message": "because", "code": "some_code", "type": "t", "param": None}}
    daemon.script.replies = {"GET /a": (status, error)}
    with pytest.raises(ReplyError, match="because") as caught:
        client.get("/a")
    assert (caught.value.status, caught.value.code) == (status, "some_code")
    assert caught.value.exit_code == exit_code


def test_a_generation_that_fails_before_its_first_token(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.replies = {"POST /g": (500, {"error": {"message": "bug"}})}
    with pytest.raises(GenerationFailed, match="bug"):
        client.stream("/g", {"stream": True})


@pytest.mark.parametrize("content", [b"<html>", {"detail": 3}, {"error": "words"}])
def test_an_error_reply_of_another_shape_is_still_an_error(
    daemon: FakeDaemon, client: Client, content: object
) -> None:
    daemon.script.replies = {"GET /a": (502, content)}
    with pytest.raises(ReplyError, match="HTTP 502"):
        client.get("/a")


@pytest.mark.parametrize("content", [b"no json", [1, 2]])
def test_a_reply_that_is_no_object_is_refused(
    daemon: FakeDaemon, client: Client, content: object
) -> None:
    daemon.script.replies = {"GET /a": (200, content)}
    with pytest.raises(ClientError):
        client.get("/a")


def test_no_socket_means_not_started(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no such socket") as caught:
        Client(UnixAddress(tmp_path / "p.sock")).get("/a")
    assert "penstock serve" in caught.value.hint
    assert caught.value.exit_code == 3


def test_a_socket_left_behind_means_not_running(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(DaemonUnreachable, match="connection refused"):
        Client(UnixAddress(path)).get("/a")


def test_a_daemon_that_hangs_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        with pytest.raises(DaemonUnreachable, match="does not answer"):
            Client(UnixAddress(path), timeout_s=0.05).get("/a")


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="too long"):
        Client(UnixAddress(tmp_path / ("x" * 120))).get("/a")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_socket_of_another_group_gives_the_group_hint(daemon: FakeDaemon) -> None:
    os.chmod(daemon.socket_path, 0o660)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionRefused) as caught:
            Client(UnixAddress(daemon.socket_path)).get("/a")
    finally:
        os.seteuid(0)
    assert "penstock-users" in caught.value.hint
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("reply", [{"error": {"message": "no"}}, [], None])
def test_a_good_status_makes_no_good_reply_of_an_error_or_of_no_object(
    daemon: FakeDaemon, client: Client, reply: object
) -> None:
    daemon.script.replies = {
        "GET /a": (200, reply),
        "POST /a": (200, reply),
        "GET /text": (200, json.dumps(reply).encode()),
    }
    for call in (client.get, client.post, lambda _: client.text("/text")):
        with pytest.raises(ClientError, match="no" if reply else "not a JSON object"):
            call("/a")
    with pytest.raises(GenerationFailed), client.stream("/a", {}) as events:
        list(events)


def test_a_request_that_failed_is_no_failed_call(daemon: FakeDaemon, client: Client) -> None:
    daemon.script.replies = {"GET /v1/requests/a": (200, {"id": "a", "error": "out of memory"})}
    assert client.request("a")["error"] == "out of memory"
