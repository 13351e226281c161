"""POST /v1/penstock/roles: what the workers are for, switched while they run.

Owns: its body.
Invariant: only operators change anything, and a body with something wrong changes nothing.
Never: decides where a request goes.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from appliance.api.authority import require
from appliance.api.wire import appliance_of, json_response
from appliance.configuration.settings import ROLES
from appliance.fleet.roles_change import RolesChange
from appliance.json_fields import Fields, invalid_value
from appliance.request import Role

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
