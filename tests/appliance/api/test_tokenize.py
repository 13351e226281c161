from __future__ import annotations

import asyncio
import threading

import pytest

from appliance.api import tokenize as tokenize_api
from appliance.api.routes import build_app
from engine.text.tokenizer import Tokenizer
from tests.appliance.peers import ALICE, BOB, VIEWER, client_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance, until


@pytest.fixture
def tokenizer():
    return Tokenizer(byte_level(), chat_template=CHATML)


@pytest.fixture
def client(tokenizer):
    return client_of(FakeAppliance(tokenizer), VIEWER)


async def tokenize(client, **body):
    reply = await client.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_text_becomes_token_ids(client, tokenizer):
    reply = await tokenize(client, model="fake/tiny-model", prompt="hello wörld")
    assert reply == {
        "count": len(tokenizer.encode("hello wörld")),
        "max_model_len": 256,
        "tokens": tokenizer.encode("hello wörld"),
        "token_strs": None,
    }


async def test_tokens_are_told_as_the_vocabulary_writes_them(client):
    reply = await tokenize(client, prompt="hello wo", return_token_strs=True)
    assert reply["token_strs"] == ["<|begin|>", "hello", "Ġwo"]


async def test_special_tokens_can_be_left_out(client, tokenizer):
    reply = await tokenize(client, prompt="hello", add_special_tokens=False)
    assert reply["tokens"] == tokenizer.encode("hello", add_special_tokens=False)
    assert reply["count"] == 1


async def test_a_chat_becomes_the_prompt_that_it_would_be_answered_to(client, tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    reply = await tokenize(client, messages=messages)
    rendered = tokenizer.render_chat(messages)
    assert reply["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)
    shorter = await tokenize(client, messages=messages, add_generation_prompt=False)
    assert shorter["count"] < reply["count"]


async def test_an_empty_text_has_no_tokens_of_its_own(client):
    assert (await tokenize(client, prompt="", add_special_tokens=False))["count"] == 0


async def test_token_ids_become_the_text_again_special_tokens_included(client, tokenizer):
    ids = tokenizer.encode("hello wörld 😀")
    reply = await client.post("/detokenize", json={"tokens": ids})
    text = "<|begin|>hello wörld 😀"
    assert reply.json() == {"prompt": text, "content": text}


async def test_content_is_a_text_as_llamas_clients_send_it(client, tokenizer):
    ids = tokenizer.encode("wör", False)
    assert (await tokenize(client, content="wör"))["tokens"] == ids
    assert (await tokenize(client, content="wör", add_special=True))["tokens"][1:] == ids
    pieces = (await tokenize(client, content="wör", with_pieces=True))["tokens"]
    assert [one["id"] for one in pieces] == ids
    assert [one["piece"] for one in pieces] == ["w", [0xC3], [0xB6], "r"]


async def test_texts_longer_than_the_context_are_counted_all_the_same(client):
    reply = await tokenize(client, prompt="x" * 10_000)
    assert reply["count"] == 10_001


async def test_texts_have_a_bound(client, monkeypatch):
    monkeypatch.setattr(tokenize_api, "MAX_TEXT_CHARS", 10)
    reply = await client.post("/tokenize", json={"prompt": "x" * 11})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    chat = {"messages": [{"role": "user", "content": "x" * 11}], "max_tokens": 1}
    reply = await client.post("/v1/messages/count_tokens", json=chat)
    assert reply.status_code == 400
    tokens = [1] * (tokenize_api.MAX_TOKENS + 1)
    reply = await client.post("/detokenize", json={"tokens": tokens})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")


async def test_an_id_that_the_vocabulary_lacks_has_no_text(client, tokenizer):
    for token_id in (tokenizer.vocab_size, 1 << 40):
        reply = await client.post("/detokenize", json={"tokens": [1, token_id]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")


async def test_a_client_whose_texts_are_slow_keeps_no_other_waiting(tokenizer, monkeypatch):
    gate, begun, encode = threading.Event(), [], tokenizer.encode

    def slow(text, *args, **options):
        if text == "slow":
            begun.append(text)
            assert gate.wait(120)
        return encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    app = build_app(appliance := FakeAppliance(tokenizer))
    alice, bob = (client_of(appliance, one, app) for one in (ALICE, BOB))
    first = [asyncio.create_task(tokenize(alice, prompt="slow")) for _ in range(3)]
    try:
        await until(lambda: begun)
        for path, body in COUNTED.items():
            reply = await asyncio.wait_for(bob.post(path, json=body), 20)
            assert reply.status_code == 200, reply.text
        assert (len(begun), [one.done() for one in first]) == (1, [False] * 3)
    finally:
        gate.set()
    await asyncio.gather(*first)


MODEL = "fake/tiny-model"
COUNTED = {
    "/tokenize": {"prompt": "a"},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses/input_tokens": {"input": "a"},
}


async def test_another_model_is_not_there(client):
    for path in ("/tokenize", "/detokenize"):
        reply = await client.post(path, json={"model": "other", "prompt": "a", "tokens": [1]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
