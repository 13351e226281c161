"""OpenAI's own client, through both doors: the Unix socket, and TCP with a key."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import openai
import pytest

from engine.errors import Unavailable
from tests.appliance.api_server import DOORS, KEY_NAME, fill, says, serving


@pytest.fixture(params=DOORS)
async def served(request, appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", request.param) as served:
        yield served


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


async def test_streamed_logprobs_are_those_of_the_whole(served):
    messages = [{"role": "user", "content": "hi"}]
    chat = partial(
        served.openai.chat.completions.create,
        model="fake/tiny-model",
        messages=messages,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    whole = (await chat()).choices[0].logprobs.content
    chunks = [choice async for chunk in await chat(stream=True) for choice in chunk.choices]
    assert [one for each in chunks if each.logprobs for one in each.logprobs.content] == whole
    complete = partial(
        served.openai.completions.create,
        model="fake/tiny-model",
        prompt="aä",
        max_tokens=4,
        logprobs=2,
    )
    columns = (await complete()).choices[0].logprobs.model_dump()
    chunks = [choice async for chunk in await complete(stream=True) for choice in chunk.choices]
    parts = [choice.logprobs.model_dump() for choice in chunks if choice.logprobs]
    assert {name: [one for part in parts for one in part[name]] for name in columns} == columns


async def test_the_synchronous_client_works_too(served):
    def complete() -> list[str]:
        transport = httpx.HTTPTransport(uds=served.uds)
        address = {"base_url": f"{served.url}/v1", "api_key": served.key}
        with (
            httpx.Client(transport=transport) as http,
            openai.OpenAI(**address, http_client=http) as client,
        ):
            whole = client.completions.create(model="fake/tiny-model", prompt="hello")
            with client.completions.create(
                model="fake/tiny-model", prompt="hello", stream=True
            ) as stream:
                return [whole.choices[0].text, "".join(c.choices[0].text for c in stream)]

    whole, streamed = await asyncio.to_thread(complete)
    assert whole == streamed
    assert whole.startswith("hello")


async def test_requests_belong_to_who_came_in(served, appliance):
    await served.openai.completions.create(model="fake/tiny-model", prompt="hi")
    (request,) = appliance.submitted
    assert request.peer.key == (None if served.uds else KEY_NAME)
    assert (request.peer.uid is None) == (served.uds is None)
    assert [sequence.owner for sequence in request.sequences] == [request.peer.name]


async def test_the_official_client_raises_its_own_errors(served, appliance):
    client = served.openai
    complete = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await complete(model="fake/tiny-model", prompt="hi", temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await complete(model="gpt-9", prompt="hi")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.embeddings.create(model="fake/tiny-model", input="hi")
    assert bad.value.code == "wrong_model"
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
