"""Find the request that a shortened id means.

Invariant: a complete id is never taken for the beginning of another; an ambiguous beginning is
refused with all matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from appliance.client.calls import Client, ClientError, ReplyError
from engine.errors import UsageError

SHOWN_IDS = 8
LAST = "last"
"""A word for the newest request."""
_IDS = "`penstock ps -a` and `penstock log` show ids"
_FIRST = "`penstock run PROMPT` makes one"
SEARCHED_ROWS = 1000
_NOT_FOUND = 404

Answer = TypeVar("Answer")


class AmbiguousId(ClientError):
    """Several requests' ids begin with what was typed."""

    exit_code = 2


def with_id(text: str, act: Callable[[str], Answer], *sources: Callable[[], list[str]]) -> Answer:
    """Do something with the request of a shortened id.

    Args:
        text: an id, or its beginning.
        act: called with the text, then, if no such request exists, with the id that begins so.
        sources: of possible ids, asked in this order until one matches.

    Raises:
        UsageError: the text is empty.
        AmbiguousId: several begin so.
        ReplyError: raised by `act`, if no id matches.
    """
    if not text.strip():
        raise UsageError("it is empty", where="ID", hint=_IDS)
    if text == LAST:
        newest = next(filter(None, (source() for source in sources)), None)
        if newest is None:
            raise UsageError("there is no request yet", where="ID", hint=_FIRST)
        return act(newest[0])
    try:
        return act(text)
    except ReplyError as error:
        found = None
        if error.status == _NOT_FOUND:
            found = next(filter(None, (the_one(text, source()) for source in sources)), None)
        if found is None:
            if error.status == _NOT_FOUND:
                error.hint = error.hint or _IDS
            raise
    return act(found)


def the_one(text: str, ids: Iterable[str]) -> str | None:
    """Return the one id with this beginning, with or without its prefix; None: no match.

    Raises:
        AmbiguousId: several do.
    """
    found = list(dict.fromkeys(each for each in ids if _begins(each, text)))
    if text in found or not found:
        return None
    if len(found) > 1:
        more = ", ..." if len(found) > SHOWN_IDS else ""
        raise AmbiguousId(
            f"{text!r} matches {len(found)} requests; type more characters",
            hint=", ".join(found[:SHOWN_IDS]) + more,
        )
    return found[0]


def live(client: Client) -> list[str]:
    """List requests that can still be cancelled."""
    with client.reading():
        frames = client.rows("/v1/requests")
        return [str(frame["id"]) for frame in frames if frame.get("phase") != "finished"]


def recent(client: Client) -> list[str]:
    """List live and recently ended requests, the newest first."""
    frames = client.rows("/v1/requests")
    newest = sorted(frames, key=lambda frame: str(frame.get("received_at")), reverse=True)
    with client.reading():
        return [str(frame["id"]) for frame in newest]


def logged(client: Client) -> list[str]:
    """List the ids of the log's newest rows."""
    with client.reading():
        rows = client.rows("/v1/penstock/log", {"limit": str(SEARCHED_ROWS)})
        return [str(row["id"]) for row in rows]


def _begins(request_id: str, text: str) -> bool:
    return bool(text) and (
        request_id.startswith(text) or request_id.partition("-")[2].startswith(text)
    )
