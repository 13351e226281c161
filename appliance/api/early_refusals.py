"""Refuse requests without parsing them while the queue is full, so that a flood costs little.

Invariant: the reply is the one that the long way would have given to a request that is in order;
what is in any way out of the ordinary goes the long way.
"""

from __future__ import annotations

import http
import math
import re
import secrets
import time
from collections.abc import Collection

import msgspec

from appliance.api.core.appliance import Appliance
from appliance.api.core.dialects import Dialect, dialect_of, error_body
from appliance.api.operator.cache import HttpCounts
from appliance.daemon.requests.request import Peer, Role
from engine.errors import QueueFull, RequestError

_FIRST_LINE = re.compile(rb"POST (/[a-z0-9/]+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})(?=\r\n)")
_SPECIAL = re.compile(
    rb"\r\n(?:connection|expect|origin|transfer-encoding|upgrade|x-request-id) *:"
)
"""Headers that change how a reply looks, or what follows it."""


class EarlyRefusals:
    """Refuses floods for one application before a request is parsed.

    Args:
        appliance: says whether there is room.
        paths: of the requests that take room.
    """

    def __init__(self, appliance: Appliance, paths: Collection[str], counts: HttpCounts) -> None:
        self._appliance = appliance
        self._paths = {path.encode(): path for path in paths}
        self._counts = counts

    def refuse(
        self, data: bytes, peer: Peer, headers: Collection[tuple[bytes, bytes]]
    ) -> bytes | None:
        """Make the reply to a whole request that there is no room for.

        Args:
            data: all that has come since the connection's last reply.
        """
        began_s = time.monotonic()
        line = _FIRST_LINE.match(data)
        path = None if line is None else self._paths.get(line[1])
        if path is None or peer.role < Role.USER or self._appliance.swaps is not None:
            return None
        try:
            self._appliance.check_available()
            if not _is_plain(data):
                return None
            self._appliance.check_room(peer.name, len(data))
        except QueueFull as error:
            reply = _reply(path, error, headers)
            self._counts.count(path, "POST", error.status, time.monotonic() - began_s)
            self._appliance.refused(peer, error)
            return reply
        except RequestError:
            return None
        return None


def _is_plain(data: bytes) -> bool:
    """Tell whether it is a whole request with a reply like all others."""
    end = data.find(b"\r\n\r\n")
    head = data[: end + 2].lower()
    length = _LENGTH.findall(head)
    return (
        end > 0
        and len(length) == 1
        and int(length[0]) == len(data) - end - 4
        and _SPECIAL.search(head) is None
    )


def _reply(path: str, error: QueueFull, headers: Collection[tuple[bytes, bytes]]) -> bytes:
    request_id = f"req-{secrets.token_hex(12)}"
    body = msgspec.json.encode(error_body(dialect_of(path), error, request_id))
    assert error.retry_after_ms is not None
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode(),
        *(b"%b: %b" % header for header in headers),
        b"x-request-id: %b" % request_id.encode(),
        b"openai-processing-ms: 0",
        b"retry-after: %d" % math.ceil(error.retry_after_ms / 1000),
        b"retry-after-ms: %d" % error.retry_after_ms,
        b"content-length: %d" % len(body),
        b"content-type: application/json",
    ]
    if dialect_of(path) is Dialect.ANTHROPIC:
        lines.append(b"request-id: %b" % request_id.encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
