"""What is kept of an arrival; errors in the words of each API."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from appliance.api.core.dialects import Dialect, dialect_of, error_body
from appliance.api.core.wire import Arrival, arrival_of, client_request_id, ignored_header
from appliance.daemon.requests.request import Peer
from appliance.daemon.survival.journal import anew
from engine.errors import RequestError, Unavailable


async def write_part(part: bytes) -> None:
    """Nothing is streamed here."""


def test_a_request_finds_what_was_kept_for_it():
    scope = {"type": "http", "headers": []}
    arrival = Arrival(write_part, Peer(key="ann"))
    arrival.put_into(scope)
    assert arrival_of(Request(scope)) is arrival
    assert arrival.is_known()


def test_each_has_an_id_of_its_own_which_says_what_is_asked():
    first, second = Arrival(write_part), Arrival(write_part)
    assert first.request_id != second.request_id
    assert first.request_id.startswith("req-")
    first.generates("cmpl-", anew)
    assert first.request_id.startswith("cmpl-")


def test_its_time_begins_when_its_body_is_whole():
    arrival = Arrival(write_part)
    before = arrival.arrived_ns
    arrival.has_body(anew)
    assert arrival.arrived_ns > before
    assert arrival.received_at.endswith("Z")


def test_a_clients_own_id_is_kept_without_what_could_harm():
    scope = {"type": "http", "headers": [(b"x-request-id", b"job 7<script>/")]}
    assert client_request_id(Request(scope)) == "job7script"
    assert client_request_id(Request({"type": "http", "headers": []})) is None


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", Dialect.ANTHROPIC),
        ("/v1/messagesque", Dialect.OPENAI),
        ("/api/chat", Dialect.OLLAMA),
        ("/apiary", Dialect.OPENAI),
        ("/v1/chat/completions", Dialect.OPENAI),
        ("/", Dialect.OPENAI),
    ],
)
def test_a_path_belongs_to_an_api(path, dialect):
    assert dialect_of(path) is dialect


def test_an_error_is_said_in_each_apis_words():
    error = RequestError("no", code="c", param="p", hint="try")
    assert error_body(Dialect.OLLAMA, error) == {"error": "no; try"}
    told = {"type": "invalid_request_error", "message": "no; try"}
    assert error_body(Dialect.ANTHROPIC, error, "msg_1") == {
        "type": "error",
        "error": told,
        "request_id": "msg_1",
    }
    assert error_body(Dialect.OPENAI, error)["error"]["param"] == "p"
    busy = error_body(Dialect.ANTHROPIC, Unavailable("later", code="busy"))
    assert busy["error"]["type"] == "overloaded_error"


def test_ignored_fields_are_named_in_a_header_that_no_name_can_end_or_fill():
    names = ["seed\r\nset-cookie: a", "é", "", "x" * 500, *map(str, range(100))]
    (value,) = ignored_header(names).values()
    assert value.startswith(f"seedset-cookiea, {'x' * 64}, 0, 1, ")
    assert len(value.split(", ")) <= 20
    assert ignored_header([]) == {}
