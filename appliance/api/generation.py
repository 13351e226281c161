"""Handle every POST that generates, from its table row to the end of its reply.

Owns: the way in, which is the same for every such endpoint; the watch for a client that hangs up,
and what keeps a waiting stream alive; the table.
Invariant: each request that submit() accepts gets exactly one close(), whatever happens between.
Never: keeps a client waiting for its headers once a stream is accepted; makes other replies wait
while it writes a large one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.admission import Accepted, accept
from appliance.api.appliance import Appliance
from appliance.api.ask import Ask
from appliance.api.fair_threads import hang_up
from appliance.api.messages_api import MessageShape, in_anthropics_words, messages_ask
from appliance.api.ollama_api import (
    NothingToGenerate,
    OllamaShape,
    chat_ask_of,
    generate_ask,
    in_ollamas_words,
)
from appliance.api.openai import chat_ask, completion_ask
from appliance.api.replies import ReplyShape, fingerprint
from appliance.api.response_events import ResponseShape
from appliance.api.responses import in_our_words, previous_items, response_ask, store_for
from appliance.api.stream import Delta, OpenReply
from appliance.api.wire import (
    appliance_of,
    arrival_of,
    client_request_id,
    error_response,
    json_response,
    require,
)
from appliance.fleet.swaps import IncomingRequest
from appliance.json_fields import Fields
from appliance.request import CLIENT_CLOSED_REQUEST, FAILED, HUNG_UP, Role
from engine.errors import RequestError, Unavailable
from engine.schedule.sequence import FinishReason

KEEP_ALIVE_S = 10.0
MAX_INLINE_LOGPROBS = 2048
"""Replies that tell more of them at once are written in a thread."""
MAX_IGNORED = 20
"""Names in the header that tells which fields had no effect."""

_log = logging.getLogger(__name__)


class ReplyForm(Protocol):
    """How a reply looks to its client, whole or as a stream."""

    @property
    def media_type(self) -> str:
        """The Content-Type of a streamed reply."""

    def whole(self, deltas: Iterable[Delta]) -> dict[str, object]:
        """The reply in one piece; one delta per sequence."""

    def opening(self) -> bytes:
        """What a stream begins with, before anything is generated."""

    def events(self, delta: Delta) -> bytes:
        """What a stream tells of a delta; may be nothing."""

    def closing(self) -> bytes:
        """What a stream ends with."""

    def failure(self, error: RequestError) -> bytes:
        """What a stream ends with instead if it fails."""

    def alive(self, place: int | None) -> bytes:
        """What a stream says while nothing comes, lest somebody between takes it for dead.

        Args:
            place: in the queue; None if it does not wait there.
        """


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What sets one POST that generates apart from the others."""

    id_prefix: str
    """Of its requests' ids."""
    read: Callable[[Fields, HttpRequest], Ask]
    """Validates a body; called in a thread where that is large."""
    shape: Callable[[Accepted, HttpRequest], ReplyForm]
    """What its replies look like."""
    refusal: Callable[[RequestError], RequestError] = lambda error: error
    """A refusal of what was asked, in words that its clients know."""


async def generate(http: HttpRequest, endpoint: Endpoint) -> Generation:
    """From a body to a request in the queue, and the reply that is open for it.

    Raises:
        RequestError: nothing is kept: it was refused as `accept` says, or the queue is full.
    """
    appliance = appliance_of(http)
    arrival_of(http).generates(endpoint.id_prefix)
    with await _turn(http, appliance):
        try:
            accepted = await accept(http, lambda fields: endpoint.read(fields, http))
        except RequestError as error:
            raise endpoint.refusal(error) from error
        reply = Generation(http, accepted, endpoint)
        appliance.submit(accepted.request)
        return reply


class _Asked(msgspec.Struct):
    """All of a body that decides which model it is for."""

    model: str | None = None


async def _turn(http: HttpRequest, appliance: Appliance) -> AbstractContextManager[None]:
    """Where requests may name other models than the one that is served: wait for it, and hold it.

    Raises:
        ClientDisconnect: the client left meanwhile.
    """
    swaps, arrival = appliance.swaps, arrival_of(http)
    if swaps is None:
        return nullcontext()
    require(http, Role.USER)
    body = await http.body()
    arrival.has_body()
    try:
        asked = msgspec.json.decode(body, type=_Asked).model or ""
    except msgspec.MsgspecError:
        asked = ""  # it will be refused in the usual words
    name = swaps.name_of(asked)
    asker = IncomingRequest(
        arrival.peer.name,
        len(body),
        arrival.request_id,
        http.url.path,
        arrival.received_at,
        arrival.arrived_ns,
        arrival.peer,
        client_request_id(http),
    )
    if swaps.can_enter(name):
        await swaps.enter(name, asker)
        return swaps
    gone = asyncio.create_task(hang_up(http))
    try:
        is_in = await swaps.enter(name, asker, gone)
    finally:
        gone.cancel()
    if not is_in:
        raise ClientDisconnect
    arrival.swap_wait_ns = time.monotonic_ns() - arrival.arrived_ns
    return swaps


class Generation:
    """The reply to a request that has been submitted; starlette calls it as any response.

    Nothing is waited for between the submission and that call, so it always comes.

    Args:
        http: what it answers.
        accepted: what was asked, and the request.
        endpoint: how the reply looks, and in which words it fails.
    """

    def __init__(self, http: HttpRequest, accepted: Accepted, endpoint: Endpoint) -> None:
        self._http = http
        self._appliance = appliance_of(http)
        self._ask = accepted.ask
        self._request = accepted.request
        self._reply = OpenReply(self._appliance, accepted.request, accepted.ask, accepted.echoes)
        self._shape = endpoint.shape(accepted, http)
        self._in_its_words = endpoint.refusal
        self._has_hung_up = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply over ASGI, then close the request."""
        request, appliance = self._request, self._appliance
        status = 500
        watch = asyncio.create_task(self._watch(receive))
        try:
            respond = self._stream if request.is_stream else self._respond
            status = await respond(scope, receive, send)
        except asyncio.CancelledError:
            status = 503
            raise
        finally:
            watch.cancel()
            if not request.is_finished:
                appliance.cancel(request.request_id, "drain" if status == 503 else FAILED)
            appliance.close(request, CLIENT_CLOSED_REQUEST if self._has_hung_up else status)

    async def _watch(self, receive: Receive) -> None:
        """Cancel when the client is gone; the reply then ends by itself."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_hung_up = True
        if not self._request.is_finished:
            self._appliance.cancel(self._request.request_id, HUNG_UP)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """One JSON object when everything is there."""
        whole = {sequence.seq_id: Delta(sequence) for sequence in self._request.sequences}
        async for deltas in self._reply.deltas():
            for delta in deltas:
                whole[delta.sequence.seq_id].add(delta)
        failure = self._failure(list(whole.values()))
        if failure is None:
            body = await self._written(self._whole, list(whole.values()))
            response = Response(body, headers=self._headers(), media_type="application/json")
        else:
            response = error_response(self._http, failure)
            # Tokens were spent on it: a client that repeats it by itself doubles the load.
            response.headers["x-should-retry"] = "false"
        await response(scope, receive, send)
        return response.status_code

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Server-sent events: headers at once, then one write for whatever is ready."""
        write_part = arrival_of(self._http).write_part
        headers = self._headers() | {
            "content-type": self._shape.media_type,
            "cache-control": "no-cache",
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            async for piece in self._pieces():
                await write_part(piece)
        except Exception:  # noqa: BLE001 - the border of one reply
            # The status is out already: an event is the only way left to say it.
            _log.exception("request %s failed", self._request.request_id)
            last = self._shape.failure(_internal("internal error"))
            await write_part(last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def _pieces(self) -> AsyncIterator[bytes]:
        """One write for whatever is ready."""
        if opening := self._shape.opening():
            yield opening
        async for deltas in self._reply.deltas(KEEP_ALIVE_S):
            failure = self._failure(deltas)
            if failure is not None:
                yield self._shape.failure(failure)
                return
            if not deltas:
                yield self._shape.alive(self._appliance.queue_place(self._request))
            elif piece := await self._written(self._events, deltas):
                yield piece
        yield self._shape.closing()

    async def _written(self, write: Callable[[list[Delta]], bytes], deltas: list[Delta]) -> bytes:
        """What a client reads of deltas; where that is much, other replies go on meanwhile."""
        of_prompt = self._ask.prompt_logprobs is not None
        if of_prompt or self._ask.logprobs is not None:
            num_logprobs = sum(one.num_logprobs(has_prompt=of_prompt) for one in deltas)
        else:
            num_logprobs = 0
        if num_logprobs <= MAX_INLINE_LOGPROBS:
            return write(deltas)
        return await asyncio.to_thread(write, deltas)

    def _whole(self, deltas: list[Delta]) -> bytes:
        return msgspec.json.encode(self._shape.whole(deltas))

    def _events(self, deltas: list[Delta]) -> bytes:
        return b"".join(map(self._shape.events, deltas))

    def _headers(self) -> dict[str, str]:
        """Beyond those that edge gives every reply."""
        names = self._ask.ignored[:MAX_IGNORED]
        if not names:
            return {}
        clean = [re.sub(r"[^A-Za-z0-9_.-]", "", name)[:64] for name in names]
        return {"x-penstock-ignored": ", ".join(filter(None, clean))}

    def _failure(self, deltas: list[Delta]) -> RequestError | None:
        """Why there is no proper end; a cancel by its own id is one, with reason `abort`."""
        reasons = {delta.finish_reason for delta in deltas}
        if FinishReason.ERROR in reasons:
            if self._request.failure is not None:
                return self._request.failure
            failed = next(d.sequence for d in deltas if d.finish_reason is FinishReason.ERROR)
            why = failed.error or "generation failed"
            if failed.is_refused:
                return self._in_its_words(self._ask.cannot_follow(why))
            return _internal(why)
        if FinishReason.ABORT in reasons and self._request.cancelled_by == "drain":
            return Unavailable("the appliance is stopping", code="draining")
        return None


def _internal(what: str) -> RequestError:
    return RequestError(what, code="internal", status=500, kind="server_error")


# The POSTs that generate: for each its path, how its body is read, what its reply looks like.
# Invariant: whatever is asked by any of them goes the one way of generation.generate.
# Never: reads a field, or writes a reply.


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
        on_end=store_for(accepted.fields, http),
    )


ENDPOINTS = {
    "/v1/completions": Endpoint(
        id_prefix="cmpl-",
        read=lambda fields, http: completion_ask(
            fields.values, appliance_of(http).model, appliance_of(http).max_per_request
        ),
        shape=_reply_shape,
    ),
    "/v1/chat/completions": Endpoint(
        id_prefix="chatcmpl-",
        read=lambda fields, http: chat_ask(fields.values, appliance_of(http).model),
        shape=_reply_shape,
    ),
    "/v1/responses": Endpoint(
        id_prefix="resp_",
        read=lambda fields, http: response_ask(
            fields, appliance_of(http).model, previous_items(fields, http)
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
        refusal=in_ollamas_words,
    ),
    "/api/generate": Endpoint(
        id_prefix="gen-",
        read=lambda fields, http: generate_ask(fields, appliance_of(http).model),
        shape=lambda accepted, _http: OllamaShape(accepted.request, is_chat=False),
        refusal=in_ollamas_words,
    ),
}


def generating_routes() -> list[Route]:
    """A POST route for each row of ENDPOINTS."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Generation | Response]]:
    async def handle(http: Request) -> Generation | Response:
        try:
            return await generate(http, endpoint)
        except NothingToGenerate as ended:
            return json_response(ended.reply)

    return handle
