"""Write vectors and scores as each API does.

Invariant: a vector that was cut has the length 1 again.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.observe.frame.figures import things

Json = dict[str, Any]


def vector_of(computed: array[float], dimensions: int | None, *, is_unit: bool) -> array[float]:
    """Cut a vector to its first dimensions, and make its length 1.

    Args:
        dimensions: how many; None: all.
        is_unit: the API's vectors have the length 1, also where nothing is cut.
    """
    is_cut = dimensions is not None and dimensions < len(computed)
    vector = computed[:dimensions] if is_cut else computed
    if not is_cut and not is_unit:
        return vector
    length = math.hypot(*vector)
    return array("f", [number / length for number in vector]) if length else vector


def numbers(vector: array[float]) -> msgspec.Raw:
    """Write a vector's numbers: as JSON at once, for many lists of floats take much memory."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def in_base64(vector: array[float]) -> str:
    """Write a vector's float32 bytes, the lowest first, as OpenAI's clients read them."""
    return base64.b64encode(vector.tobytes()).decode()


def embeddings_reply(
    model: str, vectors: Sequence[array[float]], num_tokens: int, *, is_base64: bool
) -> Json:
    """Write a reply of /v1/embeddings."""
    write = in_base64 if is_base64 else numbers
    data = [
        {"object": "embedding", "index": index, "embedding": write(vector)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def relevance(raw: array[float]) -> float:
    """Turn a raw score into a number between 0 and 1."""
    score = raw[0]
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


def rerank_reply(
    request_id: str,
    model: str,
    scores: Sequence[float],
    num_tokens: int,
    *,
    top_n: int | None,
    documents: Sequence[str] | None,
    num_cut: int,
) -> Json:
    """Write a reply of /v1/rerank and /v2/rerank: Cohere's fields and Jina's.

    Args:
        documents: their texts, to be told; None: they are not.
        num_cut: documents that were longer than the model takes.
    """
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if documents is not None:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    meta: Json = {"api_version": {"version": "2"}, "tokens": {"input_tokens": num_tokens}}
    if num_cut:
        meta["warnings"] = [f"{things(num_cut, 'document')} cut: longer than the model takes"]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"id": request_id, "model": model, "results": results, "usage": usage, "meta": meta}


def score_reply(
    request_id: str, model: str, scores: Sequence[float], num_tokens: int, created: int
) -> Json:
    """Write a reply of /v1/score."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    return {
        "id": request_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": usage,
    }


def ollama_embed_reply(
    model: str, vectors: Sequence[array[float]], num_tokens: int, took_ns: int
) -> Json:
    """Write a reply of /api/embed."""
    return {
        "model": model,
        "embeddings": [numbers(vector) for vector in vectors],
        "total_duration": took_ns,
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
