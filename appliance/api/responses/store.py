"""Keep responses for a while, with the items of their conversations, and show them to their owner.

Items of a conversation have ids, by which a later one may name them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
from appliance.json.fields import Json, check, decoded, invalid_value
from engine.errors import RequestError
from engine.units import size_text

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
MAX_CONVERSATION_BYTES = 4 << 20
"""A longer conversation is not kept: each request that continues it reads all of it."""
_OWN_BYTES = 8 << 10
"""Maximum of the fields of a response that its body does not have."""


class KeptItem(NamedTuple):
    """One item of a conversation, as JSON."""

    item_id: Any
    data: bytes

    @classmethod
    def of(cls, item: Json) -> KeptItem:
        """Write an item."""
        return cls(item.get("id"), msgspec.json.encode(item))

    def read(self) -> Json:
        """Return the item, which may take milliseconds."""
        return cast(Json, decoded(self.data))


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
        self._holders: dict[tuple[str, Any], tuple[str, int]] = {}
        """The newest response that holds an item, and where, by owner and id."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, owner: str, response: Json, asked: Sequence[KeptItem]) -> bool:
        """Remember one, unless its conversation is too long, and forget the oldest ones.

        Args:
            asked: the items that it answers to.

        Returns:
            whether it is kept.
        """
        output = [KeptItem.of(item) for item in response["output"]]
        items = (*asked, *output)
        kept = _StoredResponse(owner, msgspec.json.encode(response), items, len(output))
        response_id = response["id"]
        with self._lock:
            self._drop(response_id)
            if kept.num_bytes > min(MAX_CONVERSATION_BYTES, self._max_bytes):
                return False
            self._kept[response_id] = kept
            self._num_bytes += kept.num_bytes
            for place, item in enumerate(items):
                self._holders[owner, item.item_id] = response_id, place
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))
            return True

    def response(self, response_id: str, owner: str) -> bytes:
        """Return a response as it was sent, as JSON.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        return self._of(response_id, owner).response

    def items(self, response_id: str, owner: str) -> tuple[KeptItem, ...]:
        """Return the conversation that a response ended.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        return self._of(response_id, owner).items

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

    def item(self, item_id: str, owner: str) -> KeptItem | None:
        """Find an item of a kept conversation; None: it is not there, or another client's."""
        with self._lock:
            holder = self._holders.get((owner, item_id))
        if holder is None:
            return None
        response_id, place = holder
        return self._of(response_id, owner).items[place]

    def _drop(self, response_id: str) -> None:
        """Forget a response, and its items that no newer one holds."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return
        self._num_bytes -= kept.num_bytes
        for item in kept.items:
            key = (kept.owner, item.item_id)
            if self._holders.get(key, ("", 0))[0] == response_id:
                del self._holders[key]

    def _of(self, response_id: str, owner: str) -> _StoredResponse:
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner:
                raise response_not_found(response_id)
            self._kept.move_to_end(response_id)
            return kept


_UNFINISHED = ("queued", "in_progress")


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
    if told["status"] in _UNFINISHED:
        peer = require_owner(http, response_id)
        if not appliance_of(http).cancel(response_id, peer.name):
            raise not_live(response_id)
        told["status"] = "cancelled"
    return json_response(told)


class _Status(msgspec.Struct):
    """All of a response that says whether it has ended."""

    status: str = ""


async def forget(http: HttpRequest) -> Response:
    """Delete a stored response; one that is being written would come back with its end.

    Raises:
        RequestError: 409: it has not ended.
    """
    response_id, owner = http.path_params["id"], require(http, Role.USER).name
    told = msgspec.json.decode(_store(http).response(response_id, owner), type=_Status)
    if told.status in _UNFINISHED:
        what = f"the response `{response_id}` is being written"
        raise RequestError(what, code="response_not_ended", status=409, hint="cancel it first")
    _store(http).delete(response_id, owner)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def previous_items(values: Json, http: HttpRequest, replayed: Replayed) -> list[KeptItem]:
    """Find the items of the conversation to continue; empty where it begins.

    Raises:
        RequestError: 400 `previous_response_not_found`, as OpenAI says it.
    """
    previous = check(values, bodies.StoredResponses).previous_response_id
    if not previous:
        return []
    try:
        found = replayed(_store(http).items, previous, peer_of(http).name)
        return [KeptItem(*one) for one in found]
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

    Raises:
        RequestError: a few words refer to more than one conversation may have.
    """
    asked = values.get("input")
    if isinstance(asked, str):
        asked = [{"type": "message", "role": "user", "content": asked}]
    if not isinstance(asked, list):
        return values  # which is refused
    owner, prefix = peer_of(http).name, arrival_of(http).request_id.removeprefix("resp_")
    items, num_bytes = [], 0
    for index, one in enumerate(asked):
        if isinstance(one, dict):
            if one.get("type") == "item_reference" or one.keys() == {"id"}:
                found = replayed(_store(http).item, str(one.get("id")), owner)
                if found is not None:
                    kept = KeptItem(*found)
                    num_bytes += len(kept.data)
                    if num_bytes > MAX_CONVERSATION_BYTES:
                        most = size_text(MAX_CONVERSATION_BYTES)
                        raise invalid_value("input", f"refers to more than {most} of kept items")
                    one = kept.read()
            if not isinstance(one.get("id"), str):
                one = {**one, "id": f"item_{prefix}_{index}"}
        items.append(one)
    return {**values, "input": items}


def conversation(
    values: Json, previous: Sequence[KeptItem], *, is_background: bool
) -> tuple[KeptItem, ...]:
    """List the items that a valid body's response answers to; none where it is not to be kept.

    Args:
        previous: the items that it continues.

    Raises:
        RequestError: they are too long to be kept, and the response is read from there alone.
    """
    if values.get("store") is False:
        return ()
    asked = [KeptItem.of(one) for one in values["input"] if isinstance(one, dict)]
    if is_background:
        num_bytes = len(msgspec.json.encode(values)) + sum(len(one.data) for one in previous)
        if num_bytes + _OWN_BYTES > MAX_CONVERSATION_BYTES:
            most = size_text(MAX_CONVERSATION_BYTES)
            raise invalid_value("input", f"is too long for `background`: {most} are kept in all")
    return (*previous, *asked)


def keep_for(
    values: Json, http: HttpRequest, asked: Sequence[KeptItem]
) -> Callable[[Json], bool] | None:
    """Make what keeps a response, and says so; None where its client does not want that."""
    if values.get("store") is False:
        return None
    owner, store = peer_of(http).name, _store(http)
    return lambda response: store.add(owner, response, asked)


def _store(http: HttpRequest) -> ResponseStore:
    return cast(ResponseStore, http.app.state.responses)
