from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from appliance.wire import MAX_BODY_BYTES
from engine.errors import Unavailable
from engine.tokenizer import Tokenizer
from tests.appliance.api_server import events, serving
from tests.fakes import FakeAppliance, until
from tests.tiny_tokenizers import CHATML, byte_level


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served


def says(appliance, text: str):
    """Make the appliance answer with a text, whatever the prompt."""
    ids = appliance.tokenizer.encode(text, add_special_tokens=False)
    appliance.script = lambda prompt: ids


# The official client


async def test_the_official_client_completes(served):
    reply = await served.openai.completions.create(
        model="fake/tiny-model", prompt=[[104, 105], [106]], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert [choice.finish_reason for choice in reply.choices] == ["length", "length"]
    decode = served.appliance.tokenizer.decode
    assert [choice.text for choice in reply.choices] == [
        decode([104, 105, 104, 105]),
        decode([106] * 4),
    ]
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
    }
    assert reply.id == reply._request_id == served.appliance.submitted[0].request_id
    assert reply.object == "text_completion"
    assert reply.system_fingerprint.startswith("fp_")


async def test_the_official_client_streams_a_chat_as_it_answers_it(served, appliance):
    says(appliance, "hello wörld 😀!")
    client = served.openai
    asked = {"model": "fake/tiny-model", "messages": [{"role": "user", "content": "hi"}]}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "hello wörld 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 5
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_the_official_client_reads_logprobs(served):
    client = served.openai
    chat = await client.chat.completions.create(
        model="fake/tiny-model",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    (entry, *_rest) = chat.choices[0].logprobs.content
    assert len(chat.choices[0].logprobs.content) == 3
    assert entry.logprob == -0.5
    assert [top.logprob for top in entry.top_logprobs] == [-1.0, -2.0]
    assert bytes(entry.bytes).decode() == entry.token
    completion = await client.completions.create(
        model="fake/tiny-model", prompt="aä", max_tokens=4, logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs.tokens == ["<|begin|>", "a", "bytes:\\xc3", "bytes:\\xa4"]
    assert logprobs.text_offset == [0, 0, 1, 1]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert [len(top) for top in logprobs.top_logprobs] == [3, 3, 3, 3]


async def test_the_synchronous_client_works_too(served):
    def complete() -> list[str]:
        transport = httpx.HTTPTransport(uds=str(served.path))
        with (
            httpx.Client(transport=transport) as http,
            openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http) as client,
        ):
            whole = client.completions.create(model="fake/tiny-model", prompt="hello")
            with client.completions.create(
                model="fake/tiny-model", prompt="hello", stream=True
            ) as stream:
                return [whole.choices[0].text, "".join(c.choices[0].text for c in stream)]

    whole, streamed = await asyncio.to_thread(complete)
    assert whole == streamed
    assert whole.startswith("hello")


async def test_the_official_client_raises_its_own_errors(served, appliance):
    client = served.openai
    complete = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await complete(model="fake/tiny-model", prompt="hi", temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await complete(model="gpt-9", prompt="hi")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="fake/tiny-model", input="hi")
    appliance.max_queued = 1
    (waiting,) = await fill(served, 1)
    with pytest.raises(openai.RateLimitError) as full:
        await complete(model="fake/tiny-model", prompt="hi")
    assert full.value.code == "queue_full"
    assert full.value.response.headers["retry-after"] == "2"
    assert full.value.response.headers["retry-after-ms"] == "1500"
    appliance.gate.set()
    assert (await waiting).status_code == 200
    appliance.fail_after = 2
    with pytest.raises(openai.InternalServerError, match="died too often") as failed:
        await complete(model="fake/tiny-model", prompt="hi")
    assert failed.value.response.headers["x-should-retry"] == "false"
    appliance.unavailable = Unavailable("loading the model", code="model_loading")
    with pytest.raises(openai.InternalServerError) as loading:
        await complete(model="fake/tiny-model", prompt="hi")
    assert (loading.value.status_code, loading.value.code) == (503, "model_loading")


async def test_the_official_client_sees_an_error_in_a_stream(served, appliance):
    appliance.fail_after = 3
    stream = await served.openai.completions.create(
        model="fake/tiny-model", prompt="hello", stream=True
    )
    assert (await anext(stream)).object == "text_completion"
    with pytest.raises(openai.APIError, match="died too often") as error:
        _ = [chunk async for chunk in stream]
    assert error.value.code == "internal"


async def test_the_official_client_lists_the_model(served):
    client = served.openai
    assert [model.id async for model in client.models.list()] == ["fake/tiny-model"]
    assert (await client.models.retrieve("fake/tiny-model")).owned_by == "penstock"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    raw = await served.http.get("/v1/models/fake/tiny-model")
    assert raw.json()["max_model_len"] == 256


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


async def test_a_stream_of_many_prompts_keeps_their_indexes_apart(served):
    reply = await served.complete(prompt=["a", "b", "c"], stream=True, max_tokens=6)
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(reply.text):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "aaa", 1: "bbb", 2: "ccc"}


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


async def fill(served, num_requests: int) -> list[asyncio.Task]:
    """Requests that wait at the gate."""
    served.appliance.gate.clear()
    tasks = [asyncio.create_task(served.complete(prompt=["a"])) for _ in range(num_requests)]
    await until(lambda: len(served.appliance.live) == num_requests)
    return tasks


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


async def test_a_dead_engine_is_503(served, appliance):
    appliance.fail_after = 1
    waiting = await fill(served, 1)
    appliance.unavailable = Unavailable("no worker is left", code="engine_dead")
    appliance.gate.set()
    reply = await waiting[0]
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_while_replying_is_answered_logged_and_closed(
    served, appliance, stream, monkeypatch, caplog
):
    def broken(self, delta, *rest):
        raise ZeroDivisionError("the bug")

    monkeypatch.setattr("appliance.replies.ReplyShape._choice", broken)
    reply = await served.complete(stream=stream)
    error = events(reply.text)[-1]["error"] if stream else reply.json()["error"]
    assert (error["code"], error["type"]) == ("internal", "server_error")
    assert reply.status_code == (200 if stream else 500)
    assert reply.headers["x-request-id"] == appliance.submitted[0].request_id
    assert "the bug" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_waiting_stream_has_its_headers_and_is_kept_alive(served, appliance, monkeypatch):
    monkeypatch.setattr("appliance.generation.KEEP_ALIVE_S", 0.02)
    appliance.gate.clear()
    async with served.http.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "stream": True}
    ) as reply:
        assert reply.headers["x-request-id"] in appliance.live
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(2)] == [": keep-alive", ""]
        appliance.gate.set()
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


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


# Bad input


async def test_bad_bodies_are_answered_and_the_next_request_is_served(served):
    for body in (b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"prompt": "\\ud800"}', b"null"):
        reply = await served.http.post("/v1/completions", content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert (await served.complete()).status_code == 200


async def test_what_does_not_fit_the_model_is_refused_with_the_numbers(served, appliance):
    reply = await served.complete(prompt="x y " * 100)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = await served.complete(prompt="x" * 2_000_000)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = await served.complete(prompt=[1] * 250, max_tokens=7)
    assert "250 for the prompt and 7 for the completion" in reply.json()["error"]["message"]
    assert appliance.submitted == []


async def test_more_prompts_than_the_queue_holds_can_never_be_served(served):
    reply = await served.complete(prompt=["a"] * 9)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(served):
    reader, writer = await served.connect()
    size = MAX_BODY_BYTES + 1
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_grows_too_large_is_refused(served):
    async def pieces():
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    reply = await served.http.post("/v1/completions", content=pieces())
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert (await served.complete()).status_code == 200


async def test_without_a_chat_template_completions_still_work(tmp_path):
    bare = FakeAppliance(Tokenizer(byte_level()))
    async with serving(bare, tmp_path / "api.sock") as served:
        reply = await served.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")
        assert (await served.complete()).status_code == 200


# The other routes


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/health/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/requests/none", 404, "request_not_found"),
        ("POST", "/v1/requests/none/cancel", 404, "request_not_found"),
        ("GET", "/v1/penstock/log?limit=0", 400, "invalid_value"),
        ("GET", "/v1/penstock/log?limit=x", 400, "invalid_type"),
        ("GET", "/v1/penstock/log?limit=-1", 400, "invalid_type"),
        ("GET", "/v1/penstock/log?limit=" + "9" * 5000, 400, "invalid_value"),
    ],
)
async def test_what_is_not_there_is_an_error_object(served, method, path, status, code):
    reply = await served.http.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


async def test_health_holds_while_readiness_waits(served, appliance):
    assert (await served.http.get("/ready")).json() == {"status": "ready"}
    appliance.unavailable = Unavailable("loading the model", code="model_loading")
    reply = await served.http.get("/ready")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "loading the model")
    assert "retry-after" in reply.headers
    assert (await served.http.get("/health")).json() == {"status": "ok"}
    version = (await served.http.get("/version")).json()
    assert set(version) == {"version", "frame_version"}


async def test_requests_and_their_log_can_be_read(served):
    request_id = (await served.complete()).json()["id"]
    listed = (await served.http.get("/v1/requests")).json()
    assert listed == {"object": "list", "data": [{"id": request_id}]}
    assert (await served.http.get(f"/v1/requests/{request_id}")).json() == {"id": request_id}
    logged = (await served.http.get("/v1/penstock/log?limit=5")).json()
    assert logged["data"] == [{"request_id": request_id, "http_status": 200}]


@pytest.mark.parametrize("wants_events", [False, True])
async def test_frames_come_at_once_and_then_as_they_are_made(served, wants_events):
    assert (await served.http.get("/v1/penstock/state")).json() == {"version": 1, "seq": 1}
    headers = {"accept": "text/event-stream"} if wants_events else {}
    seqs = []
    async with served.http.stream("GET", "/v1/penstock/stream", headers=headers) as reply:
        async for line in reply.aiter_lines():
            if line:
                seqs.append(json.loads(line.removeprefix("data: "))["seq"])
            if len(seqs) == 3:
                break
    assert seqs == [1, 2, 3]
    kind = "text/event-stream" if wants_events else "application/x-ndjson"
    assert reply.headers["content-type"].startswith(kind)
