"""What a response goes on from, and what is kept of it: /v1/responses between two requests.

Owns: `previous_response_id`, `store`, and the routes of one response.
Invariant: a conversation that goes on is the one that its client
would have sent in full.
Never: keeps anything for anybody but who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.authority import peer_of, require
from appliance.api.response_store import ResponseStore
from appliance.api.wire import json_response
from appliance.json_fields import Fields, invalid_value
from appliance.request import Role
from engine.errors import RequestError

Json = dict[str, Any]


def memory_routes() -> list[Route]:
    """A response that is kept, by its id."""
    return [
        Route("/v1/responses/{id}", response),
        Route("/v1/responses/{id}", forget, methods=["DELETE"]),
    ]


async def response(http: Request) -> Response:
    """GET /v1/responses/{id}: a kept response, as it was sent."""
    found = _store(http).response(http.path_params["id"], peer_of(http).name)
    return Response(found, media_type="application/json")


async def forget(http: Request) -> Response:
    """Let go of one."""
    response_id = http.path_params["id"]
    _store(http).forget(response_id, require(http, Role.USER).name)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def earlier(fields: Fields, http: Request) -> list[Json]:
    """The items that a conversation goes on from; empty where it begins.

    Raises:
        RequestError: 400 `previous_response_not_found`, as OpenAI says it.
    """
    previous = fields.text("previous_response_id")
    if not previous:
        return []
    try:
        return _store(http).items(previous, peer_of(http).name)
    except RequestError as error:
        raise RequestError(
            f"there is no response `{previous[:200]}` to go on from",
            code="previous_response_not_found",
            param="previous_response_id",
            hint="responses are kept in memory for a while; send the conversation in full",
        ) from error


def keeper(fields: Fields, http: Request) -> Callable[[Json], None] | None:
    """What keeps a response that has ended; None where its client does not want that."""
    if not fields.boolean("store", default=True):
        return None
    owner, store = peer_of(http).name, _store(http)
    items = [*earlier(fields, http), *_items(fields.get("input"))]

    def keep(ended: Json) -> None:
        store.keep(owner, ended, [*items, *ended["output"]])

    return keep


def _items(asked: object) -> list[Json]:
    if isinstance(asked, str):
        return [{"type": "message", "role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise invalid_value("input", "must be a string or a list of items")
    return asked


def _store(http: Request) -> ResponseStore:
    return cast(ResponseStore, http.app.state.responses)
