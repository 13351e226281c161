from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from appliance.api.openai import replies
from tests.appliance.api_server import events, fill, says
from tests.worlds.daemon_parts import until

# Replies


async def test_a_streamed_chat_has_openais_shape(served, appliance):
    says(appliance, "ab")
    reply = await served.chat(stream=True, max_tokens=9)
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": ""},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {reply.headers["x-request-id"]}
    assert all("usage" not in chunk for chunk in chunks)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"max_tokens": 2}),
        ("/v1/responses", {"input": "a"}),
        ("/api/chat", CHAT),
        ("/api/generate", {"prompt": "a"}),
    ],
)
async def test_no_proxy_may_hold_a_stream_back(served, path, body):
    reply = await served.http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-accel-buffering"] == "no"


async def test_a_stream_of_many_prompts_keeps_their_indexes_apart(served):
    reply = await served.complete(prompt=["a", "b", "c"], stream=True, max_tokens=6)
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(reply.text):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "aaa", 1: "bbb", 2: "ccc"}


async def test_text_with_a_token_that_the_model_has_not_is_refused(served, appliance):
    appliance.model = dataclasses.replace(appliance.model, vocab_size=100)
    reply = await served.complete(prompt="a~")  # bytes are ids here; ~ is 126
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "prompt")
    assert "100" in error["message"]
    assert not appliance.live


async def test_token_ids_are_returned_on_request(served):
    whole = (await served.complete(prompt=[104, 105], max_tokens=3, return_token_ids=True)).json()
    assert whole["choices"][0]["prompt_token_ids"] == [104, 105]
    assert whole["choices"][0]["token_ids"] == [104, 105, 104]
    stream = await served.complete(
        prompt=[104, 105], max_tokens=3, return_token_ids=True, stream=True
    )
    choices = [chunk["choices"][0] for chunk in events(stream.text)]
    assert choices[0]["prompt_token_ids"] == [104, 105]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [i for choice in choices for i in choice["token_ids"]] == [104, 105, 104]


async def test_a_stop_string_ends_the_reply_and_what_is_counted(served, appliance):
    says(appliance, "abc STOP and so on")
    appliance.burst = 4
    for stream in (False, True):
        reply = await served.complete(stop=["STOP"], max_tokens=40, stream=stream)
        choices = (
            [c["choices"][0] for c in events(reply.text)] if stream else reply.json()["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == "abc "
        assert choices[-1]["finish_reason"] == "stop"
    kept = len(appliance.tokenizer.encode("abc STOP", False))
    assert [num_tokens for _seq_id, num_tokens in appliance.stopped] == [kept, kept]
    assert reply_usage(await served.complete(stop="STOP", max_tokens=40)) == kept


def reply_usage(reply) -> int:
    return reply.json()["usage"]["completion_tokens"]


async def test_the_request_carries_who_asked_and_when(served, appliance):
    await served.http.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "job 7<script>/"}
    )
    (request,) = appliance.submitted
    assert request.client_request_id == "job7script"
    assert request.request_id.startswith("cmpl-")
    assert request.endpoint == "/v1/completions"
    assert request.prompt_text == "hi"
    assert request.peer.uid is not None
    (sequence,) = request.sequences
    assert sequence.prompt_token_ids == appliance.tokenizer.encode("hi")
    assert sequence.stamps.arrived_ns <= sequence.stamps.tokenized_ns
    assert request.received_at.endswith("Z")


async def test_a_chat_is_rendered_and_gets_no_second_begin_token(served, appliance):
    await served.chat()
    (sequence,) = appliance.submitted[0].sequences
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert appliance.submitted[0].prompt_text == text
    assert sequence.prompt_token_ids == appliance.tokenizer.encode(text, False)


async def test_a_long_text_is_tokenized_all_the_same(served, appliance):
    appliance.model = appliance.model.__class__("m", 20_000, 300, (), None, 0)
    text = "hello wo" * 1000
    await served.complete(prompt=text, max_tokens=1)
    ids = appliance.submitted[0].sequences[0].prompt_token_ids
    assert ids == appliance.tokenizer.encode(text)


async def test_generation_replies_carry_their_id_and_time(served):
    good = await served.complete()
    bad = await served.complete(temperature=9)
    for reply in (good, bad):
        assert reply.headers["x-request-id"].startswith("cmpl-")
        assert int(reply.headers["openai-processing-ms"]) >= 0
    assert good.headers["x-request-id"] == good.json()["id"]


# Ends


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_while_it_waits_is_cancelled(served, appliance, stream):
    appliance.gate.clear()
    body = {"prompt": "hello", "stream": stream}
    _reader, writer = await served.post("/v1/completions", body)
    await until(lambda: appliance.live)
    writer.close()
    await until(lambda: appliance.closed)
    (request,) = appliance.submitted
    assert request.cancelled_by == "client"
    assert appliance.closed == [(request.request_id, 499)]


async def test_a_client_that_hangs_up_in_mid_stream_is_cancelled(served, appliance):
    appliance.interval_s = 0.01
    body = {"prompt": "hello", "stream": True, "max_tokens": 250}
    reader, writer = await served.post("/v1/completions", body)
    await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: appliance.closed)
    (request,) = appliance.submitted
    assert request.sequences[0].num_output_tokens < 250
    assert appliance.closed == [(request.request_id, 499)]


async def test_a_client_that_hangs_up_in_its_body_leaves_nothing(served, appliance):
    _reader, writer = await served.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await served.complete()).status_code == 200
    assert len(appliance.submitted) == 1


async def test_cancelling_by_id_ends_the_reply_with_abort(served, appliance):
    (waiting,) = await fill(served, 1)
    (request_id,) = appliance.live
    reply = await served.http.post(f"/v1/requests/{request_id}/cancel")
    assert reply.json() == {"id": request_id, "status": "cancelled"}
    choices = (await waiting).json()["choices"]
    assert choices[0]["finish_reason"] == "abort"
    again = await served.http.post(f"/v1/requests/{request_id}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")
    assert appliance.closed == [(request_id, 200)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_drain_cuts_is_told_so(served, appliance, stream):
    appliance.gate.clear()
    waiting = asyncio.create_task(served.complete(stream=stream))
    await until(lambda: appliance.live)
    appliance.cancel(next(iter(appliance.live)), "drain")
    reply = await waiting
    error = events(reply.text)[-1]["error"] if stream else reply.json()["error"]
    assert error["code"] == "draining"
    assert reply.status_code == (200 if stream else 503)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_while_replying_is_answered_logged_and_closed(
    served, appliance, stream, monkeypatch, caplog
):
    def broken(self, delta, *rest):
        raise ZeroDivisionError("the bug")

    monkeypatch.setattr("appliance.api.openai.replies.ReplyShape._choice", broken)
    reply = await served.complete(stream=stream)
    error = events(reply.text)[-1]["error"] if stream else reply.json()["error"]
    assert (error["code"], error["type"]) == ("internal", "server_error")
    assert reply.status_code == (200 if stream else 500)
    assert reply.headers["x-request-id"] == appliance.submitted[0].request_id
    assert "the bug" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_waiting_stream_has_its_headers_and_is_kept_alive(served, appliance, monkeypatch):
    monkeypatch.setattr("appliance.api.core.respond.KEEP_ALIVE_S", 0.02)
    appliance.gate.clear()
    async with served.http.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "stream": True}
    ) as reply:
        assert reply.headers["x-request-id"] in appliance.live
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(2)] == [": keep-alive queue=1", ""]
        appliance.gate.set()
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_others_are_served_while_a_large_reply_is_written(
    served, appliance, stream, is_chat, monkeypatch
):
    name = "chat_logprobs" if is_chat else "completion_logprobs"
    real = getattr(replies, name)
    is_writing, may_go_on = threading.Event(), threading.Event()

    def held_up(*args, **fields):
        is_writing.set()
        assert may_go_on.wait(120)
        return real(*args, **fields)

    monkeypatch.setattr(replies, name, held_up)
    appliance.burst = 200  # so that a stream has much to tell at once
    asked = {"logprobs": True, "top_logprobs": 20} if is_chat else {"logprobs": 20}
    ask = served.chat if is_chat else served.complete
    large = asyncio.create_task(ask(**asked, max_tokens=200, stream=stream))
    await until(is_writing.is_set)
    assert (await served.complete(max_tokens=1)).status_code == 200
    assert not large.done()
    may_go_on.set()
    reply = await large
    told = [one["choices"][0] for one in (events(reply.text) if stream else [reply.json()])]
    column = "content" if is_chat else "tokens"
    tokens = [one for choice in told if choice["logprobs"] for one in choice["logprobs"][column]]
    assert len(tokens) == 200


async def test_many_at_once_all_get_their_own_answer(served, appliance):
    appliance.max_queued = 100

    async def ask(number: int) -> None:
        reply = await served.complete(prompt=f"{number:03}", max_tokens=4, stream=bool(number % 2))
        choices = (
            [chunk["choices"][0] for chunk in events(reply.text)]
            if number % 2
            else reply.json()["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == f"{number:03}"

    await asyncio.gather(*(ask(number) for number in range(60)))


async def test_a_reader_that_stalls_is_waited_for_and_misses_nothing(served, appliance):
    appliance.model = appliance.model.__class__("m", 30_000, 300, (), None, 0)
    body = {"prompt": "hello", "stream": True, "max_tokens": 8000}
    reader, writer = await served.post("/v1/completions", body)
    await until(lambda: appliance.submitted and appliance.submitted[0].is_finished)
    assert not appliance.closed
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += await reader.read(2**16)
    await until(lambda: appliance.closed)
    writer.close()
    assert appliance.closed[0][1] == 200
    output_ids = appliance.submitted[0].sequences[0].output_token_ids
    texts = [chunk["choices"][0]["text"] for chunk in events(unchunked(received))]
    assert "".join(texts) == appliance.tokenizer.decode(output_ids)


def unchunked(received: bytes) -> str:
    """The body of a reply with chunked encoding."""
    rest = received.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body.decode()


async def test_tokens_without_text_of_their_own_send_no_chunk_and_are_in_the_usage(
    served, appliance
):
    says(appliance, "日本")  # bytes of characters, that mean nothing alone
    num_tokens = len(appliance.tokenizer.encode("日本", add_special_tokens=False))
    assert num_tokens > 2
    asked = {"stream": True, "max_tokens": num_tokens, "stream_options": {"include_usage": True}}
    for more, num_chunks in (({}, 2), ({"return_token_ids": True}, num_tokens)):
        *chunks, last = events((await served.complete(**asked, **more)).text)
        tokens = [
            one for one in chunks if one["choices"][0]["text"] or one["choices"][0].get("token_ids")
        ]
        assert len(tokens) == num_chunks
        assert last["usage"]["completion_tokens"] == num_tokens
