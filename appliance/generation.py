"""The two POSTs that generate: from a body to an accepted request to its reply.

Owns: the order of admission, the watch for a client that hangs up, and the request's one end.
Called by: api, which routes to `complete` and `chat`.
Invariant: each request that submit() accepts gets exactly one close(), whatever happens between.
Never: keeps a client waiting for its headers once a stream is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from appliance.openai import Ask, parse_chat, parse_completion
from appliance.protocol import utc_now
from appliance.replies import ReplyShape, error_object, fingerprint
from appliance.request import Appliance, Peer, Request
from appliance.stream import Delta, Reply
from appliance.wire import (
    appliance_of,
    client_request_id,
    error_response,
    json_response,
    read_body,
    reply_headers,
)
from engine.errors import RequestError, Unavailable
from engine.sequence import FinishReason, Sequence, Stamps

MAX_INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread, so that the loop does not stand still for them."""
KEEP_ALIVE_S = 10.0
CLIENT_CLOSED_REQUEST = 499

_log = logging.getLogger(__name__)


async def complete(http: HttpRequest) -> Generation:
    """POST /v1/completions."""
    return await _admit(http, is_chat=False)


async def chat(http: HttpRequest) -> Generation:
    """POST /v1/chat/completions."""
    return await _admit(http, is_chat=True)


async def _admit(http: HttpRequest, *, is_chat: bool) -> Generation:
    """Everything that can refuse a request before the router sees it."""
    arrived_ns = time.monotonic_ns()
    received_at = utc_now()
    request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    http.scope["state"] |= {"request_id": request_id, "arrived_ns": arrived_ns}
    appliance = appliance_of(http)
    body = await read_body(http)
    appliance.check_available()
    model = appliance.model
    ask = (
        parse_chat(body, model) if is_chat else parse_completion(body, model, appliance.max_queued)
    )
    prompt_text, prompts = await _tokenize(appliance, ask)
    _check_vocabulary(prompts, model.vocab_size)
    tokenized_ns = time.monotonic_ns()
    sequences = [
        Sequence(
            seq_id=appliance.next_seq_id(),
            request_id=request_id,
            index=index,
            prompt_token_ids=token_ids,
            sampling=ask.sampling(len(token_ids), model.max_model_len),
            stamps=Stamps(arrived_ns=arrived_ns, tokenized_ns=tokenized_ns),
        )
        for index, token_ids in enumerate(prompts)
    ]
    request = Request(
        request_id=request_id,
        endpoint=http.url.path,
        model=model.model_id,
        peer=http.scope["state"].get("peer") or Peer(),
        is_stream=ask.is_stream,
        received_at=received_at,
        sequences=sequences,
        prompt_text=prompt_text,
        client_request_id=client_request_id(http),
    )
    return Generation(http, ask, request)


async def _tokenize(appliance: Appliance, ask: Ask) -> tuple[str | None, list[list[int]]]:
    """The prompts' text, None where they came as ids, and their token ids."""
    tokenizer = appliance.tokenizer

    def tokenize() -> tuple[str | None, list[list[int]]]:
        prompts = [tokenizer.render_chat(ask.messages)] if ask.is_chat else ask.prompts
        for prompt in prompts:
            ask.check_length(prompt, tokenizer.max_token_chars, appliance.model.max_model_len)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = [
            tokenizer.encode(prompt, not ask.is_chat) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        return "\n".join(texts) or None, ids

    if ask.num_chars <= MAX_INLINE_CHARS:
        return tokenize()
    return await asyncio.to_thread(tokenize)


def _check_vocabulary(prompts: list[list[int]], vocab_size: int) -> None:
    """Refuse what the tokenizer knows and the model does not: an id without an embedding."""
    for token_ids in prompts:
        if max(token_ids, default=0) >= vocab_size:
            raise RequestError(
                f"the prompt has token {max(token_ids)}, the model has {vocab_size} tokens",
                code="invalid_value",
                param="prompt",
                hint="the tokenizer does not fit the model",
            )


class Generation:
    """A reply that generates; starlette calls it as it calls any response."""

    def __init__(self, http: HttpRequest, ask: Ask, request: Request) -> None:
        self._http = http
        self._appliance = appliance_of(http)
        self._ask = ask
        self._request = request
        self._reply = Reply(self._appliance, request, ask.stop, is_continuation=not ask.is_chat)
        self._shape = ReplyShape(
            ask=ask,
            request=request,
            tokenizer=self._appliance.tokenizer,
            created=int(time.time()),
            fingerprint=fingerprint(self._appliance.model),
        )
        self._has_hung_up = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, reply, close."""
        request, appliance = self._request, self._appliance
        appliance.submit(request)
        status = 500
        hang_up = asyncio.create_task(self._watch(receive))
        try:
            respond = self._stream if request.is_stream else self._respond
            status = await respond(scope, receive, send)
        except asyncio.CancelledError:
            status = 503
            raise
        finally:
            hang_up.cancel()
            if not request.is_finished:
                appliance.cancel(request.request_id, "drain" if status == 503 else "api")
            appliance.close(request, CLIENT_CLOSED_REQUEST if self._has_hung_up else status)

    async def _watch(self, receive: Receive) -> None:
        """Cancel when the client is gone; the reply then ends by itself."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_hung_up = True
        if not self._request.is_finished:
            self._appliance.cancel(self._request.request_id, "client")

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """One JSON object when everything is there."""
        whole = {sequence.seq_id: Delta(sequence) for sequence in self._request.sequences}
        async for deltas in self._reply.deltas():
            for delta in deltas:
                whole[delta.sequence.seq_id].add(delta)
        failure = self._failure(list(whole.values()))
        if failure is None:
            response = json_response(
                self._shape.whole(whole.values()), headers=reply_headers(self._http)
            )
        else:
            response = error_response(self._http, failure)
            # Tokens were spent on it: a client that repeats it by itself doubles the load.
            response.headers["x-should-retry"] = "false"
        await response(scope, receive, send)
        return response.status_code

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Server-sent events: headers at once, then one write for whatever is ready."""
        headers = reply_headers(self._http) | {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            async for piece in self._events():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception:  # noqa: BLE001 - the border of one reply
            # The status is out already: an event is the only way left to say it.
            _log.exception("request %s failed", self._request.request_id)
            event = _event(error_object(_internal("internal error")))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        return 200

    async def _events(self) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        shape, ask = self._shape, self._ask
        async for deltas in self._reply.deltas(KEEP_ALIVE_S):
            if not deltas:
                yield b": keep-alive\n\n"
                continue
            failure = self._failure(deltas)
            if failure is not None:
                yield _event(error_object(failure))
                return
            events = []
            for delta in deltas:
                if not (delta.text or delta.finish_reason or ask.wants_tokens):
                    continue  # its text is held back
                is_first = delta.sequence.index not in begun
                begun.add(delta.sequence.index)
                if is_first and ask.is_chat:
                    events.append(_event(shape.role_chunk(delta.sequence)))
                events.append(_event(shape.chunk(delta, is_first)))
            if events:
                yield b"".join(events)
        if ask.include_usage:
            yield _event(shape.usage_chunk())

    def _failure(self, deltas: list[Delta]) -> RequestError | None:
        """Why there is no proper end; a cancel by its own id is one, with reason `abort`."""
        reasons = {delta.finish_reason for delta in deltas}
        if FinishReason.ERROR in reasons:
            failed = [d.sequence.error for d in deltas if d.finish_reason is FinishReason.ERROR]
            return _internal(failed[0] or "generation failed")
        if FinishReason.ABORT in reasons and self._request.cancelled_by == "drain":
            return Unavailable("the appliance is stopping", code="draining")
        return None


def _internal(what: str) -> RequestError:
    return RequestError(what, code="internal", status=500, kind="server_error")


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
