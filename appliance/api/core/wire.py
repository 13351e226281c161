"""Connect HTTP and handlers: identify the caller, write JSON and errors.

Invariant: a refusal that may pass says when to come back, in both headers that clients read.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from appliance.api.core.appliance import Appliance
from appliance.api.core.dialects import Dialect, dialect_of, error_body
from appliance.daemon.requests.request import Peer, Role
from appliance.daemon.survival.journal import Journal, Replayed
from appliance.json.fields import Json, decode_object
from appliance.observe.frame.protocol import utc_now
from engine.errors import Forbidden, RequestError

UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""The headers of a reply in parts: nginx and other proxies pass each part on as it comes."""
RUNNING_VERSION = version("penstock")
"""The version of the code that runs: an upgrade replaces the files first, then the daemon."""
_MAX_IGNORED = 20
MAX_SMALL_BYTES = 64 << 10
_KEY = "arrival"
"""Under which the scope's state has it; nothing else is passed on there."""


def _new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class KeptWords(NamedTuple):
    """What the next daemon says of a request before it can read its body, or instead."""

    request_id: str
    model: str
    failure: bytes
    """The events that end its stream with an error; empty: a whole reply."""
    ping: bytes
    """An event that keeps its stream alive; empty: its clients know none."""


@dataclass(slots=True)
class Arrival:
    """What is known of one request besides its body."""

    write_part: Callable[[bytes], Awaitable[None]]
    """Sends a part of a streamed reply's body; the connection's own."""
    peer: Peer = field(default_factory=Peer)
    """The client, once the gate has identified it; before that an unnamed one."""
    is_known: Callable[[], bool] = lambda: True
    """Tell whether the client would still be let in; endless replies ask repeatedly."""
    request_id: str = field(default_factory=_new_id)
    """Every reply's x-request-id; a generating request gets another, with a prefix."""
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    """CLOCK_MONOTONIC when its head arrived, or if it has a body, when that was complete."""
    received_at: str = field(default_factory=utc_now)
    """The same moment as ISO 8601, UTC."""
    swap_wait_ns: int = 0
    """Part of the time since arrival in which it waited for its model's swap."""
    _has_body: bool = False
    journal: Callable[[], Journal | None] = lambda: None
    """Makes the journal of a request that outlives the daemon; None: it ends with the daemon."""
    keep: Callable[[Journal, KeptWords, bytes], None] = lambda *_: None
    """Keeps an admitted request and its connection for the next daemon, given its body."""
    refusal: RequestError | None = None
    """The error that it was answered with; None: it was not, or it has a row that says so."""
    hang_up: Callable[[], None] = lambda: None
    """Ends the connection, whatever has not been read; what is still sent on it goes nowhere."""

    def put_into(self, scope: Scope) -> None:
        """Keep it where all handlers of this request find it."""
        scope.setdefault("state", {})[_KEY] = self

    def generates(self, id_prefix: str, replayed: Replayed) -> None:
        """Name its id by the kind of text it asks for, as clients expect."""
        self.request_id = f"{id_prefix}{replayed(secrets.token_hex, 12)}"

    def has_body(self, replayed: Replayed) -> None:
        """Note that the whole body has arrived.

        A client that sends slowly has not waited for us, and gains no place in the queue by it.
        Nothing happens the second time.
        """
        if self._has_body:
            return
        self._has_body = True
        self.arrived_ns, self.received_at = replayed(time.monotonic_ns), replayed(utc_now)


def arrival_of(http: Request) -> Arrival:
    """Read how a request came in."""
    return cast(Arrival, http.scope["state"][_KEY])


def client_request_id(http: Request) -> str | None:
    """Read the client's own id for the request, of harmless characters; None if not given."""
    given = http.headers.get("x-request-id", "")
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:128] or None


def appliance_of(http: Request) -> Appliance:
    """Find the appliance that the application was built for."""
    return cast(Appliance, http.app.state.appliance)


async def small_object(http: Request) -> Json:
    """Read the body of a request that says little, on the loop.

    Raises:
        RequestError: it is longer than any such body, or no JSON object.
    """
    body = await http.body()
    if len(body) > MAX_SMALL_BYTES:
        what = f"the body is larger than {MAX_SMALL_BYTES} bytes"
        raise RequestError(what, code="body_too_large", status=413)
    return decode_object(body)


def error_object(error: RequestError) -> dict[str, object]:
    """Write OpenAI's error object; `code` is a string or null."""
    return error_body(Dialect.OPENAI, error)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Make a JSON reply of anything that msgspec encodes."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def streamed(lines: AsyncIterator[bytes], media_type: str) -> StreamingResponse:
    """Make a reply that sends each line as it comes."""
    return StreamingResponse(lines, media_type=media_type, headers=UNBUFFERED)


def error_response(http: Request, error: RequestError) -> Response:
    """Write an error in the API's own shape, and when to come back."""
    arrival_of(http).refusal = error
    headers = reply_headers(http)
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    body = error_body(dialect_of(http.scope["path"]), error, headers["x-request-id"])
    return json_response(body, status=error.status, headers=headers)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Make the header that names the fields without effect; none: no header."""
    if not names:
        return {}
    clean = [re.sub(r"[^A-Za-z0-9_.-]", "", name)[:64] for name in names[:_MAX_IGNORED]]
    return {"x-penstock-ignored": ", ".join(filter(None, clean))}


def reply_headers(http: Request) -> dict[str, str]:
    """Return the headers of every reply."""
    arrival = arrival_of(http)
    elapsed_ms = (time.monotonic_ns() - arrival.arrived_ns) // 1_000_000
    headers = {"x-request-id": arrival.request_id, "openai-processing-ms": str(elapsed_ms)}
    if dialect_of(http.scope["path"]) is Dialect.ANTHROPIC:
        headers["request-id"] = arrival.request_id
    if client_id := client_request_id(http):
        headers["x-client-request-id"] = client_id
    return headers


def peer_of(http: Request) -> Peer:
    """Find the peer of a request, as the server identified it."""
    return arrival_of(http).peer


def is_known(http: Request) -> bool:
    """Tell whether the client would still be let in; endless replies ask repeatedly."""
    return arrival_of(http).is_known()


def require(http: Request, role: Role) -> Peer:
    """Find the peer of a request, if its role is enough.

    Raises:
        Forbidden: `role_required`.
    """
    peer = peer_of(http)
    if peer.role < role:
        raise Forbidden(
            f"this needs the role {role.name.lower()}; {peer.name} is a {peer.role.name.lower()}",
            code="role_required",
            hint=f"`penstock keys add NAME --role {role.name.lower()}` makes a key that may"
            if peer.key
            else "the settings `operators` and `viewers` give the roles",
        )
    return peer


def require_owner(http: Request, request_id: str) -> Peer:
    """Find the peer of a request that is its own, or any where it is an operator.

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
    """Refuse the id of a request that is neither live nor ended."""
    return _not_found(f"there is no request `{request_id[:200]}`")


def response_not_found(response_id: str) -> RequestError:
    """Refuse the id of a response that is not kept."""
    hint = "deleted, not to be kept, replaced by later ones, or ended with its daemon: ask again"
    return _not_found(f"there is no response `{response_id[:200]}`", hint=hint)


def not_live(request_id: str) -> RequestError:
    """Refuse the id of a request that is not live."""
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
