"""Generate behind a reply: the client is answered at once, and reads later what came of it.

Invariant: what is kept ends as completed, incomplete, cancelled or failed, unless the daemon ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message

from appliance.api.core.respond import Reply
from appliance.api.core.wire import json_response
from appliance.api.responses.replies import ResponseShape

ENDS_WITH = {"x-penstock-ends-with": "daemon"}
"""A daemon that is killed takes it along, and no socket tells its client."""
TOO_LONG = {
    "code": "response_too_long",
    "message": "with its conversation it is too long to be kept",
}
_RUNNING: set[asyncio.Task[None]] = set()
"""The loop keeps no task alive by itself."""


def respond(reply: Reply) -> Reply | Response:
    """Send a reply; in the background, answer that it is queued, and write it behind that."""
    form = reply.form
    if not (reply.ask.is_background and isinstance(form, ResponseShape)):
        return reply
    told, scope = form.begun(), reply.http.scope
    scope["state"] = dict(scope["state"])  # the connection's ends with its answer
    task = asyncio.get_running_loop().create_task(_write(reply, form))
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)
    return json_response(told, headers=reply.headers() | ENDS_WITH)


async def _write(reply: Reply, form: ResponseShape) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.get_running_loop().create_future()  # its client has its answer

    await reply(reply.http.scope, receive, send)
    if sent and sent[0].get("status") != 200:
        body = msgspec.json.decode(b"".join(one.get("body", b"") for one in sent))
        form.failed({"code": "server_error", "message": body["error"]["message"]})
    elif not form.is_kept:
        form.failed(TOO_LONG)
