"""Vectors and scores over every API that asks for them, with a model whose results are known."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import struct

import pytest

from appliance.api.texts import ask
from appliance.hub.facts import ModelFacts
from engine.errors import RequestError, Unavailable
from engine.text.tokenizer import Tokenizer
from tests.appliance.peers import ALICE, VIEWER, client_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance
from tests.worlds.fake_encoders import DIMENSIONS, FakeEncoder

EMBED, RERANK = "fake/tiny-embedding", "fake/tiny-rerank"
FACTS = ModelFacts("safetensors", "bert", 1000, 500, "float32", 64, 8, 2, 2, 2, 300, 1)


@pytest.fixture
def appliance():
    tokenizer = Tokenizer(byte_level(), chat_template=CHATML)
    appliance = FakeAppliance(tokenizer)
    encoders = [FakeEncoder(tokenizer, "embedding"), FakeEncoder(tokenizer, "rerank")]
    appliance.text_encoders = {one.name: one for one in encoders}
    texts = {one.name: FACTS for one in encoders}
    appliance.model = dataclasses.replace(
        appliance.model, text_models=texts, aliases=("text-embedding-*",)
    )
    return appliance


@pytest.fixture
def embedder(appliance):
    return appliance.text_encoders[EMBED]


@pytest.fixture
def reranker(appliance):
    return appliance.text_encoders[RERANK]


@pytest.fixture
def client(appliance):
    return client_of(appliance, ALICE)


async def posted(client, path, body, status=200):
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def error_of(client, path, body, status=400):
    return (await posted(client, path, body, status))["error"]


# /v1/embeddings


async def test_each_text_has_its_vector_in_order_and_usage_counts_tokens(client, embedder):
    reply = await posted(client, "/v1/embeddings", {"input": ["hello", "wörld"]})
    wanted = [embedder.ids(text) for text in ("hello", "wörld")]
    assert [one["embedding"] for one in reply["data"]] == [
        embedder.vector(ids).tolist() for ids in wanted
    ]
    assert [one["index"] for one in reply["data"]] == [0, 1]
    num_tokens = sum(map(len, wanted))
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert reply["model"] == EMBED


async def test_base64_has_the_bytes_of_the_same_numbers(client, embedder):
    reply = await posted(client, "/v1/embeddings", {"input": "hi", "encoding_format": "base64"})
    data = base64.b64decode(reply["data"][0]["embedding"])
    wanted = embedder.vector(embedder.ids("hi")).tolist()
    assert list(struct.unpack(f"<{DIMENSIONS}f", data)) == wanted


async def test_fewer_dimensions_are_the_first_with_length_1(client, embedder):
    reply = await posted(client, "/v1/embeddings", {"input": "hello wörld", "dimensions": 3})
    whole = embedder.vector(embedder.ids("hello wörld"))[:3].tolist()
    length = math.hypot(*whole)
    assert reply["data"][0]["embedding"] == pytest.approx([one / length for one in whole])


@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2, 3]], [[1, 2, 3], [4]]])
async def test_token_ids_are_taken_as_they_are(client, embedder, ids):
    reply = await posted(client, "/v1/embeddings", {"input": ids})
    wanted = ids if isinstance(ids[0], list) else [ids]
    assert embedder.asked == [("alice", wanted)]
    assert len(reply["data"]) == len(wanted)


async def test_a_prompt_by_name_stands_before_each_text(client, embedder):
    await posted(client, "/v1/embeddings", {"input": ["a", "b"], "prompt_name": "query"})
    assert embedder.asked[0][1] == [embedder.ids(f"query: {text}") for text in "ab"]
    error = await error_of(client, "/v1/embeddings", {"input": "a", "prompt_name": "passage"})
    assert error["param"] == "prompt_name"


async def test_a_prompt_that_is_not_pooled_is_left_out_of_texts_alone(client, embedder):
    embedder.pools_prompt = False
    for body, wanted in (
        ({"input": ["a", "bc"], "prompt_name": "query"}, [len(embedder.ids("query: ")) - 1] * 2),
        ({"input": [[5, 6], "a"], "prompt_name": "query"}, [0, len(embedder.ids("query: ")) - 1]),
        ({"input": "a"}, []),
    ):
        await posted(client, "/v1/embeddings", body)
        assert embedder.unpooled == wanted


async def test_the_makers_default_prompt_stands_before_texts_unless_none_is_asked(client, embedder):
    embedder.default_prompt = "query"
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/api/embed": {"input": "a"},
        "/api/embeddings": {"prompt": "a"},
    }
    for path, body in bodies.items():
        await posted(client, path, body)
        assert embedder.asked[-1][1] == [embedder.ids("query: a")]
    await posted(client, "/v1/embeddings", {"input": "a", "prompt_name": ""})
    assert embedder.asked[-1][1] == [embedder.ids("a")]


async def test_a_text_longer_than_the_model_is_refused_or_cut(client, appliance, embedder):
    long = {"input": ["short", "x" * 100]}
    error = await error_of(client, "/v1/embeddings", long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    for cut, length in ((-1, 64), (10, 10), (1000, 64)):
        await posted(client, "/v1/embeddings", {**long, "truncate_prompt_tokens": cut})
        ids = embedder.asked[-1][1][1]
        whole = embedder.ids("x" * 100)
        assert ids == [*whole[: length - 1], whole[-1]]  # the special token at the end stays
    assert appliance.closed_texts[-1][0].changes == "1 text cut"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, "a"]}, "input[0]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": 1}, "model"),
    ],
)
async def test_a_wrong_field_is_named(client, appliance, embedder, body, param):
    assert (await error_of(client, "/v1/embeddings", body))["param"] == param
    assert not embedder.asked
    assert not appliance.closed_texts


@pytest.mark.parametrize("token_id", [-1, 10_000, 2**40])
async def test_a_token_that_the_model_does_not_know_is_refused(client, token_id):
    error = await error_of(client, "/v1/embeddings", {"input": [1, token_id]})
    assert error["code"] == "unknown_token"


async def test_2048_texts_are_taken(client):
    reply = await posted(client, "/v1/embeddings", {"input": ["a"] * 2048})
    assert len(reply["data"]) == 2048


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a"] * 50, "prompt_name": "query"}, "input"),
        ("/v1/rerank", {"query": "q" * 20, "documents": ["d"] * 50}, "documents"),
        ("/v1/score", {"text_1": "q" * 20, "text_2": ["d"] * 50}, "text_2"),
    ],
)
async def test_what_stands_beside_each_text_counts_with_each(
    client, appliance, monkeypatch, path, body, param
):
    monkeypatch.setattr(ask, "MAX_TOKENS", 300)
    assert (await error_of(client, path, body))["param"] == param
    assert not any(one.asked for one in appliance.text_encoders.values())
    short = {"query": "q", "text_1": "q", "prompt_name": None}
    await posted(client, path, {key: short.get(key, value) for key, value in body.items()})


async def test_fields_without_effect_are_named(client):
    reply = await client.post("/v1/embeddings", json={"input": "a", "user": "ann", "task": "x"})
    assert reply.headers["x-penstock-ignored"] == "user, task"


# Rerank and score


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_by_relevance(client, appliance, path):
    body = {"query": "hello", "documents": ["x", "hello hello", {"text": "hello"}]}
    reply = await posted(client, path, body)
    assert [one["index"] for one in reply["results"]] == [1, 2, 0]
    scores = [one["relevance_score"] for one in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[2] == pytest.approx(1 / (1 + math.exp(2)))  # a raw score of -2
    assert "document" not in reply["results"][0]
    assert reply["id"].startswith("rerank-")
    assert reply["usage"]["total_tokens"] == appliance.closed_texts[-1][0].prompt_tokens


async def test_the_best_come_with_their_texts_where_wanted(client):
    body = {"query": "hello", "documents": ["x", "hello"], "top_n": 1, "return_documents": True}
    reply = await posted(client, "/v1/rerank", body)
    assert [one["document"] for one in reply["results"]] == [{"text": "hello"}]
    more = await posted(client, "/v1/rerank", body | {"top_n": 10})
    assert len(more["results"]) == 2


async def test_a_document_that_is_too_long_is_cut_and_a_query_is_refused(client, reranker):
    body = {"query": "hello", "documents": ["x" * 100]}
    reply = await posted(client, "/v2/rerank", body)
    assert reply["meta"]["warnings"]
    (ids,) = reranker.asked[-1][1]
    whole = reranker.pair_ids("hello", "x" * 100)
    assert ids == [*whole[:63], whole[-1]]
    await posted(client, "/v2/rerank", body | {"max_tokens_per_doc": 5})
    (ids,) = reranker.asked[-1][1]
    assert len(ids) == len(reranker.pair_ids("hello", "")) + 5
    refused = await posted(client, "/v2/rerank", {"query": "x" * 100, "documents": ["a"]}, 400)
    assert "message" in refused
    assert "error" not in refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"] * 10_000}, "documents"),
        ({"query": "a", "documents": [1]}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
async def test_a_wrong_field_of_rerank_is_named(client, body, param):
    assert (await error_of(client, "/v1/rerank", body))["param"] == param


async def test_an_empty_document_has_a_score(client):
    reply = await posted(client, "/v1/rerank", {"query": "a", "documents": [""]})
    assert len(reply["results"]) == 1


@pytest.mark.parametrize(
    ("first", "second", "num"),
    [("a", "b", 1), ("a", ["b", "c"], 2), (["a"], ["b", "c"], 2), (["a", "b"], ["c", "d"], 2)],
)
async def test_scores_are_of_one_text_against_many_or_as_many(client, first, second, num):
    reply = await posted(client, "/v1/score", {"text_1": first, "text_2": second})
    assert [one["index"] for one in reply["data"]] == list(range(num))
    assert all(0 < one["score"] < 1 for one in reply["data"])


async def test_scores_of_unequal_numbers_are_refused(client):
    body = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
    assert (await error_of(client, "/v1/score", body))["param"] == "text_1"
    long = {"text_1": "a", "text_2": "x" * 100}
    assert (await error_of(client, "/v1/score", long))["code"] == "context_length_exceeded"


# Ollama


async def test_ollamas_vectors_have_the_length_1(client, embedder):
    reply = await posted(client, "/api/embed", {"model": f"{EMBED}:latest", "input": ["a", "b"]})
    assert len(reply["embeddings"]) == 2
    assert all(math.hypot(*one) == pytest.approx(1) for one in reply["embeddings"])
    assert reply["prompt_eval_count"] == sum(len(embedder.ids(text)) for text in "ab")
    one = await posted(client, "/api/embed", {"input": "a", "dimensions": 2})
    assert len(one["embeddings"][0]) == 2


async def test_ollamas_older_path_gives_one_vector_as_it_was_computed(client, embedder):
    reply = await posted(client, "/api/embeddings", {"model": EMBED, "prompt": "a"})
    assert reply == {"embedding": embedder.vector(embedder.ids("a")).tolist()}


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/api/embed", {}, {"embeddings": []}),
        ("/api/embed", {"input": ""}, {"embeddings": []}),
        ("/api/embed", {"input": []}, {"embeddings": []}),
        ("/api/embeddings", {}, {"embedding": []}),
    ],
)
async def test_ollamas_clients_load_a_model_without_a_text(client, path, body, wanted):
    reply = await posted(client, path, body)
    assert wanted.items() <= reply.items()


async def test_ollama_cuts_texts_unless_told_not_to(client, embedder):
    await posted(client, "/api/embed", {"input": "x" * 100})
    assert len(embedder.asked[-1][1][0]) == 64
    error = await error_of(client, "/api/embed", {"input": "x" * 100, "truncate": False})
    assert "102 tokens" in error


# Which model


@pytest.mark.parametrize("name", ["", EMBED, f"{EMBED}:latest", "text-embedding-3-small"])
async def test_no_name_and_an_alias_mean_the_served_embedder(client, name):
    reply = await posted(client, "/v1/embeddings", {"input": "a", "model": name})
    assert reply["model"] == EMBED


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/embeddings", {"input": "a", "model": RERANK}, 400, "wrong_model"),
        ("/v1/embeddings", {"input": "a", "model": "fake/tiny-model"}, 400, "wrong_model"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "model_not_found"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "model": EMBED}, 400, "wrong_model"),
        ("/v1/completions", {"prompt": "a", "model": EMBED}, 400, "wrong_model"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "model": RERANK},
            400,
            "wrong_model",
        ),
    ],
)
async def test_a_model_of_another_kind_is_refused(client, path, body, status, code):
    assert (await error_of(client, path, body, status))["code"] == code


async def test_an_embedder_is_refused_by_its_name_where_an_alias_is_any_text(client, appliance):
    appliance.model = dataclasses.replace(appliance.model, aliases=("*",))
    body = {"prompt": "a", "model": EMBED}
    assert (await error_of(client, "/v1/completions", body))["code"] == "wrong_model"


async def test_without_a_model_of_texts_the_setting_is_named(client, appliance):
    appliance.text_encoders = {}
    error = await error_of(client, "/v1/embeddings", {"input": "a"}, 404)
    assert error["code"] == "model_not_found"
    assert "--embedding-model" in error["message"]
    error = await error_of(client, "/v1/embeddings", {"input": "a", "model": "fake/tiny-model"})
    assert error["code"] == "wrong_model"
    assert "--embedding-model" in error["message"]


async def test_models_of_texts_are_listed(client):
    listed = (await client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["fake/tiny-model", EMBED, RERANK]
    one = (await client.get(f"/v1/models/{EMBED}")).json()
    assert (one["kind"], one["num_dimensions"], one["max_model_len"]) == ("embedding", 8, 64)
    for path in ("/api/tags", "/api/ps"):
        names = [one["name"] for one in (await client.get(path)).json()["models"]]
        assert names[1:] == [EMBED, RERANK]
    shown = await posted(client, "/api/show", {"model": EMBED})
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.embedding_length"] == DIMENSIONS
    kinds = [one["type"] for one in (await client.get("/api/v0/models")).json()["data"]]
    assert kinds == ["llm", "embeddings", "rerank"]


# Accounts


async def test_each_request_is_closed_once_with_its_tokens(client, appliance, embedder):
    await posted(client, "/v1/embeddings", {"input": ["a", "b"]})
    ((request, status),) = appliance.closed_texts
    assert (status, request.model, request.num_texts) == (200, EMBED, 2)
    assert request.prompt_tokens == sum(len(embedder.ids(text)) for text in "ab")
    assert request.error is None
    assert request.peer == ALICE


async def test_a_viewer_may_not_ask(appliance):
    reply = await client_of(appliance, VIEWER).post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 403


async def test_what_is_refused_before_it_is_queued_has_no_row(client, appliance, embedder):
    embedder.is_full = True
    reply = await client.post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    appliance.unavailable = Unavailable("draining", code="draining")
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 503
    assert not appliance.closed_texts
    assert not appliance.open_texts_now


async def test_a_failure_is_told_and_logged(client, appliance, embedder):
    what = "the model's result for text 0 is not a number"
    embedder.failure = RequestError(what, code="not_finite", status=500, kind="server_error")
    error = await error_of(client, "/v1/embeddings", {"input": "a"}, 500)
    assert error["code"] == "not_finite"
    ((request, status),) = appliance.closed_texts
    assert (status, request.error, request.has_failed) == (500, what, True)
    embedder.failure = ZeroDivisionError()
    await posted(client, "/v1/embeddings", {"input": "a"}, 500)
    assert appliance.closed_texts[-1][0].has_failed


async def test_a_cancelled_request_is_dropped_and_its_client_told(client, appliance, embedder):
    embedder.gate.clear()
    asked = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
    await appliance.has_texts.wait()
    (request,) = appliance.open_texts_now
    request.cancelled_by = "root"
    request.stop()
    assert (await asked).status_code == 503
    assert embedder.num_dropped == 1
    assert [status for _, status in appliance.closed_texts] == [503]
