"""Keep responses for a while, with the items of their conversations, and show them to their owner.

Items of a conversation have ids, by which a later one may name them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.wire import (
    appliance_of,
    arrival_of,
    json_response,
    not_live,
    peer_of,
    require,
    require_owner,
    response_not_found,
)
from appliance.api.responses import fields as bodies
from appliance.daemon.requests.request import Role
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json, check
from engine.errors import RequestError

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
MAX_CONVERSATION_BYTES = 4 << 20
"""A longer conversation is not kept: each request that continues it reads all of it."""


class KeptItem(NamedTuple):
    """One item of a conversation, as JSON."""

    item_id: Any
    data: bytes


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    owner: str
    response: bytes
    items: tuple[KeptItem, ...]
    """The conversation up to its end: items of input and output."""
    num_output: int
    """The number of its items that are output, which come last."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + sum(len(item.data) for item in self.items)


class ResponseStore:
    """Responses by id; used by the loop and by threads that read bodies."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._holders: dict[tuple[str, Any], str] = {}
        """The newest response that holds an item, by the item's owner and id."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, owner: str, response: Json, items: list[Json]) -> None:
        """Remember one, unless its conversation is too long, and forget the oldest ones."""
        kept = _StoredResponse(
            owner,
            msgspec.json.encode(response),
            tuple(KeptItem(item.get("id"), msgspec.json.encode(item)) for item in items),
            len(response.get("output", ())),
        )
        response_id = response["id"]
        with self._lock:
            self._drop(response_id)
            if kept.num_bytes > min(MAX_CONVERSATION_BYTES, self._max_bytes):
                return
            self._kept[response_id] = kept
            self._num_bytes += kept.num_bytes
            for item in kept.items:
                self._holders[owner, item.item_id] = response_id
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, response_id: str, owner: str) -> bytes:
        """Return a response as it was sent, as JSON.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        return self._of(response_id, owner).response

    def items(self, response_id: str, owner: str) -> list[Json]:
        """Return the conversation that a response ended.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        return [msgspec.json.decode(item.data) for item in self._of(response_id, owner).items]

    def asked(self, response_id: str, owner: str) -> tuple[KeptItem, ...]:
        """Return the conversation that a response answered to.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        kept = self._of(response_id, owner)
        return kept.items[: len(kept.items) - kept.num_output]

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a stored response.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        self._of(response_id, owner)
        with self._lock:
            self._drop(response_id)

    def item(self, item_id: str, owner: str) -> Json | None:
        """Find an item of a kept conversation; None: it is not there, or another client's."""
        with self._lock:
            response_id = self._holders.get((owner, item_id))
        if response_id is None:
            return None
        items = self._of(response_id, owner).items
        found = next((one.data for one in items if one.item_id == item_id), None)
        return None if found is None else cast(Json, msgspec.json.decode(found))

    def _drop(self, response_id: str) -> None:
        """Forget a response, and its items that no newer one holds."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return
        self._num_bytes -= kept.num_bytes
        for item in kept.items:
            key = (kept.owner, item.item_id)
            if self._holders.get(key) == response_id:
                del self._holders[key]

    def _of(self, response_id: str, owner: str) -> _StoredResponse:
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner:
                raise response_not_found(response_id)
            self._kept.move_to_end(response_id)
            return kept


def memory_routes() -> list[Route]:
    """List the routes of a kept response."""
    return [
        Route("/v1/responses/{id}", response),
        Route("/v1/responses/{id}", forget, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", input_items),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    ]


async def response(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}: a kept response, as it was sent."""
    found = _store(http).response(http.path_params["id"], peer_of(http).name)
    return Response(found, media_type="application/json")


async def input_items(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}/input_items: the conversation that a kept response answered to."""
    response_id, owner = http.path_params["id"], peer_of(http).name
    told = list(_store(http).asked(response_id, owner))
    if http.query_params.get("order") != "asc":
        told.reverse()
    ends = {"first_id": told[0].item_id, "last_id": told[-1].item_id} if told else {}
    data = [msgspec.Raw(item.data) for item in told]
    return json_response({"object": "list", "data": data, "has_more": False, **ends})


async def cancel(http: HttpRequest) -> Response:
    """End a response that is being written; its own client reads it as far as it came."""
    response_id, owner = http.path_params["id"], require(http, Role.USER).name
    try:
        told: Json = msgspec.json.decode(_store(http).response(response_id, owner))
    except RequestError:
        told = {"id": response_id, "object": "response", "status": "in_progress"}
    if told["status"] in ("queued", "in_progress"):
        peer = require_owner(http, response_id)
        if not appliance_of(http).cancel(response_id, peer.name):
            raise not_live(response_id)
        told["status"] = "cancelled"
    return json_response(told)


async def forget(http: HttpRequest) -> Response:
    """Delete a stored response."""
    response_id = http.path_params["id"]
    _store(http).delete(response_id, require(http, Role.USER).name)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def previous_items(values: Json, http: HttpRequest, replayed: Replayed) -> list[Json]:
    """Find the items of the conversation to continue; empty where it begins.

    Raises:
        RequestError: 400 `previous_response_not_found`, as OpenAI says it.
    """
    previous = check(values, bodies.StoredResponses).previous_response_id
    if not previous:
        return []
    try:
        return replayed(_store(http).items, previous, peer_of(http).name)
    except RequestError as error:
        raise RequestError(
            f"there is no response `{previous[:200]}` to continue",
            code="previous_response_not_found",
            param="previous_response_id",
            hint="responses are kept in memory for a while; send the conversation in full",
        ) from error


def with_items(values: Json, http: HttpRequest, replayed: Replayed) -> Json:
    """Put items into a body's input in the places of references to them, and give all an id.

    A reference to what is not kept, or is another client's, stays.
    """
    asked = values.get("input")
    if isinstance(asked, str):
        asked = [{"type": "message", "role": "user", "content": asked}]
    if not isinstance(asked, list):
        return values  # which is refused
    owner, prefix = peer_of(http).name, arrival_of(http).request_id.removeprefix("resp_")
    items = []
    for index, one in enumerate(asked):
        if isinstance(one, dict):
            if one.get("type") == "item_reference" or one.keys() == {"id"}:
                one = replayed(_store(http).item, str(one.get("id")), owner) or one
            if not isinstance(one.get("id"), str):
                one = {**one, "id": f"item_{prefix}_{index}"}
        items.append(one)
    return {**values, "input": items}


def keep_for(values: Json, http: HttpRequest, replayed: Replayed) -> Callable[[Json], None] | None:
    """Make what keeps a response; None where its client does not want that."""
    if check(values, bodies.StoredResponses).store is False:
        return None
    owner, store = peer_of(http).name, _store(http)
    asked = [one for one in values["input"] if isinstance(one, dict)]
    items = [*previous_items(values, http, replayed), *asked]

    def keep(response: Json) -> None:
        store.add(owner, response, [*items, *response["output"]])

    return keep


def _store(http: HttpRequest) -> ResponseStore:
    return cast(ResponseStore, http.app.state.responses)
