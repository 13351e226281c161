"""Texts of clients that take long to read, or for ever: each fails alone, off the loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading

import psutil
import pytest

from appliance.api import endpoints
from appliance.api.core import fair_threads
from appliance.api.core.body_threads import MAX_INLINE_BYTES
from appliance.daemon.requests.request import Peer
from engine.text import reading
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PROMPT = {"prompt": "hi", "max_tokens": 2}
WIDE = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(600)}
DEEP: dict = {}
for _ in range(400):
    DEEP = {"items": DEEP}
SCHEMAS = {
    "itself": {"$ref": "#"},
    "deep": DEEP,
    "wide": {"type": "object", "properties": WIDE, "$defs": {"d": {"enum": ["x" * 100] * 50}}},
    "long": {"enum": ["x" * 1000] * 60},
    "pattern": {"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"},
}
GRAMMARS = {
    "names": "root ::= " + "a " * 7000,
    "groups": "root ::= " + "(a)" * 5000,
    "nested": "root ::= " + "(" * 8000 + '"a"' + ")" * 8000,
    "itself": "root ::= root",
    "alternatives": "root ::= " + "|".join(['"a"'] * 5000),
    "lark": "start: " + "(" * 8000 + '"a"' + ")" * 8000,
    "repeated": "start: /((a{1,500}){1,500}){1,500}/",
    "escape": 'root ::= "\\',
}
SLOW_REGEX = "(a{1000}){1000}"
PATTERNS = {"nested": "(" * 8000 + "a" + ")" * 8000, "repeated": "((a{1,900}){1,900}){1,900}"}


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


def tool(schema):
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


BODIES = {
    **{("/v1/chat/completions", "schema", n): {**CHAT, "response_format": named(s)}
       for n, s in SCHEMAS.items()},
    **{("/v1/chat/completions", "tools", n): {**CHAT, "tools": tool(s), "tool_choice": "required"}
       for n, s in SCHEMAS.items()},
    **{("/v1/chat/completions", "grammar", n): {**CHAT, "grammar": g}
       for n, g in GRAMMARS.items()},
    **{("/v1/completions", "grammar", n): {**PROMPT, "guided_grammar": g}
       for n, g in GRAMMARS.items()},
    **{("/v1/completions", "regex", n): {**PROMPT, "guided_regex": g}
       for n, g in PATTERNS.items()},
    **{("/v1/completions", "text", n): {**PROMPT, "guided_json": json.dumps(s)}
       for n, s in SCHEMAS.items()},
    **{("/v1/responses", "schema", n): {
        "input": "hi", "max_output_tokens": 2,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": s}}}
       for n, s in SCHEMAS.items()},
    **{("/v1/messages", "tools", n): {
        **CHAT, "model": "fake/tiny-model",
        "tools": [{"name": "f", "input_schema": {"type": "object", **s}}],
        "tool_choice": {"type": "any"}}
       for n, s in SCHEMAS.items()},
    **{("/api/chat", "format", n): {"messages": CHAT["messages"], "format": s, "stream": False}
       for n, s in SCHEMAS.items()},
    **{("/api/generate", "format", n): {"prompt": "hi", "format": s, "stream": False}
       for n, s in SCHEMAS.items()},
}  # fmt: skip


def fake(template=CHATML):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = dataclasses.replace(
        appliance.model, eos_token_ids=(257,), vocab_size=300, max_model_len=4096
    )
    return appliance


@pytest.mark.parametrize(("path", "_kind", "_name"), BODIES, ids=lambda part: part)
async def test_a_text_that_is_long_to_read_fails_or_serves_its_request_alone(
    tmp_path, monkeypatch, path, _kind, _name
):
    threads = []
    read = READER.read
    monkeypatch.setattr(
        READER, "read", lambda *job: threads.append(threading.current_thread()) or read(*job)
    )
    appliance = fake()
    threads.clear()
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.http.post(path, json=BODIES[path, _kind, _name])
        assert reply.status_code in (200, 400), reply.text
        assert threading.main_thread() not in threads
        assert (await served.chat(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("path", endpoints.ENDPOINTS)
async def test_a_body_is_decoded_on_the_loop_only_if_it_is_short(tmp_path, monkeypatch, path):
    threads = []
    endpoint = endpoints.ENDPOINTS[path]

    def decode(*body):
        threads.append(threading.current_thread())
        return endpoint.decode(*body)

    spy = dataclasses.replace(endpoint, decode=decode)
    monkeypatch.setitem(endpoints.ENDPOINTS, path, spy)
    async with serving(fake(), tmp_path / "api.sock") as served:
        for num_bytes in (0, MAX_INLINE_BYTES, 20_000):
            body = {**CHAT, "prompt": "hi", "input": "hi", "user": "x" * num_bytes}
            await served.http.post(path, json=body)
    on_loop = [thread is threading.main_thread() for thread in threads]
    assert on_loop == [True, False, False]


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "hi", "previous_response_id": "resp_1"}',
        rb'{"input": "hi", "previous_response_\u0069d": "resp_1"}',
        '{"input": "hi", "previous_response_id": "resp_1"}'.encode("utf-16"),
        b'{"input": [{"type": "item_reference", "id": "msg_1"}]}',
    ],
)
async def test_what_continues_a_conversation_is_not_read_on_the_loop(tmp_path, monkeypatch, body):
    threads = []
    endpoint = endpoints.ENDPOINTS["/v1/responses"]

    def read(*asked):
        threads.append(threading.current_thread())
        return endpoint.read(*asked)

    spy = dataclasses.replace(endpoint, read=read)
    monkeypatch.setitem(endpoints.ENDPOINTS, "/v1/responses", spy)
    async with serving(fake(), tmp_path / "api.sock") as served:
        reply = await served.http.post("/v1/responses", content=body)
    assert reply.status_code in (400, 404)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ 'a' * (messages | length) * 10**14 }}", "too_costly"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "invalid_value"),
    ],
)
async def test_a_template_that_takes_too_much_fails_the_chat_and_nothing_else(
    tmp_path, template, code
):
    async with serving(fake(template), tmp_path / "api.sock") as served:
        reply = await served.chat(max_tokens=2)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
        assert (await served.complete(max_tokens=2)).status_code == 200


SLOW_TO_RENDER = (
    "{% for one in messages %}{% for i in range(9 * one.content | length) %}"
    "{% for j in range(9 * one.content | length) %}{% endfor %}{% endfor %}{% endfor %}" + CHATML
)
"""By the square of each message's length."""
LONG_CHAT = CHAT | {"messages": [{"role": "user", "content": "x" * 10_000}]}
"""Which that template renders for minutes."""


async def test_no_chat_waits_for_others_that_render_slowly(tmp_path, monkeypatch):
    gate, late, read = threading.Event(), [], READER._read

    def slow(job, body, how, kept):
        if how == reading.How.FORKED:
            late.append(job)
            assert gate.wait(120)
        return read(job, body, how, kept)

    monkeypatch.setattr(READER, "_read", slow)
    async with serving(fake(SLOW_TO_RENDER), tmp_path / "api.sock") as served:

        async def post(body):
            return await served.http.post("/v1/chat/completions", json=body, timeout=120)

        waiting = [asyncio.create_task(post(LONG_CHAT)) for _ in range(2)]
        try:
            await until(lambda: late or waiting[0].done())
            for _ in range(3):
                assert (await asyncio.wait_for(post(CHAT), 60)).status_code == 200
            assert (len(late), [one.done() for one in waiting]) == (1, [False] * 2)
        finally:
            gate.set()
        for reply in await asyncio.gather(*waiting):
            code = reply.json()["error"]["code"]
            assert (reply.status_code, code) == (400, "too_costly")
    assert late == ["render"] * 2  # each once


async def test_a_chat_whose_reader_is_killed_is_answered(tmp_path):
    async with serving(fake(), tmp_path / "api.sock") as served:
        assert (await served.chat(max_tokens=2)).status_code == 200
        os.kill(READER.pid, signal.SIGKILL)
        assert (await served.chat(max_tokens=2)).status_code == 200


async def test_the_loop_is_free_while_a_short_prompt_is_tokenized(tmp_path, monkeypatch):
    appliance, gate, begun = fake(), threading.Event(), []
    encode = appliance.tokenizer.encode

    def slow(*args, **options):
        begun.append(args)
        gate.wait(5)  # not for ever: the loop may be what waits
        return encode(*args, **options)

    monkeypatch.setattr(appliance.tokenizer, "encode", slow)
    async with serving(appliance, tmp_path / "api.sock") as served:
        asked = asyncio.create_task(served.http.post("/v1/completions", json=PROMPT))
        await until(lambda: begun)
        assert not gate.is_set()
        assert (await served.http.get("/health")).status_code == 200
        assert not asked.done()
        gate.set()
        assert (await asked).status_code == 200


async def test_a_slow_text_begins_again_in_a_line_of_its_own(tmp_path, monkeypatch):
    appliance, gate, late = fake(), threading.Event(), []
    encode = appliance.tokenizer.encode

    def slow(text, *args, **options):
        if text != "slow":
            return encode(text, *args, **options)
        if not reading.asker_here().is_late:
            raise reading.Late
        late.append(text)
        assert gate.wait(120)
        return encode(text, *args, **options)

    monkeypatch.setattr(appliance.tokenizer, "encode", slow)
    async with serving(appliance, tmp_path / "api.sock") as served:
        post, body = served.http.post, PROMPT | {"prompt": "slow"}
        waiting = [asyncio.create_task(post("/v1/completions", json=body)) for _ in range(9)]
        try:
            await until(lambda: late)
            reply = await asyncio.wait_for(post("/v1/completions", json=PROMPT), 60)
            assert (reply.status_code, len(late)) == (200, 1)
        finally:
            gate.set()
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}


async def test_no_chat_waits_for_grammars_of_others_and_no_grammar_for_late_ones(
    tmp_path, monkeypatch
):
    gate, late, read = threading.Event(), [], READER._read

    def slow(job, body, how, kept):
        if SLOW_REGEX.encode() not in body:  # in time, also on a busy machine
            return read(job, body, reading.How.FORKED if how == reading.How.YIELDING else how, kept)
        if how == reading.How.YIELDING:
            raise reading.Late
        late.append(job)
        assert gate.wait(120)
        return b"{}"

    monkeypatch.setattr(READER, "_read", slow)
    monkeypatch.setattr(fair_threads, "peer_of", lambda http: Peer(key=http.headers["x-key"]))
    regex = {**PROMPT, "guided_regex": SLOW_REGEX}
    long = {"x": "x" * MAX_INLINE_BYTES}  # such bodies are decoded in a thread
    async with serving(fake(), tmp_path / "api.sock") as served:

        async def post(key, body):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            reply = await served.http.post(path, json=body, headers={"x-key": key}, timeout=120)
            return reply.status_code

        bodies = [(key, body) for key in "abc" for body in (regex, regex | long)]
        waiting = [asyncio.create_task(post(*one)) for one in bodies]
        try:
            await until(lambda: late)
            for body in (CHAT, CHAT | long, regex | {"guided_regex": "a+"}):
                assert await asyncio.wait_for(post("d", body), 60) == 200
            assert (len(late), [one.done() for one in waiting]) == (1, [False] * 6)
        finally:
            gate.set()
        assert await asyncio.gather(*waiting) == [200] * 6


async def test_a_grammar_is_read_no_longer_than_its_client_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "YIELDING_S", 60.0)
    READER.start()
    reader = psutil.Process(READER.pid)
    before = set(reader.children())
    async with serving(fake(), tmp_path / "api.sock") as served:
        _, writer = await served.post("/v1/completions", {**PROMPT, "guided_regex": SLOW_REGEX})
        await until(lambda: set(reader.children()) - before)
        (fork,) = set(reader.children()) - before
        fork.suspend()
        writer.close()
        await until(lambda: fork not in reader.children())
