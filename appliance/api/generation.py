"""Answer every POST that generates: enter the model, decode, prepare, admit, respond."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.admit import admit
from appliance.api.core.decode import decode
from appliance.api.core.endpoint import Endpoint, NothingToGenerate
from appliance.api.core.enter import enter_model
from appliance.api.core.prepare import prepare
from appliance.api.core.respond import Reply
from appliance.api.core.wire import appliance_of, json_response
from appliance.api.endpoints import ENDPOINTS


async def generate(http: HttpRequest, endpoint: Endpoint) -> Reply | Response:
    """Generate what a body asks for; starlette calls the reply, which then sends itself."""
    async with enter_model(http, endpoint) as entry:
        asked = await decode(entry)
        prepared = await prepare(entry, asked)
        reply = admit(entry, asked, prepared)
        return endpoint.respond(reply)


def generating_routes() -> list[Route]:
    """Make a POST route for each row of ENDPOINTS."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: Endpoint) -> Callable[[HttpRequest], Awaitable[Reply | Response]]:
    async def handle(http: HttpRequest) -> Reply | Response:
        try:
            return await generate(http, endpoint)
        except NothingToGenerate as ended:
            is_unloaded = ended.keep_alive_s == 0 and _is_unloaded(http, ended)
            return json_response(ended.told(is_unloaded=is_unloaded))

    return handle


def _is_unloaded(http: HttpRequest, ended: NothingToGenerate) -> bool:
    """Say whether a model that is not to stay is gone, or goes: the first stays while served."""
    swaps = appliance_of(http).swaps
    return swaps is not None and not swaps.stays(ended.reply["model"])
