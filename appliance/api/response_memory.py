"""What a response goes on from, and what is kept of it: /v1/responses between two requests.

Owns: `previous_response_id`, `store`, and the routes of one response.
Invariant: a conversation that goes on is the one that its client
would have sent in full.
Never: keeps anything for anybody but who asked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.authority import peer_of, request_not_found, require
from appliance.api.wire import json_response
from appliance.json_fields import Fields, invalid_value
from appliance.request import Role
from engine.errors import RequestError

# Responses that a client may go on from by their id.
#
# Owns: what is kept of them, in memory, with a bound.
# Invariant: a response is found by whoever asked for it and by nobody else; what is kept is bounded
# in number and in bytes, the oldest goes first, and all of it goes with the daemon.
# Never: writes to disk.


Json = dict[str, Any]

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    response: bytes
    items: bytes
    """The conversation up to its end: items of input and output."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by id; used by the loop and by threads that read bodies."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, owner: str, response: Json, items: list[Json]) -> None:
        """Remember one, and forget the oldest beyond the bounds."""
        kept = _Kept(owner, msgspec.json.encode(response), msgspec.json.encode(items))
        with self._lock:
            self._kept[response["id"]] = kept
            self._num_bytes += kept.num_bytes
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.num_bytes

    def response(self, response_id: str, owner: str) -> bytes:
        """One as it was sent, as JSON.

        Raises:
            RequestError: 404: there is none, or it is another's.
        """
        return self._of(response_id, owner).response

    def items(self, response_id: str, owner: str) -> list[Json]:
        """The conversation that it ended.

        Raises:
            RequestError: 404, likewise.
        """
        items: list[Json] = msgspec.json.decode(self._of(response_id, owner).items)
        return items

    def forget(self, response_id: str, owner: str) -> None:
        """Let go of one.

        Raises:
            RequestError: 404, likewise.
        """
        kept = self._of(response_id, owner)
        with self._lock:
            if self._kept.pop(response_id, None) is not None:
                self._num_bytes -= kept.num_bytes

    def _of(self, response_id: str, owner: str) -> _Kept:
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner:
                raise request_not_found(response_id)
            self._kept.move_to_end(response_id)
            return kept


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
