"""The document is true: of the routes, of what is sent, and of what is answered."""

from __future__ import annotations

import asyncio
import os
import re
import threading

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from appliance.api.openapi import OPERATIONS, document
from appliance.api.routes import build_app
from appliance.http.access import AccessPolicy
from appliance.http.api_keys import new_key, read_keys
from appliance.http.listeners import bind_tcp
from appliance.http.server import ApiServer
from appliance.observe.log.reader import read_events, read_rows, read_usage
from engine.text.tokenizer import Tokenizer
from tests.appliance.logs import row, start
from tests.appliance.peers import ALICE, BOB, client_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.tui.frames import busy
from tests.worlds.daemon_parts import FakeAppliance
from tests.worlds.fake_encoders import FakeEncoder

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
ENDLESS = ("/v1/penstock/stream", "/v1/penstock/cache")
ANSWERED = [
    route for route, one in OPERATIONS.items() if one.reply is not None and route[1] not in ENDLESS
]


NOT_SAID_BY_SCHEMAS = re.compile(
    "context is|prompt is too long|exceeds the context|answer needs|the queue takes"
    "|cannot be compiled|cannot be together|needs `tools`|is not in `tools`|is not JSON"
    "|needs `logprobs`|is only allowed when `stream`|is no token id|is less than `n`"
    "|is more than max_tokens|two functions of the same name|this model reads text"
    "|must be 1 or more, or -1|no fill-in-the-middle|needs one prompt, of token ids|best_of` cannot"
    "|leaves nothing of the prompt|cannot be streamed|nothing but space|written as a string"
    "|`(prompt|input)` is empty|is no name of a model|name on the hub|has no tokens"
    "|there is no response"
    "|tool_choice.* is required|the role assistant only|`tools\\[|input\\[|instructions\\["
    "|content.* must be|content.* is required|is not supported|leaves out `"
    "|names no item|needs `store`|images` are not"
    "|context length is|as many as the model's vectors|the model has no prompts|must be one of"
    "|it may have one, or as many|does not know"
)
"""Why a body may be refused that satisfies its schema."""


class TrueAppliance(FakeAppliance):
    """Shows what a daemon shows, real frames and rows, and never stays drained."""

    def __init__(self, log_path):
        tokenizer = Tokenizer(byte_level(), chat_template=CHATML)
        ends = (tokenizer.special_id("<|end|>"),)
        super().__init__(tokenizer, eos_token_ids=ends)
        encoders = (FakeEncoder(tokenizer, "embedding"), FakeEncoder(tokenizer, "rerank"))
        self.text_encoders = {one.name: one for one in encoders}
        self._log_path = log_path
        log = start(log_path)
        log.event("warning", "worker.died", "it died", "ann")
        for number in range(3):
            log.record(row(f"cmpl-{number}"))
        assert log.close()

    def drain(self, by):
        self.drained_by = by

    def request_frames(self):
        return [msgspec.to_builtins(frame) for frame in busy(1).requests]

    def frame_json(self):
        return msgspec.json.encode(busy(1))

    def log_rows(self, query):
        return read_rows(self._log_path, query)

    def log_events(self, query):
        return read_events(self._log_path, query)

    def log_usage(self, query):
        return read_usage(self._log_path, query)


class Running:
    """The real server on loopback TCP, in a thread of its own."""

    def __init__(self, folder):
        self.key, line = new_key("ann", "operator")
        keys = folder / "keys"
        keys.write_text(line)
        keys.chmod(0o600)
        self._policy = AccessPolicy(keys=read_keys(keys))
        self._app = build_app(TrueAppliance(folder / "log.db"))
        self._is_ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self):
        self._stop = asyncio.Event()
        listeners = bind_tcp("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
        server = ApiServer(self._app, listeners, self._policy)
        await server.start()
        self._is_ready.set()
        await self._stop.wait()
        await server.stop(grace_s=1.0)

    def __enter__(self):
        self._thread.start()
        assert self._is_ready.wait(120)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, Running(tmp_path_factory.mktemp("api")) as running:
        patch.setattr("appliance.api.ollama.models.PULL", ("sh", "-c", 'echo {\\"folder\\": 1}'))
        yield running


@pytest.fixture(scope="module")
def schema(running):
    """The document as it is read over TCP; requests carry a key unless they make up one."""
    asked = {"headers": {"Authorization": f"Bearer {running.key}"}}
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json", **asked)


# Routes


def test_every_route_is_in_the_document_and_no_other(tmp_path):
    app = build_app(FakeAppliance(Tokenizer(byte_level())))
    served = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert set(OPERATIONS) == served
    described = document("1", needs_key=False)["paths"]
    assert {(m.upper(), path) for path, methods in described.items() for m in methods} == served


def test_operations_have_names_of_their_own():
    names = [operation.name for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere():
    text = msgspec.json.encode(document("1", needs_key=False)).decode()
    components = document("1", needs_key=False)["components"]
    for kind, name in re.findall(r'"#/components/(\w+)/(\w+)"', text):
        assert name in components[kind]


async def test_a_key_is_needed_where_it_is_asked_for():
    appliance = FakeAppliance(Tokenizer(byte_level()))
    over_tcp = (await client_of(appliance, BOB).get("/openapi.json")).json()
    assert over_tcp["security"] == [{"key": []}]
    assert over_tcp["paths"]["/health"]["get"]["security"] == []
    on_the_socket = (await client_of(appliance, ALICE).get("/openapi.json")).json()
    assert on_the_socket["security"] == []


# Requests and replies


def check_taken(case, reply, validator) -> None:
    """What satisfies its schema is taken, and what does not is refused."""
    if validator is None:
        is_valid = case.meta.generation.mode.is_positive
    else:
        is_json, body = not isinstance(case.body, schemathesis.core.NotSet), case.body
        if isinstance(body, bytes):
            try:
                body = msgspec.json.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                is_json = False
        is_valid = is_json and validator.is_valid(body)
    if is_valid and reply.status_code == 400:
        assert NOT_SAID_BY_SCHEMAS.search(reply.text), (case.body, case.query, reply.text)
    if not is_valid and validator is not None:
        wrong = _unpardoned(validator, body) if is_json else ["not JSON"]
        assert reply.status_code != 200 or not wrong, f"{wrong}\n{reply.text}"


def _unpardoned(validator, body) -> list[str]:
    """Leave out what earlier messages have of other APIs, which refuses no request."""

    def is_past(path) -> bool:
        return len(path) > 1 and path[0] == "messages" and path[1] < len(body["messages"]) - 1

    errors = validator.iter_errors(body)
    return [error.message for error in errors if not is_past(error.instance_path)]


def validator_of(operation) -> jsonschema_rs.Draft202012Validator | None:
    """Of an operation's body, which may refer to any component."""
    described = OPERATIONS[operation.method.upper(), operation.path].body
    if described is None:
        return None
    return jsonschema_rs.Draft202012Validator(
        {**described, "components": operation.schema.raw_schema["components"]}
    )


CASES = int(os.environ.get("PENSTOCK_OPENAPI_CASES", "15"))
"""Of each operation and kind; 60 are more than 5,000 in all."""
SOMETHING = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(("method", "path"), ANSWERED)
@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_what_is_sent_by_the_document_is_answered_by_it(schema, running, method, path, mode):
    operation = schema[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and OPERATIONS[method, path].is_open:
        return  # nothing can be wrong, not even a key
    statuses, validator = set(), validator_of(operation)

    def ask(case):
        reply = case.call(headers={"Authorization": f"Bearer {running.key}"})
        case.validate_response(reply, checks=CHECKS)
        check_taken(case, reply, validator)
        statuses.add(reply.status_code)

    asked = given(operation.as_strategy(generation_mode=mode))(ask)
    SOMETHING(asked)()
    assert statuses - {401}
    if mode is schemathesis.GenerationMode.POSITIVE and "{id}" not in path:
        if 200 not in statuses:  # what is drawn depends on the constants of all loaded modules
            settings(SOMETHING, max_examples=20 * CASES)(asked)()
        assert 200 in statuses


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_without_a_key_only_health_is_told(running, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        reply = httpx.request(method, running.url + path, headers=headers)
        if path == "/health":
            assert reply.status_code == 200
        else:
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in reply.headers


def test_a_model_and_a_request_are_answered_as_the_document_says(schema, running):
    request_id = busy(1).requests[0].id
    for path, known in (("/v1/models/{id}", "fake/tiny-model"), ("/v1/requests/{id}", request_id)):
        case = schema[path]["GET"].Case(path_parameters={"id": known})
        reply = case.call(headers={"Authorization": f"Bearer {running.key}"})
        assert reply.status_code == 200
        case.validate_response(reply, checks=CHECKS)


def test_a_reply_that_is_not_as_described_would_be_found(schema, running):
    reply = schema["/health"]["GET"].Case().call()
    with pytest.raises(schemathesis.errors.FailureGroup):
        schema["/version"]["GET"].Case().validate_response(reply, checks=CHECKS)
