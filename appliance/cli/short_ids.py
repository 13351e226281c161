"""Ids as people type them: their first characters, with or without the `cmpl-` before them.

Owns: which request a few characters mean.
Invariant: an id that is complete is never taken for the beginning of another; characters with
which several begin are refused with all of them.
Never: guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from appliance.client import Client, ClientError, ReplyError

SHOWN_IDS = 8
SEARCHED_ROWS = 1000
_NOT_FOUND = 404

Answer = TypeVar("Answer")


class AmbiguousId(ClientError):
    """Several requests begin so."""

    exit_code = 2


def with_id(text: str, act: Callable[[str], Answer], *sources: Callable[[], list[str]]) -> Answer:
    """Do something with the request that is meant.

    Args:
        text: an id, or its beginning.
        act: called with the text, and if there is no such request with the id that begins so.
        sources: of the ids that may be meant, asked in this order until one of them has it.

    Raises:
        AmbiguousId: several begin so.
        ReplyError: what `act` raised, where none does.
    """
    try:
        return act(text)
    except ReplyError as error:
        found = None
        if error.status == _NOT_FOUND:
            found = next(filter(None, (the_one(text, source()) for source in sources)), None)
        if found is None:
            if error.status == _NOT_FOUND:
                error.hint = error.hint or "`penstock ps -a` and `penstock log` show ids"
            raise
    return act(found)


def the_one(text: str, ids: Iterable[str]) -> str | None:
    """The one id that begins so, with its prefix or after it; None if none does.

    Raises:
        AmbiguousId: several do.
    """
    found = list(dict.fromkeys(each for each in ids if _begins(each, text)))
    if text in found or not found:
        return None
    if len(found) > 1:
        more = ", ..." if len(found) > SHOWN_IDS else ""
        raise AmbiguousId(
            f"{len(found)} requests begin so", where=text, hint=", ".join(found[:SHOWN_IDS]) + more
        )
    return found[0]


def live(client: Client) -> list[str]:
    """Requests that can still be cancelled."""
    frames = client.get("/v1/requests").get("data", [])
    return [frame["id"] for frame in frames if frame.get("phase") != "finished"]


def recent(client: Client) -> list[str]:
    """Requests that are live or lately ended."""
    return [frame["id"] for frame in client.get("/v1/requests").get("data", [])]


def logged(client: Client) -> list[str]:
    """Those of the log's newest rows."""
    rows = client.get("/v1/penstock/log", {"limit": str(SEARCHED_ROWS)}).get("data", [])
    return [row["id"] for row in rows]


def _begins(request_id: str, text: str) -> bool:
    return bool(text) and (
        request_id.startswith(text) or request_id.partition("-")[2].startswith(text)
    )
