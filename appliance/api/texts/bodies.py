"""Read each API's body: which texts it has, and how its reply is to be written.

Invariant: a body that is refused has cost no computing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Protocol

from appliance.api.texts import fields, replies
from appliance.api.texts.ask import (
    TextAsk,
    TextTooLong,
    read_dimensions,
    read_inputs,
    read_prompt,
    tokenize_pairs,
    tokenize_texts,
)
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.requests.text_request import TextRequest
from appliance.json.fields import Json, check, invalid_value
from engine.errors import RequestError

TO_THE_END = -1
"""Cut texts to what the model takes."""


class Write(Protocol):
    """Writes a reply."""

    def __call__(self, computed: Sequence[array[float]], request: TextRequest, /) -> Json:
        """Write it, given the vectors or scores."""


def embeddings(body: Json, encoder: TextEncoder) -> tuple[TextAsk, Write]:
    """Read a body of OpenAI's /v1/embeddings."""
    asked = check(body, fields.EmbeddingsRequest)
    dimensions = read_dimensions(asked.dimensions, encoder)
    texts = tokenize_texts(
        encoder,
        read_inputs(asked.input, "input"),
        "input",
        cut=asked.truncate_prompt_tokens,
        prompt=read_prompt(asked.prompt_name, encoder),
    )
    is_base64 = asked.encoding_format == "base64"

    def write(computed: Sequence[array[float]], request: TextRequest) -> Json:
        vectors = [replies.vector_of(one, dimensions, is_unit=False) for one in computed]
        return replies.embeddings_reply(
            request.model, vectors, texts.num_tokens, is_base64=is_base64
        )

    return texts, write


def rerank(body: Json, encoder: TextEncoder) -> tuple[TextAsk, Write]:
    """Read a body of Cohere's, Jina's and vLLM's rerank; documents that are too long are cut."""
    asked = check(body, fields.RerankRequest)
    documents = [one if isinstance(one, str) else one.text for one in asked.documents]
    pairs = tokenize_pairs(
        encoder,
        [(asked.query, document) for document in documents],
        ("query", "documents"),
        cut=asked.truncate_prompt_tokens or TO_THE_END,
        document_tokens=asked.max_tokens_per_doc,
    )

    def write(computed: Sequence[array[float]], request: TextRequest) -> Json:
        return replies.rerank_reply(
            request.request_id,
            request.model,
            [replies.relevance(raw) for raw in computed],
            pairs.num_tokens,
            top_n=asked.top_n,
            documents=documents if asked.return_documents else None,
            num_cut=pairs.num_cut,
        )

    return pairs, write


def score(body: Json, encoder: TextEncoder) -> tuple[TextAsk, Write]:
    """Read a body of vLLM's /v1/score: one text against many, or as many against as many."""
    asked = check(body, fields.ScoreRequest)
    first, second = (
        [side] if isinstance(side, str) else side for side in (asked.text_1, asked.text_2)
    )
    if len(first) not in (1, len(second)):
        what = f"has {len(first)} entries and `text_2` {len(second)}; it may have one, or as many"
        raise invalid_value("text_1", what)
    many = first * len(second) if len(first) == 1 else first
    pairs = tokenize_pairs(
        encoder,
        list(zip(many, second, strict=True)),
        ("text_1", "text_2"),
        cut=asked.truncate_prompt_tokens,
    )

    def write(computed: Sequence[array[float]], request: TextRequest) -> Json:
        scores = [replies.relevance(raw) for raw in computed]
        now = int(time.time())
        return replies.score_reply(request.request_id, request.model, scores, pairs.num_tokens, now)

    return pairs, write


def ollama_embed(body: Json, encoder: TextEncoder) -> tuple[TextAsk, Write]:
    """Read a body of Ollama's /api/embed; without a text nothing is computed."""
    asked = check(body, fields.OllamaEmbedRequest)
    dimensions = read_dimensions(asked.dimensions or None, encoder)
    inputs = asked.input if isinstance(asked.input, list) else [asked.input] if asked.input else []
    cut = None if asked.truncate is False else TO_THE_END
    prompt = read_prompt(None, encoder)
    texts = tokenize_texts(encoder, inputs, "input", cut=cut, prompt=prompt)

    def write(computed: Sequence[array[float]], request: TextRequest) -> Json:
        vectors = [replies.vector_of(one, dimensions, is_unit=True) for one in computed]
        took_ns = time.monotonic_ns() - request.arrived_ns
        return replies.ollama_embed_reply(request.model, vectors, texts.num_tokens, took_ns)

    return texts, write


def ollama_embeddings(body: Json, encoder: TextEncoder) -> tuple[TextAsk, Write]:
    """Read a body of Ollama's older /api/embeddings, which takes one text."""
    asked = check(body, fields.OllamaEmbeddingsRequest)
    prompts = [asked.prompt] if asked.prompt else []
    before = read_prompt(None, encoder)
    texts = tokenize_texts(encoder, prompts, "prompt", cut=TO_THE_END, prompt=before)

    def write(computed: Sequence[array[float]], request: TextRequest) -> Json:
        return {"embedding": replies.numbers(computed[0]) if computed else []}

    return texts, write


def in_ollamas_words(error: RequestError) -> RequestError:
    """Say as Ollama does that a text is too long."""
    if isinstance(error, TextTooLong):
        count = f"{error.num_tokens} tokens, {error.max_tokens} at most"
        what = f"the input length exceeds the context length: {count}"
        return RequestError(what, code=error.code)
    return error
