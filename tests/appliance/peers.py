"""The application without a server, for tests of what depends on who asks."""

from __future__ import annotations

import httpx
from starlette.types import ASGIApp

from appliance.api.core.wire import Arrival
from appliance.api.routes import build_app
from appliance.daemon.requests.request import Peer, Role
from tests.worlds.daemon_parts import FakeAppliance

OPERATOR = Peer(uid=0, user="root", role=Role.OPERATOR)
ALICE = Peer(uid=1001, user="alice", role=Role.USER)
BOB = Peer(key="bob", role=Role.USER)
VIEWER = Peer(uid=1003, user="vera", role=Role.VIEWER)


def client_of(
    appliance: FakeAppliance, peer: Peer | None, app: ASGIApp | None = None
) -> httpx.AsyncClient:
    """A client as which the server knows `peer`; of an application of its own unless given one."""
    app = app or build_app(appliance)
    transport = httpx.ASGITransport(app=_known(app, peer), raise_app_exceptions=False)
    return httpx.AsyncClient(base_url="http://localhost", transport=transport)


def _known(app: ASGIApp, peer: Peer | None) -> ASGIApp:
    async def asgi(scope, receive, send):
        async def write_part(part):
            await send({"type": "http.response.body", "body": part, "more_body": True})

        Arrival(write_part, peer or Peer()).put_into(scope)
        await app(scope, receive, send)

    return asgi
