"""What is under way, over HTTP: requests, frames, cancelling, draining.

Owns: /v1/requests and the routes of /v1/penstock that speak of the present.
Invariant: whoever reads the appliance may read all of this; what changes something asks authority.
Never: decides about requests; it asks the Appliance.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from appliance.api.authority import (
    is_known,
    not_live,
    peer_of,
    request_not_found,
    require,
    require_owner,
)
from appliance.api.wire import appliance_of, json_response
from appliance.configuration.settings import ROLES
from appliance.fleet.roles_change import RolesChange
from appliance.json_fields import Fields, invalid_value
from appliance.log.query import most_rows
from appliance.request import Role


def control_routes() -> list[Route]:
    """What the console and the CLI use."""
    return [
        Route("/v1/requests", requests),
        Route("/v1/requests/{id}", request),
        Route("/v1/requests/{id}", cancel, methods=["DELETE"]),
        Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/penstock/state", state),
        Route("/v1/penstock/stream", stream),
        Route("/v1/penstock/whoami", whoami),
        Route("/v1/penstock/drain", drain, methods=["POST"]),
        Route("/v1/penstock/resume", resume, methods=["POST"]),
    ]


async def requests(http: Request) -> Response:
    """Live requests, then the last finished ones; at most `limit`."""
    most = most_rows(http.query_params)
    return json_response({"object": "list", "data": appliance_of(http).request_frames()[:most]})


async def request(http: Request) -> Response:
    """GET /v1/requests/{id}: a request, live or from the log."""
    request_id = http.path_params["id"]
    frame = appliance_of(http).request_frame(request_id)
    if frame is None:
        frame = await asyncio.to_thread(appliance_of(http).logged_frame, request_id)
    if frame is None:
        raise request_not_found(request_id)
    return json_response(frame)


async def cancel(http: Request) -> Response:
    """End a live request; its own client reads finish reason `abort`."""
    request_id = http.path_params["id"]
    peer = require_owner(http, request_id)
    if not appliance_of(http).cancel(request_id, peer.name):
        raise not_live(request_id)
    return json_response({"id": request_id, "status": "cancelled"})


async def state(http: Request) -> Response:
    """Everything as it is now."""
    return Response(appliance_of(http).frame_json(), media_type="application/json")


async def stream(http: Request) -> Response:
    """Frames, the newest at once and each new one when it is made, until either side leaves.

    A key that is revoked meanwhile gets no further one.
    """
    wants_events = "text/event-stream" in http.headers.get("accept", "")
    prefix, suffix = (b"data: ", b"\n\n") if wants_events else (b"", b"\n")
    media_type = "text/event-stream" if wants_events else "application/x-ndjson"

    async def lines() -> AsyncIterator[bytes]:
        if http.method == "HEAD":
            return
        async for frame_json in _frames(http):
            yield prefix + frame_json + suffix

    return StreamingResponse(lines(), media_type=media_type, headers={"cache-control": "no-store"})


async def _frames(http: Request) -> AsyncIterator[bytes]:
    """Frames until the server stops, or knows its client no longer."""
    appliance, seq = appliance_of(http), -1
    stopped = asyncio.create_task(http.app.state.stopping.wait())
    try:
        while True:
            newer = asyncio.create_task(appliance.next_frame_json(seq))
            try:
                await asyncio.wait({newer, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() or not is_known(http):
                    return
                seq, frame_json = newer.result()
            finally:
                newer.cancel()
            yield frame_json
            if appliance_of(http) is not appliance:
                return  # its model has come: whoever asks again sees another
    finally:
        stopped.cancel()


async def whoami(http: Request) -> Response:
    """Who the appliance takes its client for."""
    peer = peer_of(http)
    known = {"name": peer.name, "role": peer.role.name.lower(), "uid": peer.uid, "key": peer.key}
    return json_response(known)


async def drain(http: Request) -> Response:
    """Take no new work; what is accepted goes on."""
    appliance_of(http).drain(require(http, Role.OPERATOR).name)
    return json_response({"status": "draining"})


async def resume(http: Request) -> Response:
    """Take work again after a drain; for operators."""
    appliance_of(http).resume(require(http, Role.OPERATOR).name)
    return json_response({"status": "resumed"})


# POST /v1/penstock/roles: what the workers are for, switched while they run.
#
# Owns: its body.
# Invariant: only operators change anything, and a body with something wrong changes nothing.
# Never: decides where a request goes.


MAX_TARGET_MS = 86_400_000


async def switch_roles(http: Request) -> Response:
    """Change roles, targets or both; an empty object changes nothing and tells what is so."""
    peer = require(http, Role.OPERATOR)
    fields = Fields.of_body(await http.body())
    roles = fields.text("roles")
    if roles not in (None, *ROLES):
        raise invalid_value("roles", f"must be one of {', '.join(ROLES)}")
    change = RolesChange(
        roles,
        fields.integer("slo_ttft_ms", 0, MAX_TARGET_MS),
        fields.integer("slo_itl_ms", 0, MAX_TARGET_MS),
    )
    if fields.ignored:
        raise invalid_value(fields.ignored[0], "is not known here")
    return json_response(appliance_of(http).set_roles(change, peer.name))
