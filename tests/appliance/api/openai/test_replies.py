"""The short way to an event's bytes is held to the long one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.core.stream import Delta
from appliance.api.formats.text_reading import CallDelta
from appliance.api.openai.ask import chat_ask, completion_ask
from appliance.api.openai.replies import ReplyShape
from appliance.daemon.requests.request import ModelInfo, Peer, Request
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.tiny_tokenizers import byte_level

MODEL = ModelInfo("m", 100, 300, (), None, 0)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKS = {
    "chat": {},
    "usage": {"stream_options": {"include_usage": True}},
    "running usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "tools": {"tools": [TOOL]},
    "completion": {"messages": None, "prompt": "hi"},
}


def shape_of(fields: dict[str, object]) -> ReplyShape:
    body = {"stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
    is_chat = body["messages"] is not None
    ask = chat_ask(body, MODEL) if is_chat else completion_ask(body, MODEL, 8)
    sequences = [
        Sequence(1 + i, "id", i, [1], RunSpec(SamplingParams(9, seed=0)), Stamps(arrived_ns=0))
        for i in range(2)
    ]
    # A client chooses the name under which it asks for the model.
    request = Request("id", "/", '\x00"}]', Peer(), True, "", sequences)
    return ReplyShape(ask, request, Tokenizer(byte_level()), 7, "fp")


def said(shape: ReplyShape, index: int, text: str, **fields) -> Delta:
    return Delta(shape.request.sequences[index], text, token_ids=[5], num_tokens=3, **fields)


def choices_of(written: bytes) -> list[dict]:
    events = written.removesuffix(b"\n\n").split(b"\n\n")
    return [json.loads(one.removeprefix(b"data: "))["choices"][0] for one in events]


def last_event(written: bytes) -> bytes:
    assert written.endswith(b"\n\n")
    return written.removesuffix(b"\n\n").rpartition(b"\n\n")[2] + b"\n\n"


@pytest.mark.parametrize("fields", ASKS.values(), ids=ASKS)
@settings(deadline=None)
@given(text=st.text(min_size=1), index=st.integers(0, 1))
def test_a_later_event_has_the_bytes_of_a_first_one(fields, text, index):
    used, fresh = shape_of(fields), shape_of(fields)
    for each in (0, 1):
        used.events(said(used, each, "begun"))
    assert used.events(said(used, index, text)) == last_event(
        fresh.events(said(fresh, index, text))
    )


def test_an_event_with_an_end_or_a_call_is_written_in_full():
    shape = shape_of({})
    shape.events(said(shape, 0, "begun"))
    ended = shape.events(said(shape, 0, "x", finish_reason=FinishReason.LENGTH))
    first, last = choices_of(ended)
    assert (first["delta"], first["finish_reason"]) == ({"content": "x"}, None)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


@pytest.mark.parametrize("fields", [*ASKS.values(), {"return_token_ids": True}])
def test_an_end_has_an_event_of_its_own_without_text_tokens_or_calls(fields):
    shape = shape_of(fields)
    calls = [CallDelta(0, "c", "f", "{}")] if shape.ask.is_chat else []
    ended = shape.events(
        said(shape, 0, "x", reasoning="why" * shape.ask.is_chat, calls=calls,
             finish_reason=FinishReason.STOP)
    )  # fmt: skip
    *before, last = choices_of(ended)
    assert {choice["finish_reason"] for choice in before} == {None}
    assert last["finish_reason"] == "stop"
    assert not last.get("text")
    assert last.get("delta", {}) == {}
    assert not last["logprobs"]
    assert not last.get("token_ids")
    told = sum(len(choice.get("token_ids", ())) for choice in before)
    assert told == shape.ask.return_token_ids


def test_an_event_that_must_tell_ids_is_written_in_full():
    shape = shape_of({"return_token_ids": True})
    shape.events(said(shape, 0, "begun"))
    (choice,) = json.loads(shape.events(said(shape, 0, "x")).removeprefix(b"data: "))["choices"]
    assert choice["token_ids"] == [5]
