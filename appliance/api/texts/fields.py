"""Declare the fields of bodies that ask for vectors or scores of texts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.api.core.fields import Word
from appliance.json.fields import INT64_MAX, Json
from engine.checkpoint.text_model import MAX_DIMENSIONS

MAX_TEXTS = 2048
"""Maximum texts per body, on every API: OpenAI's limit of inputs."""

Dimensions = Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)]
Cut = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
"""The first tokens of each text that are kept; -1: as many as the model takes."""
_WORDS: Json = {"type": "string", "minLength": 1}
_ID: Json = {"type": "integer", "minimum": 0}
_IDS: Json = {"type": "array", "items": _ID, "minItems": 1}
Inputs = Annotated[
    list[Any],
    Meta(
        min_length=1,
        extra_json_schema={
            "anyOf": [
                {"items": _ID},
                *({"items": one, "maxItems": MAX_TEXTS} for one in (_WORDS, _IDS)),
            ]
        },
    ),
]
"""Token ids of one text, or texts, or lists of token ids."""


class EmbeddingsRequest(Struct, kw_only=True):
    """A body of /v1/embeddings."""

    input: Word | Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: Cut | None = None


class RerankText(Struct):
    """A document as Jina's and Cohere's older clients send it."""

    text: str


Documents = Annotated[list[str | RerankText], Meta(min_length=1, max_length=MAX_TEXTS)]


class RerankRequest(Struct, kw_only=True):
    """A body of /v1/rerank and /v2/rerank."""

    query: Word
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    truncate_prompt_tokens: Cut | None = None


Sides = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class ScoreRequest(Struct, kw_only=True):
    """A body of /v1/score."""

    text_1: Sides
    text_2: Sides
    model: str | None = None
    truncate_prompt_tokens: Cut | None = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """A body of /api/embed."""

    model: str | None = None
    input: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=MAX_DIMENSIONS)] | None = None


class OllamaEmbeddingsRequest(Struct, kw_only=True):
    """A body of /api/embeddings, which takes one text."""

    model: str | None = None
    prompt: str | None = None
