from __future__ import annotations

import pytest

from appliance.api.wire import Dialect, dialect_of, error_body
from engine.errors import RequestError, Unavailable


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
