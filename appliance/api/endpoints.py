"""The POSTs that generate: for each its path, how its body is read, what its reply looks like.

Owns: the table. Called by: routes.
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
from appliance.api.openai import chat_ask, completion_ask
from appliance.api.replies import ReplyShape, fingerprint
from appliance.api.response_shape import ResponseShape
from appliance.api.responses import in_our_words, response_ask
from appliance.request import Appliance


def _reply_shape(accepted: Accepted, appliance: Appliance) -> ReplyShape:
    return ReplyShape(
        ask=accepted.ask,
        request=accepted.request,
        tokenizer=appliance.tokenizer,
        created=int(time.time()),
        fingerprint=fingerprint(appliance.model),
    )


def _response_shape(accepted: Accepted, _appliance: Appliance) -> ResponseShape:
    return ResponseShape(accepted.request, accepted.fields, created_at=int(time.time()))


ENDPOINTS = {
    "/v1/completions": Endpoint(
        id_prefix="cmpl-",
        read=lambda fields, one: completion_ask(fields, one.model, one.max_per_request),
        shape=_reply_shape,
    ),
    "/v1/chat/completions": Endpoint(
        id_prefix="chatcmpl-",
        read=lambda fields, one: chat_ask(fields, one.model),
        shape=_reply_shape,
    ),
    "/v1/responses": Endpoint(
        id_prefix="resp_",
        read=lambda fields, one: response_ask(fields, one.model),
        shape=_response_shape,
        refusal=in_our_words,
    ),
}


def generating_routes() -> list[Route]:
    """One for each endpoint."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Generation]]:
    async def handle(http: Request) -> Generation:
        return await generate(http, endpoint)

    return handle
