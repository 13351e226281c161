"""What a peer may do: by its role, or because a request is its own.

Owns: the two refusals, `role_required` and `not_owner`.
Invariant: whoever is not known to be more is a user, and a refusal says what would be needed.
Never: finds out who a peer is.
"""

from __future__ import annotations

from starlette.requests import Request

from appliance.api.wire import appliance_of, arrival_of
from appliance.request import Peer, Role
from engine.errors import Forbidden, RequestError


def peer_of(http: Request) -> Peer:
    """Who asks, as the server found out."""
    return arrival_of(http).peer


def is_known(http: Request) -> bool:
    """Whether who asks would still be let in; a reply that has no end asks again and again."""
    return arrival_of(http).is_known()


def require(http: Request, role: Role) -> Peer:
    """Who asks, if their role is enough.

    Raises:
        Forbidden: `role_required`.
    """
    peer = peer_of(http)
    if peer.role < role:
        raise Forbidden(
            f"this needs the role {role.name.lower()}; {peer.name} is a {peer.role.name.lower()}",
            code="role_required",
        )
    return peer


def require_owner(http: Request, request_id: str) -> Peer:
    """Who asks, if the live request is theirs, or they are an operator.

    Raises:
        Forbidden: `role_required` or `not_owner`.
        RequestError: 404 `request_not_found`.
    """
    peer = require(http, Role.USER)
    owner = appliance_of(http).owner_of(request_id)
    if owner is None:
        raise not_live(request_id)
    if peer.name != owner and peer.role < Role.OPERATOR:
        raise Forbidden(
            f"request `{request_id[:200]}` is not one of {peer.name}",
            code="not_owner",
            hint="operators may cancel anyone's",
        )
    return peer


def request_not_found(request_id: str) -> RequestError:
    """No such request, neither live nor ended."""
    return _not_found(f"there is no request `{request_id[:200]}`")


def not_live(request_id: str) -> RequestError:
    """No such request, or not any more."""
    return _not_found(f"there is no live request `{request_id[:200]}`", hint="it may have ended")


def _not_found(what: str, hint: str = "") -> RequestError:
    return RequestError(
        what,
        code="request_not_found",
        param="id",
        status=404,
        kind="not_found_error",
        hint=hint,
    )
