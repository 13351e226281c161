"""The POSTs that generate: for each its path, how its body is read, what its reply looks like.

Owns: the table.
Invariant: whatever is asked by any of them goes the one way of generation.generate.
Never: reads a field, or writes a reply.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.routing import Route

from appliance.api.admission import Accepted
from appliance.api.generation import Endpoint, Generation, generate
from appliance.api.messages_api import in_anthropics_words, messages_ask
from appliance.api.messages_shape import MessageShape
from appliance.api.ollama_api import chat_ask_of, generate_ask
from appliance.api.ollama_shape import OllamaShape
from appliance.api.openai import chat_ask, completion_ask
from appliance.api.replies import ReplyShape, fingerprint
from appliance.api.response_memory import earlier, keeper
from appliance.api.response_shape import ResponseShape
from appliance.api.responses import in_our_words, response_ask
from appliance.api.wire import appliance_of


def _reply_shape(accepted: Accepted, http: Request) -> ReplyShape:
    appliance = appliance_of(http)
    return ReplyShape(
        ask=accepted.ask,
        request=accepted.request,
        tokenizer=appliance.tokenizer,
        created=int(time.time()),
        fingerprint=fingerprint(appliance.model),
    )


def _response_shape(accepted: Accepted, http: Request) -> ResponseShape:
    """A response that is kept when it has ended, unless its client does not want that."""
    return ResponseShape(
        accepted.request,
        accepted.fields,
        created_at=int(time.time()),
        on_end=keeper(accepted.fields, http),
    )


ENDPOINTS = {
    "/v1/completions": Endpoint(
        id_prefix="cmpl-",
        read=lambda fields, http: completion_ask(
            fields, appliance_of(http).model, appliance_of(http).max_per_request
        ),
        shape=_reply_shape,
    ),
    "/v1/chat/completions": Endpoint(
        id_prefix="chatcmpl-",
        read=lambda fields, http: chat_ask(fields, appliance_of(http).model),
        shape=_reply_shape,
    ),
    "/v1/responses": Endpoint(
        id_prefix="resp_",
        read=lambda fields, http: response_ask(
            fields, appliance_of(http).model, earlier(fields, http)
        ),
        shape=_response_shape,
        refusal=in_our_words,
    ),
    "/v1/messages": Endpoint(
        id_prefix="msg_",
        read=lambda fields, http: messages_ask(fields, appliance_of(http).model),
        shape=lambda accepted, _http: MessageShape(accepted.request),
        refusal=in_anthropics_words,
    ),
    "/api/chat": Endpoint(
        id_prefix="chat-",
        read=lambda fields, http: chat_ask_of(fields, appliance_of(http).model),
        shape=lambda accepted, _http: OllamaShape(accepted.request, is_chat=True),
    ),
    "/api/generate": Endpoint(
        id_prefix="gen-",
        read=lambda fields, http: generate_ask(fields, appliance_of(http).model),
        shape=lambda accepted, _http: OllamaShape(accepted.request, is_chat=False),
    ),
}


def generating_routes() -> list[Route]:
    """A POST route for each row of ENDPOINTS."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Generation]]:
    async def handle(http: Request) -> Generation:
        return await generate(http, endpoint)

    return handle
