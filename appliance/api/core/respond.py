"""Send an admitted request's reply, whole or streamed, until it ends or its client leaves.

Invariant: each admitted request is closed exactly once, whatever happens before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.api.core.ask import Ask
from appliance.api.core.stream import Delta, OpenReply, PromptEcho
from appliance.api.core.wire import (
    UNBUFFERED,
    appliance_of,
    arrival_of,
    error_response,
    ignored_header,
)
from appliance.daemon.requests.request import CLIENT_CLOSED_REQUEST, FAILED, HUNG_UP, Request
from appliance.daemon.survival.journal import Differs, Replayed
from engine.errors import RequestError, Unavailable
from engine.wire.finish_reason import FinishReason

KEEP_ALIVE_S = 10.0
MAX_INLINE_LOGPROBS = 2048
"""Replies that tell more of them at once are written in a thread."""

_log = logging.getLogger(__name__)


class ReplyForm(Protocol):
    """How a reply looks to its client, whole or as a stream."""

    @property
    def media_type(self) -> str:
        """The Content-Type of a streamed reply."""

    def whole(self, deltas: Iterable[Delta]) -> dict[str, object]:
        """Write the reply in one piece, from one delta per sequence."""

    def opening(self) -> bytes:
        """Begin a stream, before anything is generated."""

    def events(self, delta: Delta) -> bytes:
        """Write a delta for a stream; may be nothing."""

    def closing(self) -> bytes:
        """End a stream."""

    def failure(self, error: RequestError) -> bytes:
        """End a stream that failed."""

    def alive(self, place: int | None) -> bytes:
        """Keep a stream alive while nothing comes, for proxies that close idle ones.

        Args:
            place: in the queue; None if it does not wait there.
        """


class Reply:
    """Send the reply to an admitted request; starlette calls it as any response.

    Nothing is waited for between the admission and that call, so it always comes.
    """

    def __init__(
        self,
        http: HttpRequest,
        ask: Ask,
        request: Request,
        echoes: list[PromptEcho],
        form: ReplyForm,
        refusal: Callable[[RequestError], RequestError],
        replayed: Replayed,
    ) -> None:
        """Open the reply; the request may be admitted from now on.

        Args:
            request: what was made of it.
            echoes: what each prompt's choices begin with; empty if prompts are not repeated.
            refusal: puts a refusal in the words of the API that was asked.
        """
        self.http, self.ask, self.form = http, ask, form
        self._appliance = appliance_of(http)
        self._request, self._replayed = request, replayed
        self._reply = OpenReply(self._appliance, request, ask, replayed, echoes)
        self._in_its_words = refusal
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
        except Differs as error:
            status = 200  # which the dead daemon has sent
            _log.error("request %s was ended after a restart: %s", request.request_id, error)
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
        """Send one JSON object when everything is there."""
        whole = {sequence.seq_id: Delta(sequence) for sequence in self._request.sequences}
        async for deltas in self._reply.deltas():
            for delta in deltas:
                whole[delta.sequence.seq_id].add(delta)
        failure = self._failure(list(whole.values()))
        if failure is None:
            body = await self._written(self._whole, list(whole.values()))
            response = Response(body, headers=self.headers(), media_type="application/json")
        else:
            response = error_response(self.http, failure)
            arrival_of(self.http).refusal = None
            # Tokens were spent on it: a client that repeats it by itself doubles the load.
            response.headers["x-should-retry"] = "false"
        await response(scope, receive, send)
        return response.status_code

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Write server-sent events: headers at once, then one write for all that is ready."""
        write_part = arrival_of(self.http).write_part
        headers = self.headers() | UNBUFFERED | {"content-type": self.form.media_type}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            async for piece in self._pieces():
                await write_part(piece)
        except Differs:
            raise
        except Exception:  # noqa: BLE001 - the border of one reply
            # The status is out already: an event is the only way left to say it.
            _log.exception("request %s failed", self._request.request_id)
            last = self.form.failure(_internal("internal error"))
            await write_part(last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield one write for all that is ready."""
        if opening := self.form.opening():
            yield opening
        async for deltas in self._reply.deltas(KEEP_ALIVE_S):
            failure = self._failure(deltas)
            if failure is not None:
                yield self.form.failure(failure)
                return
            if not deltas:
                yield self.form.alive(self._replayed(self._appliance.queue_place, self._request))
            elif piece := await self._written(self._events, deltas):
                yield piece
        yield self.form.closing()

    async def _written(self, write: Callable[[list[Delta]], bytes], deltas: list[Delta]) -> bytes:
        """Write deltas; in a thread where they are large, so that other replies continue."""
        of_prompt = self.ask.prompt_logprobs is not None
        if of_prompt or self.ask.logprobs is not None:
            num_logprobs = sum(one.num_logprobs(has_prompt=of_prompt) for one in deltas)
        else:
            num_logprobs = 0
        if num_logprobs <= MAX_INLINE_LOGPROBS:
            return write(deltas)
        return await asyncio.to_thread(write, deltas)

    def _whole(self, deltas: list[Delta]) -> bytes:
        return msgspec.json.encode(self.form.whole(deltas))

    def _events(self, deltas: list[Delta]) -> bytes:
        return b"".join(map(self.form.events, deltas))

    def headers(self) -> dict[str, str]:
        """Return the headers beyond every reply's."""
        return ignored_header(self.ask.ignored)

    def _failure(self, deltas: list[Delta]) -> RequestError | None:
        """Why there is no proper end; a cancel by its own id is one, with reason `abort`."""
        reasons = {delta.finish_reason for delta in deltas}
        if FinishReason.ERROR in reasons:
            if self._request.failure is not None:
                return self._request.failure
            failed = next(d.sequence for d in deltas if d.finish_reason is FinishReason.ERROR)
            why = failed.error or "generation failed"
            if failed.is_refused:
                return self._in_its_words(self.ask.cannot_follow(why))
            return _internal(why)
        if FinishReason.ABORT in reasons and self._request.cancelled_by == "drain":
            return Unavailable("the daemon is stopping", code="draining")
        return None


def _internal(what: str) -> RequestError:
    return RequestError(what, code="internal", status=500, kind="server_error")
