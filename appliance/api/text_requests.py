"""Answer POSTs that ask for vectors or scores: read, tokenize, have it computed, write.

Invariant: an accepted request is closed exactly once; what its client no longer waits for is
dropped.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.body_threads import threads_for
from appliance.api.core.fair_threads import hang_up
from appliance.api.core.wire import (
    appliance_of,
    arrival_of,
    client_request_id,
    error_response,
    ignored_header,
    json_response,
    require,
)
from appliance.api.texts import bodies
from appliance.api.texts.ask import TextAsk
from appliance.api.texts.bodies import Write
from appliance.api.texts.encoder_choice import choose_encoder
from appliance.api.texts.fields import (
    EmbeddingsRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from appliance.daemon.requests.request import CLIENT_CLOSED_REQUEST, HUNG_UP, Role
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.requests.text_request import TextRequest
from appliance.daemon.survival.journal import anew
from appliance.json.fields import Json, decode_object, undeclared
from appliance.observe.frame.figures import things
from engine.errors import RequestError, Unavailable

MAX_INLINE_NUMBERS = 4096
"""Replies with more are written in a thread."""


@dataclass(frozen=True, slots=True)
class TextEndpoint:
    """Describe one POST that asks for vectors or scores."""

    id_prefix: str
    """Of its requests' ids."""
    kind: Literal["embedding", "rerank"]
    fields: type[msgspec.Struct]
    """What is read of a body."""
    read: Callable[[Json, TextEncoder], tuple[TextAsk, Write]]
    """Validates and tokenizes a body; called in a thread."""
    refusal: Callable[[RequestError], RequestError] = lambda error: error
    """A refusal of what was asked, in words that its clients know."""


ENDPOINTS = {
    "/v1/embeddings": TextEndpoint("embd-", "embedding", EmbeddingsRequest, bodies.embeddings),
    "/v1/rerank": TextEndpoint("rerank-", "rerank", RerankRequest, bodies.rerank),
    "/v2/rerank": TextEndpoint("rerank-", "rerank", RerankRequest, bodies.rerank),
    "/v1/score": TextEndpoint("score-", "rerank", ScoreRequest, bodies.score),
    "/api/embed": TextEndpoint(
        "embed-",
        "embedding",
        OllamaEmbedRequest,
        bodies.ollama_embed,
        bodies.in_ollamas_words,
    ),
    "/api/embeddings": TextEndpoint(
        "embed-",
        "embedding",
        OllamaEmbeddingsRequest,
        bodies.ollama_embeddings,
        bodies.in_ollamas_words,
    ),
}


def text_routes() -> list[Route]:
    """Make a POST route for each row of ENDPOINTS."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: TextEndpoint) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        return await answer(http, endpoint)

    return handle


async def answer(http: HttpRequest, endpoint: TextEndpoint) -> Response:
    """Answer one body.

    Raises:
        ClientDisconnect: the client has left.
        Forbidden: the peer is a viewer.
        Unavailable: the daemon is loading, draining, or too busy.
        QueueFull: too many texts wait.
        RequestError: it cannot be served, whatever room there is.
    """
    appliance, arrival = appliance_of(http), arrival_of(http)
    arrival.generates(endpoint.id_prefix, anew)
    peer = require(http, Role.USER)
    body = await http.body()
    arrival.has_body(anew)
    appliance.check_available()
    encoders, served = appliance.text_encoders, appliance.model

    def read() -> tuple[TextEncoder, TextAsk, Write, tuple[str, ...]]:
        fields = decode_object(body)
        encoder = choose_encoder(fields.get("model"), endpoint.kind, encoders, served)
        asked, write = endpoint.read(fields, encoder)
        encoder.check(asked.token_ids)
        return encoder, asked, write, undeclared(fields, endpoint.fields)

    turns = threads_for(http, body).bodies
    try:
        encoder, asked, write, ignored = await turns.run(http, read)
    except RequestError as error:
        raise endpoint.refusal(error) from error.__cause__  # it may be the same error
    work = asyncio.create_task(encoder.compute(peer.name, asked.token_ids, asked.num_unpooled))
    await asyncio.sleep(0)  # it is then in the queue, or refused
    if work.done():
        work.result()
    request = TextRequest(
        request_id=arrival.request_id,
        endpoint=http.scope["path"],
        model=encoder.name,
        peer=peer,
        received_at=arrival.received_at,
        arrived_ns=arrival.arrived_ns,
        tokenized_ns=time.monotonic_ns(),
        num_texts=len(asked.token_ids),
        prompt_tokens=asked.num_tokens,
        stop=work.cancel,
        client_request_id=client_request_id(http),
        changes=f"{things(asked.num_cut, 'text')} cut" if asked.num_cut else None,
    )
    appliance.open_texts(request)
    response = await _respond(http, request, work, write)
    response.headers.update(ignored_header(ignored))
    return response


async def _respond(
    http: HttpRequest,
    request: TextRequest,
    work: asyncio.Task[list[array[float]]],
    write: Write,
) -> Response:
    """Wait for what is computed, write the reply and close the request."""
    status = 500
    try:
        response = await _written(http, request, work, write)
        status = response.status_code
        return response
    except ClientDisconnect:
        status, request.cancelled_by = CLIENT_CLOSED_REQUEST, HUNG_UP
        raise
    except asyncio.CancelledError:
        status, request.cancelled_by = 503, "drain"
        raise
    except BaseException:
        request.error, request.has_failed = "internal error", True
        raise
    finally:
        work.cancel()
        appliance_of(http).close_texts(request, status)


async def _written(
    http: HttpRequest,
    request: TextRequest,
    work: asyncio.Task[list[array[float]]],
    write: Write,
) -> Response:
    gone = asyncio.create_task(hang_up(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not work.done():
        raise ClientDisconnect
    try:
        computed = work.result()
    except asyncio.CancelledError:
        what = f"the request was cancelled by {request.cancelled_by}"
        return _failed(http, request, Unavailable(what, code="cancelled"))
    except RequestError as error:
        request.has_failed = error.status >= 500
        return _failed(http, request, error)
    if sum(map(len, computed)) <= MAX_INLINE_NUMBERS:
        return json_response(write(computed, request))
    return await asyncio.to_thread(lambda: json_response(write(computed, request)))


def _failed(http: HttpRequest, request: TextRequest, error: RequestError) -> Response:
    """Write an error of an accepted request, whose row says it."""
    if request.cancelled_by is None:
        request.error = error.what
    response = error_response(http, error)
    arrival_of(http).refusal = None
    return response
