"""Bytes to stamped events, however they are cut up, and what is wrong with the others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bench.reply_events import MAX_HEAD_BYTES, Event, ReceivedReply, ReplyReader

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: str, ids: list[int] | None = None) -> bytes:
    return event({"choices": [{"text": text, "token_ids": ids, "index": 0}], "model": "m"})


BODY = [
    b": keep-alive\n\n",
    token("a", [1]),
    token("", [2]),
    token("bc", [3, 4]),
    token("", []),
    event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}, "error": None}),
    b"data: [DONE]\n\n",
]


def chunked(parts: list[bytes]) -> bytes:
    framed = b"".join(b"%X;x=1\r\n%b\r\n" % (len(part), part) for part in parts)
    return SSE + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def read(data: bytes, cuts: tuple[int, ...] = ()) -> tuple[ReceivedReply, ReplyReader]:
    """Feed the pieces, the first at 1 ns, the second at 2 ns, and so on."""
    reply = ReceivedReply(0)
    reader = ReplyReader(reply)
    ends = [*sorted(cuts), len(data)]
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
        if not reader.is_over:
            reader.feed(data[start:end], number)
    return reply, reader


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, len(chunked(BODY))), max_size=40), st.booleans())
def test_the_same_events_come_out_however_the_bytes_are_cut(cuts: list[int], joined: bool) -> None:
    data = chunked([b"".join(BODY)] if joined else BODY)
    reply, reader = read(data, tuple(min(cut, len(data)) for cut in cuts))
    assert [each.num_tokens for each in reply.events] == [1, 1, 2]
    assert (reply.prompt_tokens, reply.output_tokens, reply.problem) == (5, 4, None)
    assert reader.is_over
    assert reply.ended_ns is not None
    stamps = [each.at_ns for each in reply.events]
    assert stamps == sorted(stamps)


def test_an_event_has_the_stamp_of_the_read_that_completed_it() -> None:
    data = chunked(BODY)
    middle = data.index(b'"token_ids": [1]')
    reply, _ = read(data, (middle,))
    assert reply.events == [Event(2, 1), Event(2, 1), Event(2, 2)]
    assert reply.ended_ns == 2


def test_text_counts_as_a_token_where_ids_are_not_told() -> None:
    reply, _ = read(chunked([token("a b"), token(""), token("c"), BODY[-1]]))
    assert [each.num_tokens for each in reply.events] == [1, 1]


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 6}}


def test_usage_says_what_was_cached() -> None:
    reply, _ = read(chunked([event({"choices": [], "usage": USAGE}), BODY[-1]]))
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (9, 6, 3)


def test_a_body_may_end_with_the_connection() -> None:
    reply, reader = read(SSE + b"\r\n" + b"".join(BODY))
    assert not reader.is_over
    reader.close()
    assert (reader.is_over, reply.problem, len(reply.events)) == (True, None, 3)


def test_a_refusal_has_its_status_and_its_message() -> None:
    body = b'{"error": {"message": "the queue is full", "code": "queue_full"}}'
    head = b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n" % len(body)
    reply, reader = read(head + body)
    assert (reader.is_over, reply.status, reply.problem) == (True, 429, "the queue is full")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "without an answer"),
        (SSE + b"\r\n" + token("a"), "before the end"),
        (SSE + b"\r\n" + event({"error": {"message": "it broke"}}), "it broke"),
        (SSE + b"\r\n" + event({"error": "?"}), "broke off with an error"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "does not stream"),
        (b"HTTP/1.1 502 Bad\r\n\r\n<html>", "HTTP 502"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot be read"),
        (SSE + b"\r\ndata: {]\n\n", "cannot be read"),
        (SSE + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "cannot be read"),
        (b"x" * (MAX_HEAD_BYTES + 1), "no end"),
    ],
)
def test_whatever_a_server_does_wrong_is_a_sentence(data: bytes, problem: str) -> None:
    reply, reader = read(data)
    if not reader.is_over:
        reader.close()
    assert problem in (reply.problem or "")
    assert reply.ended_ns is None


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300), st.booleans())
def test_garbage_never_raises(data: bytes, has_head: bool) -> None:
    reply, reader = read((SSE + b"transfer-encoding: chunked\r\n\r\n" if has_head else b"") + data)
    if not reader.is_over:
        reader.close()
    assert reply.problem is not None or reply.ended_ns is not None
