"""Complete and expand shortened request ids.

Owns: the meaning of a shortened id; the verb completion, and its timeouts.
Invariant: a complete id is never taken for the beginning of another; an ambiguous beginning is
refused with all matches.
Never: guesses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from appliance.cli import terminal
from appliance.client import Client, ClientError, ReplyError
from appliance.configuration.address import UnixAddress, find
from engine.errors import PenstockError, UsageError

SHOWN_IDS = 8
_IDS = "`penstock ps -a` and `penstock log` show ids"
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
    frames = client.get("/v1/requests").get("data", [])
    return [frame["id"] for frame in frames if frame.get("phase") != "finished"]


def recent(client: Client) -> list[str]:
    """List live and recently ended requests."""
    return [frame["id"] for frame in client.get("/v1/requests").get("data", [])]


def logged(client: Client) -> list[str]:
    """List the ids of the log's newest rows."""
    rows = client.get("/v1/penstock/log", {"limit": str(SEARCHED_ROWS)}).get("data", [])
    return [row["id"] for row in rows]


def _begins(request_id: str, text: str) -> bool:
    return bool(text) and (
        request_id.startswith(text) or request_id.partition("-")[2].startswith(text)
    )


# What the shell can complete: verbs and options by typer, ids by asking the daemon.
# Invariant: whatever is wrong, completion offers nothing and says nothing.
# Never: asks a daemon that is not on this machine.


DEADLINE_S = 0.15
VARIABLE = "_PENSTOCK_COMPLETE"


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a shell's completion script: source <(penstock completion bash)."""
    from typer import completion as typers

    script = typers.get_completion_script(  # type: ignore[attr-defined]
        prog_name="penstock", complete_var=VARIABLE, shell=shell.value
    )
    terminal.write(script + "\n")


def prepare() -> None:
    """Teach typer the shells, if a shell runs us to complete a line.

    Typer does so only for its own options --install-completion and --show-completion, which the
    verb replaces.
    """
    if VARIABLE in os.environ:
        from typer import completion as typers

        typers.completion_init()  # type: ignore[attr-defined]


def request_ids(incomplete: str) -> list[str]:
    """List ids of live and recently finished requests."""
    return [name for name in _names("/v1/requests") if name.startswith(incomplete)]


def live_request_ids(incomplete: str) -> list[str]:
    """List ids of requests that can still be cancelled."""
    names = _names("/v1/requests", live_only=True)
    return [name for name in names if name.startswith(incomplete)]


def model_ids(incomplete: str) -> list[str]:
    """List ids of the served models."""
    return [name for name in _names("/v1/models") if name.startswith(incomplete)]


def _names(path: str, *, live_only: bool = False) -> list[str]:
    try:
        address = find(None, warn=lambda _: None)
        if not isinstance(address, UnixAddress):
            return []
        listed = Client(address, timeout_s=DEADLINE_S).get(path).get("data", [])
        return [
            item["id"] for item in listed if not (live_only and item.get("phase") == "finished")
        ]
    except (PenstockError, KeyError, TypeError, AttributeError):
        return []
